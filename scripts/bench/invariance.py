"""Measure what batch invariance costs on a CPU: steps of a real model with and without it, in turns, in both dtypes."""

from __future__ import annotations

import sys
from array import array
from pathlib import Path
from typing import Any

from lib.results import make_parser, save

from bench.host import describe
from bench.sampler import ROWS, StepCase, decode_plan, measure, num_blocks, show
from jaxllm import SamplingParams
from jaxllm.engine.offline.llm_engine import LLMEngine
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.scheduling.plan import Chunk, Owner, StepPlan

PROMPT = 512
GREEDY = SamplingParams(temperature=0.0)


def main() -> int:
    """Measure, print, and write."""
    parser = make_parser(__doc__, "batch_invariance_cpu.json")
    parser.add_argument("model", help="a .gguf, folder or hub id")
    parser.add_argument("--repeats", type=int, default=20, help="turns to measure (default: %(default)s)")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    for dtype in ("bfloat16", "float32"):
        runners = {
            name: make_runner(args.model, dtype, invariant=name == "invariant") for name in ("free", "invariant")
        }
        for title, plan in (("decode, 64 rows", decode_step), ("prefill, 512 tokens", prefill_step)):
            cases = {name: StepCase(runner, plan(runner)).run for name, runner in runners.items()}
            figures[f"{dtype}: {title}"] = table = measure(cases, "free", args.repeats)
            show(f"{dtype}: {title}", table)
    settings = {"model": Path(args.model).name, "sequences": ROWS, "repeats": args.repeats}
    save(args.json, describe() | {"settings": settings, "figures": figures})
    return 0


def make_runner(model: str, dtype: str, *, invariant: bool) -> Any:
    """Start an engine that compiles only what is run, and return its model runner."""
    settings = EngineArgs(model=model, dtype=dtype, batch_invariant=invariant, max_num_seqs=ROWS, enforce_eager=True)
    engine: Any = LLMEngine.from_engine_args(settings)
    return engine._core._core._runner


def decode_step(runner: Any) -> StepPlan:
    """Plan a step in which every row decodes one token."""
    compiler = runner.compiler
    return decode_plan(GREEDY, compiler.config.block_size, num_blocks(runner), compiler.model.config.vocab_size)


def prefill_step(runner: Any) -> StepPlan:
    """Plan a step of one whole prompt."""
    block_size = runner.compiler.config.block_size
    chunk = Chunk(
        owner=Owner(request_id="0", num_prompt_tokens=PROMPT, params=GREEDY, seed=0),
        start=0,
        token_ids=array("i", range(PROMPT)),
        previous_row=None,
        block_ids=(array("i", range(1, 1 + -(-PROMPT // block_size))),),
        samples=True,
        num_output_tokens=0,
    )
    return StepPlan(step_id=0, others=(chunk,), num_preempted=0)


if __name__ == "__main__":
    sys.exit(main())
