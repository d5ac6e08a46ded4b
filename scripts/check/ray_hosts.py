"""Check that Ray starts the hosts of a model, and that a lost one ends the engine.

    scripts/check.py ray_hosts [--hosts 2] [--times 3]

The cluster has as many nodes of this machine, of one CPU each, and each takes one host. A tiny checkpoint must give the
tokens of one process. Then a host is killed (kill -9) while requests run, the first and the others in turns: all
requests must end with an error, and no process may stay. Needs the extra: pip install 'jaxllm[ray]'.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from lib.evidence import Evidence
from lib.machine import describe_machine
from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

from jaxllm import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests/data/tiny/qwen3"
SETTINGS: dict[str, Any] = {
    "model": str(MODEL),
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 33,
    "disable_log_stats": True,
}
END_SECONDS = 20.0


def main() -> int:
    """Compare outputs, kill hosts; return 0 if all is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--times", type=int, default=3, help="kills; default: 3")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    evidence = Evidence(args.json, describe_machine() | {"ray": ray.__version__, "hosts": args.hosts})
    with LLM(**SETTINGS) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params(), use_tqdm=False)
    expected = [list(output.outputs[0].token_ids) for output in outputs]
    environment = {"env_vars": {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        for _ in range(args.hosts - 1):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, runtime_env=environment, log_to_driver=False)
        for index in range(args.times):
            evidence.add(asyncio.run(check(args.hosts, index % args.hosts, expected)))
    finally:
        ray.shutdown()
        cluster.shutdown()
    return evidence.finish()


PROMPTS = [[3 + length + index for index in range(length)] for length in (2, 9, 23, 40)]


def params(max_tokens: int = 24) -> SamplingParams:
    """Return the parameters of a request; its tokens have no text."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


async def check(num_hosts: int, killed: int, expected: list[list[int]]) -> dict[str, Any]:
    """Run requests on all hosts, then kill one; return the row of evidence."""
    spread = {"tensor_parallel_size": num_hosts, "nnodes": num_hosts, "distributed_executor_backend": "ray"}
    began = time.monotonic()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**SETTINGS, **spread))
    started = time.monotonic() - began
    try:
        got = await asyncio.gather(*(run(llm, f"{number}", ids, 24) for number, ids in enumerate(PROMPTS)))
        places = llm._core.remote.handle._places  # pyright: ignore[reportAttributeAccessIssue]
        nodes, pids = zip(*ray.get(places), strict=True)
        running = [asyncio.create_task(run(llm, f"long {number}", PROMPTS[0], 400)) for number in range(4)]
        await asyncio.sleep(0.5)
        os.kill(pids[killed], signal.SIGKILL)
        began = time.monotonic()
        ends = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), END_SECONDS)
        ended = time.monotonic() - began
    finally:
        llm.shutdown()
    deadline = time.monotonic() + END_SECONDS
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    missed = [] if got == expected else ["other tokens than one process gives"]
    missed += [] if len(set(nodes)) == num_hosts else ["hosts share a node"]
    missed += [] if all(isinstance(end, Exception) for end in ends) else ["a request has not ended with an error"]
    missed += [f"processes stay: {left}"] if left else []
    return {
        "killed": killed,
        "start_s": round(started, 1),
        "ended_s": round(ended, 1),
        "error": str(ends[0])[:200],
        "missed": missed,
    }


async def run(llm: AsyncLLM, name: str, ids: list[int], max_tokens: int) -> list[int]:
    """Return a request's tokens."""
    stream = llm.generate({"prompt_token_ids": ids}, params(max_tokens), name)
    *_, last = [output async for output in stream]
    return list(last.outputs[0].token_ids)


if __name__ == "__main__":
    sys.exit(main())
