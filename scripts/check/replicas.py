"""Kill one of two replicas under load, again and again: only its own requests may end, and another must serve soon.

    scripts/check.py replicas [MODEL] [--backend mp ray] [--times 5] [--requests 24]

MODEL is SmolLM2 by default. Half of the requests ask for one replica, half for the other. One replica is killed
(kill -9) at a random moment, and then the other; because a replica that fails often restarts only after a pause, each
pair of kills has a new engine. Only requests of the killed replica may fail, and their errors must say so; all other
outputs must be a single engine's, token for token; a request for the new replica must end within 15 s of the kill. Ray
actors need the extra: pip install 'jaxllm[ray]'.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from lib.evidence import Evidence
from lib.machine import describe_machine

MODEL = Path.home() / ".cache/jaxllm/models/SmolLM2-135M-Instruct.Q4_1.gguf"
SECONDS = 15.0
SETTINGS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 2**28,
    "disable_log_stats": True,
}
WORDS = ("river", "stone", "cloud", "engine", "paper", "garden", "winter", "signal", "copper", "window", "bread")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the model, the backends, and the file of evidence."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--backend", nargs="+", choices=["mp", "ray"], default=["mp"], help="default: mp")
    parser.add_argument("--json", type=Path, metavar="OUT")
    return parser


def main() -> int:
    """Kill replicas; return 0 if all checks passed."""
    parser = make_parser(__doc__)
    parser.add_argument("--times", type=int, default=5, help="pairs of kills; default: 5")
    parser.add_argument("--requests", type=int, default=24, help="requests that run at a kill; default: 24")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    evidence = Evidence(args.json, describe_machine() | {"model": args.model.stem, "seconds": SECONDS})
    asyncio.run(check(args, evidence))
    return evidence.finish()


async def check(args: argparse.Namespace, evidence: Evidence) -> None:
    """Kill replicas of each backend."""
    rng = random.Random(args.seed)
    prompts = [" ".join(rng.choices(WORDS, k=rng.randint(4, 40))) for _ in range(args.requests)]
    async with engine(args.model) as llm:
        expected = await asyncio.gather(*(run(llm, prompt, number) for number, prompt in enumerate(prompts)))
    for backend in args.backend:
        for _ in range(args.times):
            async with engine(args.model, data_parallel_size=2, data_parallel_backend=backend) as llm:
                for victim in rng.sample(range(2), 2):
                    await llm.warm_up()
                    evidence.add({"backend": backend} | await kill_one(llm, victim, prompts, expected, rng))


@asynccontextmanager
async def engine(model: Path, **settings: Any) -> AsyncIterator[Any]:
    """Run an engine, and end it."""
    from jaxllm import AsyncEngineArgs, AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **(SETTINGS | settings)))
    try:
        yield llm
    finally:
        llm.shutdown()


async def answer(llm: Any, prompt: Any, *, replica: int | None = None, **sampling: Any) -> Any:
    """Return a request's output; it is an error if the replica has ended."""
    from jaxllm import SamplingParams
    from jaxllm.sampling_params import RequestOutputKind

    params = SamplingParams(ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY, **sampling)
    name = str(time.monotonic_ns())
    outputs = [output async for output in llm.generate(prompt, params, name, data_parallel_rank=replica)]
    return outputs[-1]


async def run(llm: Any, prompt: str, number: int, replica: int | None = None) -> Any:
    """Return the output of a request; its number is its seed."""
    return await answer(llm, prompt, replica=replica, temperature=0.8, seed=number, max_tokens=48)


async def run_until_served(llm: Any, prompt: str, replica: int) -> Any:
    """Return the output of request 0, sent again until its replica answers."""
    while has_failed(output := await run(llm, prompt, 0, replica)):
        await asyncio.sleep(0.1)
    return output


def has_failed(output: Any) -> bool:
    """Return whether a request ended with an error."""
    return not isinstance(output, BaseException) and output.outputs[0].finish_reason == "error"


async def kill_one(
    llm: Any, victim: int, prompts: list[str], expected: list[Any], rng: random.Random
) -> dict[str, Any]:
    """Kill a replica under load; return the outcome."""
    replicas = [number % 2 for number in range(len(prompts))]
    tasks = [
        asyncio.create_task(run(llm, prompt, number, replica))
        for number, (prompt, replica) in enumerate(zip(prompts, replicas, strict=True))
    ]
    await asyncio.sleep(rng.uniform(0.05, 1.0))
    os.kill(llm.core_pids[victim], signal.SIGKILL)
    killed = time.perf_counter()
    again = asyncio.create_task(run_until_served(llm, prompts[0], victim))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    missed, num_failed = [], 0
    for replica, result, right in zip(replicas, results, expected, strict=True):
        if replica == victim and has_failed(result):
            num_failed += 1
        elif isinstance(result, BaseException):
            missed.append(f"a request of replica {replica} failed: {result!r}")
        elif result.outputs[0].token_ids != right.outputs[0].token_ids:
            missed.append(f"tokens of replica {replica} differ from one engine's")
    if (await again).outputs[0].token_ids != expected[0].outputs[0].token_ids:
        missed.append("the new replica's tokens differ")
    seconds = time.perf_counter() - killed
    if seconds > SECONDS:
        missed.append("the new replica was late")
    return {"killed": victim, "failed": num_failed, "serves_again_s": round(seconds, 1), "missed": missed}


if __name__ == "__main__":
    sys.exit(main())
