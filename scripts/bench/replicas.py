"""Measure the gain of routing requests to the replica that has their prefix cached.

    scripts/bench.py replicas [MODEL] [--backend mp ray] [--times 3] [--json OUT]

MODEL is SmolLM2 by default. Prompts begin with one of `--prefixes` texts of 256 tokens, in random order,
16 in flight at a time; a replica's KV cache has room for about half of the prefixes beside the running requests.
Engines take turns: one routes by load and prefix, as by default, the next by load alone.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from typing import Any
from unittest import mock

from check.replicas import answer, engine, make_parser
from lib.evidence import Evidence
from lib.machine import describe_machine

PREFIX_TOKENS, OWN_TOKENS, MAX_TOKENS, IN_FLIGHT = 256, 16, 8, 16
BLOCK_SIZE = 32


def main() -> int:
    """Measure each backend."""
    parser = make_parser(__doc__)
    parser.add_argument("--prefixes", type=int, default=16, help="default: 16")
    parser.add_argument("--requests", type=int, default=160, help="default: 160")
    parser.add_argument("--times", type=int, default=3, help="rounds; default: 3")
    args = parser.parse_args()
    evidence = Evidence(args.json, describe_machine() | {"model": args.model.stem, "requests": args.requests})
    for backend in args.backend:
        rates: dict[bool, list[float]] = {True: [], False: []}
        for round_index in range(args.times):
            for by_prefix in (True, False) if round_index % 2 == 0 else (False, True):
                row = asyncio.run(measure(args, backend, round_index, by_prefix=by_prefix))
                rates[by_prefix].append(row["tokens_per_s"])
                evidence.add(row)
        ratio = statistics.median(rates[True]) / statistics.median(rates[False])
        evidence.note(**{f"{backend}_speedup": round(ratio, 2)})
    return evidence.finish()


async def measure(args: argparse.Namespace, backend: str, seed: int, *, by_prefix: bool) -> dict[str, Any]:
    """Return the hit rate and the tokens per second, prompts and outputs together, of one engine."""
    from jaxllm.engine.client import replica_set
    from jaxllm.engine.client.router import Router

    rng = random.Random(seed)
    prefixes = [[rng.randrange(1000, 40_000) for _ in range(PREFIX_TOKENS)] for _ in range(args.prefixes)]
    prompts = [
        rng.choice(prefixes) + [rng.randrange(1000, 40_000) for _ in range(OWN_TOKENS)] for _ in range(args.requests)
    ]
    of_prefixes = args.prefixes // 2 * PREFIX_TOKENS
    running = IN_FLIGHT // 2 * (OWN_TOKENS + MAX_TOKENS + BLOCK_SIZE)  # beside their prefixes
    settings = {
        "data_parallel_size": 2,
        "data_parallel_backend": backend,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": (of_prefixes + running) // BLOCK_SIZE,
        "max_model_len": 1024,
    }

    def router(block_size: int | None, *seats: int) -> Router:
        """Return the router; without a block size it ignores prefixes."""
        return Router(block_size if by_prefix else None, *seats)

    with mock.patch.object(replica_set, "Router", router):
        async with engine(args.model, **settings) as llm:
            await llm.warm_up()
            start = time.perf_counter()
            outputs = await run_all(llm, prompts)
            seconds = time.perf_counter() - start
    num_prompt = sum(map(len, prompts))
    num_cached = sum(each.num_cached_tokens for each in outputs)
    return {
        "backend": backend,
        "by_prefix": by_prefix,
        "hit_rate": round(num_cached / num_prompt, 3),
        "tokens_per_s": round((num_prompt + MAX_TOKENS * len(prompts)) / seconds),
        "seconds": round(seconds, 1),
    }


async def run_all(llm: Any, prompts: list[list[int]]) -> list[Any]:
    """Return the outputs of all prompts, with a limited number in flight."""
    room = asyncio.Semaphore(IN_FLIGHT)

    async def run(prompt: list[int]) -> Any:
        async with room:
            return await answer(llm, {"prompt_token_ids": prompt}, temperature=0.0, max_tokens=MAX_TOKENS)

    return await asyncio.gather(*map(run, prompts))


if __name__ == "__main__":
    sys.exit(main())
