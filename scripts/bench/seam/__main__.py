"""Measure the cost of running an engine's front end and its core as two processes, without HTTP.

    scripts/bench.py seam all            # writes benchmarks/results/seam.json

cpu         CPU time per token of the front end, from the core's message to the text that a reader of deltas gets, and
            of the core's process less what making the tokens takes. The core has no model (lib/mock_core.py). As fast
            as it goes, and at 50 tokens/s and stream, where the delay from the core's step to the reader counts.
throughput  tokens per second of 64 streams through AsyncLLM by those of LLM.generate with the same prompts, real
            engines of SmolLM2, in turns. Both live meanwhile: the idle one's CPU time is measured too.
startup     from the start of a process to its first token, AsyncLLM by LLM, caches warm, in turns.

Figures are medians of rounds. Other load on the machine distorts wall times, but not CPU times and ratios.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fetch_models import FetchError
from lib.machine import describe_sources, versions
from lib.results import find_model, make_server_parser, result_file, save_part

GOALS = {"front_cpu_us_per_token": 25.0, "ratio": 0.97, "more_seconds": 0.5}
"""The front end's CPU time per token at 64 streams as fast as it goes, the throughput's ratio, the start's delay."""
STREAMS = (1, 8, 64, 256)
RATE = 50.0
KV_BYTES = 1 << 30
SMOLLM2_VOCAB = 49152


def measure_cpu(args: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of `cpu`."""
    from bench.seam.cpu import Run, measure_streams

    rounds = 1 if args.quick else args.rounds
    num_tokens = {1: 2000, 8: 2000, 64: 500, 256: 200}
    saturated = [Run(n, 20 if args.quick else num_tokens[n], rounds) for n in STREAMS]
    paced = [Run(n, 10 if args.quick else 250, rounds) for n in (1, 64)]
    model = str(find_model(args))
    return {"saturated": measure_streams(model, saturated, None), "paced": measure_streams(model, paced, RATE)}


def measure_throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of `throughput`."""
    from bench.seam import engines

    engine = {"max_num_seqs": engines.NUM_STREAMS, "kv_cache_memory_bytes": KV_BYTES, "disable_log_stats": True}
    with tempfile.TemporaryDirectory(prefix="bench-seam-") as scratch:
        return engines.measure_throughput(
            find_model(args),
            rounds=2 if args.quick else args.rounds,
            num_tokens=4 if args.quick else 128,
            vocab_size=args.vocab_size,
            engine=engine | args.engine,
            scratch=Path(scratch),
        )


def measure_startup(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of `startup`."""
    from bench.seam import engines

    with tempfile.TemporaryDirectory(prefix="bench-seam-") as scratch:
        pairs = 1 if args.quick else args.rounds
        engine = {"disable_log_stats": True} | args.engine
        return engines.measure_startup(find_model(args), pairs=pairs, engine=engine, scratch=Path(scratch))


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "cpu": measure_cpu,
    "throughput": measure_throughput,
    "startup": measure_startup,
}


def verdicts(part: str, figures: dict[str, Any]) -> dict[str, bool]:
    """Return which goals a part's figures reach."""
    if part == "cpu":
        cost = next(row for row in figures["saturated"] if row["streams"] == 64)["front_cpu_us_per_token"]
        return {"front_cpu_us_per_token": cost <= GOALS["front_cpu_us_per_token"]}
    if part == "throughput":
        return {"ratio": figures["ratio"] >= GOALS["ratio"]}
    return {"more_seconds": figures["more_seconds"] <= GOALS["more_seconds"]}


def main() -> int:
    """Measure, print and save; returns the exit status."""
    parser = make_server_parser(__doc__)
    parser.add_argument(
        "parts", nargs="+", choices=(*PARTS, "all"), metavar="PART", help="cpu, throughput, startup, all"
    )
    parser.add_argument("--vocab-size", type=int, default=SMOLLM2_VOCAB, help="of the model (default: %(default)s)")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="more engine arguments")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args()
    out = result_file(args, "seam.json")
    try:
        for part in PARTS if "all" in args.parts else args.parts:
            facts = describe_sources() | {
                "versions": versions("jax", "msgspec", "pyzmq", "tokenizers") | {"python": platform.python_version()},
                "model": find_model(args).name,
            }
            figures = PARTS[part](args)
            save_part(out, {part: facts | {"figures": figures, "goals_reached": verdicts(part, figures)}})
    except (FetchError, OSError, RuntimeError) as error:
        print(f"bench seam: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
