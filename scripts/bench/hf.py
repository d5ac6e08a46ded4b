"""Measure HF Transformers' decode step with random weights of a real model's shape, and a static cache.

A step's time is the time of `generate` for several new tokens less its time for one. First op by op, then with the
decode step that `generate` compiles for a static cache. --dry-run does the first with a toy model on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

from lib.evidence import Evidence, make_parser
from lib.shapes import MODELS, TOY
from lib.torch_device import describe_torch, missing

PROMPT, OUTPUT = 128, 49


def main() -> int:
    """Measure, print, and write."""
    parser = make_parser(__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    if reason := missing("torch", "transformers"):
        return Evidence(args.json, {}).skip(reason)
    evidence = Evidence(args.json, describe_torch() | {"model": args.model})
    batch, prompt, output = (2, 4, 3) if args.dry_run else (args.batch, PROMPT, OUTPUT)
    generate = load(MODELS[args.model] | (TOY if args.dry_run else {}), batch, prompt, is_dry=bool(args.dry_run))
    for is_compiled in (False,) if args.dry_run else (False, True):
        seconds = lambda count: timed(lambda: generate(count, is_compiled))  # noqa: B023, E731
        seconds(output)  # compiles
        step = min(seconds(output) - seconds(1) for _ in range(1 if args.dry_run else 2)) / (output - 1)
        row = {"batch": batch, "context": prompt, "compiled": is_compiled, "step_ms": round(step * 1e3, 3)}
        evidence.add(row | {"tokens_per_s": round(batch / step, 1)})
    return evidence.finish()


def load(hf: dict[str, Any], batch: int, prompt: int, *, is_dry: bool) -> Callable[[int, bool], Any]:
    """Return a function that generates tokens for random prompts, compiled or op by op."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device("cpu" if is_dry else "cuda")
    config = AutoConfig.for_model(**hf)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        ids = torch.randint(3, 100, (batch, prompt))

    @torch.inference_mode()
    def generate(count: int, is_compiled: bool) -> Any:
        settings = {"do_sample": False, "min_new_tokens": count, "max_new_tokens": count, "pad_token_id": 0}
        settings |= {"cache_implementation": "static", "disable_compile": not is_compiled}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **settings).tolist()

    return generate


def timed(run: Callable[[], Any]) -> float:
    """Return the seconds of a call that returns its result on the host."""
    start = perf_counter()
    run()
    return perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
