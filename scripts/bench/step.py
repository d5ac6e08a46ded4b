"""Show where a step's time goes on this CPU: decode steps under XLA's profiler, sorted by part of the model.

    scripts/bench.py step MODEL [--rows 1 64] [--context 256] [--json OUT]

Each row of the table is a batch of sequences. A part's milliseconds are those of its operations; these mostly run one
after the other, each on all cores, so their sum is about the step, and "host and gaps" is the rest. Profiling slows a
step: the first column is its time without the profiler.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
from lib import device_time
from lib.machine import describe_machine
from lib.results import make_parser, save
from lib.sheet import print_sheet

from jaxllm import LLM, SamplingParams, TokensPrompt
from jaxllm.execution.model_runner import ModelRunner
from jaxllm.execution.packing import pick_bucket
from jaxllm.sampling.inputs import Sampling

STEPS = 12
SCOPES = {"project": "layers' matmuls", "finish": "layers' matmuls", "attend": "attention", "logits": "output head"}
"""Named scopes of `models`, and the part they belong to."""
REST = "everything else"
CONTAINERS = ("while", "conditional", "call")
INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.-]+) = .*?\s([a-z-]+)\(")


def main() -> int:
    """Profile, print, and write."""
    parser = make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--linear-backend", default="auto", help="as the engine's argument")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as the engine's argument")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=256)
    args = parser.parse_args()
    # Otherwise a cached program may have other names.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    settings: dict[str, Any] = {"enable_prefix_caching": False, "enforce_eager": True}
    settings |= {"linear_backend": args.linear_backend, "kv_cache_dtype": args.kv_cache_dtype}
    llm = LLM(args.model, dtype=args.dtype, max_num_seqs=max(args.rows), **settings)
    rows = [profile(llm, count, args.context) for count in args.rows]
    print_sheet(rows)
    settings = {name: getattr(args, name) for name in ("dtype", "linear_backend", "context")}
    report = {"machine": describe_machine(), "date": date.today().isoformat(), "jax": jax.__version__}
    save(args.json, report | {"model": Path(args.model).name} | settings | {"rows": rows})
    return 0


def profile(llm: LLM, num_seqs: int, context: int) -> dict[str, Any]:
    """Return the milliseconds of a decode step of a number of sequences, and of its parts."""
    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=10 * STEPS, ignore_eos=True, detokenize=False)
    names = [f"{num_seqs}-{index}" for index in range(num_seqs)]
    for index, name in enumerate(names):
        ids = [(7 * place + 13 * index) % 1000 + 3 for place in range(context)]
        engine.add_request(name, TokensPrompt(prompt_token_ids=ids), sampling)
    decoding: set[str] = set()
    while len(decoding) < num_seqs:
        decoding |= {output.request_id for output in engine.step()}
    plain = [timed_step(engine) for _ in range(STEPS)]
    profiled: list[float] = []
    operations = device_time.profile(lambda: profiled.extend(timed_step(engine) for _ in range(STEPS)))
    traced = sum(profiled)
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    parts = parts_by_operation(decode_program(engine._core._core._runner, num_seqs))  # type: ignore[attr-defined]
    seconds: defaultdict[str, float] = defaultdict(float)
    for operation in operations:
        if operation.name in parts:
            seconds[parts[operation.name]] += operation.seconds
    busy = sum(seconds.values())
    seconds["host and gaps"] = max(0.0, traced - busy)
    per_step = {part: round(each * 1e3 / STEPS, 2) for part, each in sorted(seconds.items())}
    return {
        "sequences": num_seqs,
        "step_ms": round(statistics.median(plain) * 1e3, 2),
        "profiled_ms": round(traced * 1e3 / STEPS, 2),
        **per_step,
        "operations' share": round(busy / traced, 2),
    }


def timed_step(engine: Any) -> float:
    """Return the seconds of one step of the engine."""
    start = perf_counter()
    engine.step()
    return perf_counter() - start


def decode_program(runner: ModelRunner, num_seqs: int) -> str:
    """Return the text of the compiled program that decodes a number of sequences."""
    bucket = pick_bucket(runner.compiler.shapes.buckets, num_seqs, num_seqs)
    return runner.programs.get(runner.compiler.shapes.step_shape(bucket, Sampling.PLAIN, has_chunks=False)).as_text()


def parts_by_operation(program: str) -> Mapping[str, str]:
    """Return the part of the model that each operation of a compiled program belongs to."""
    parts = {}
    for line in program.splitlines():
        instruction = INSTRUCTION.match(line)
        if instruction and instruction[2] not in CONTAINERS:
            source, kernel = (re.search(rf'{field}="([^"]*)"', line) for field in ("op_name", "custom_call_target"))
            parts[instruction[1]] = part_of(source[1] if source else "", kernel[1] if kernel else "")
    return parts


def part_of(op_name: str, kernel: str = "") -> str:
    """Return the part of the model that an operation belongs to, by its traced scopes and the kernel it calls."""
    scope = next((scope for scope in reversed(op_name.split("/")) if scope in SCOPES), "")
    is_matmul = op_name.endswith("dot_general") or kernel.startswith("linear")
    return SCOPES[scope] if scope == "attend" or (scope in SCOPES and is_matmul) else REST


if __name__ == "__main__":
    sys.exit(main())
