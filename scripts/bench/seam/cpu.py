"""Measure the cost of the path from an engine core to a reader, with a core that makes tokens without a model."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lib.mock_core import MockCore, start_mock_process
from lib.servers import cpu_seconds

from jaxllm.core_messages import EngineCoreRequest
from jaxllm.engine.client.remote_client import RemoteClient
from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.online.admission import Admission
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.inputs import TokensPrompt
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

PROMPT_IDS = [8, 9, 10]
OWN_STEPS = 400


@dataclass(frozen=True)
class Run:
    """A run: the number of streams of deltas, the tokens of each, and the number of rounds."""

    num_streams: int
    num_tokens: int
    rounds: int


@dataclass(frozen=True)
class Sample:
    """One round's CPU seconds and wall seconds."""

    tokens: int
    outputs: int
    seconds: float
    front_cpu: float
    core_cpu: float
    delays: Sequence[float]
    """The seconds from the end of the core's step to the reader, for each output."""


def measure_streams(
    model: str, runs: Sequence[Run], tokens_per_second: float | None, **engine: Any
) -> list[dict[str, Any]]:
    """Return a row of figures for each run, all through one mock core in a process of its own.

    `tokens_per_second` is of each stream; None is as fast as the mock core can. `engine` are more engine arguments.
    """
    most = max(run.num_streams for run in runs)
    engine_args = AsyncEngineArgs(model=model, max_num_seqs=most, disable_log_stats=True, **engine)

    def start() -> tuple[RemoteClient, FrontEnd]:
        return start_mock_process(engine_args, tokens_per_second=tokens_per_second)

    with AsyncLLM(start, admission=Admission(None, None)) as llm:
        samples = asyncio.run(_measure(llm, llm.core_pids[0], runs))
    return [_row(run, of_run, tokens_per_second) for run, of_run in zip(runs, samples, strict=True)]


async def _measure(llm: AsyncLLM, core_pid: int, runs: Sequence[Run]) -> list[list[Sample]]:
    await _round(llm, core_pid, Run(runs[0].num_streams, 16, 1))  # modules that load at the first token
    return [[await _round(llm, core_pid, run) for _ in range(run.rounds)] for run in runs]


async def _round(llm: AsyncLLM, core_pid: int, run: Run) -> Sample:
    delays: list[float] = []
    num_outputs = 0

    async def read(index: int) -> None:
        nonlocal num_outputs
        params = SamplingParams(
            max_tokens=run.num_tokens, ignore_eos=True, seed=97 * index, output_kind=RequestOutputKind.DELTA
        )
        num_read = 0
        async for output in llm.generate(TokensPrompt(prompt_token_ids=PROMPT_IDS), params, f"{index}"):
            assert output.metrics is not None
            delays.append(time.monotonic() - output.metrics.last_token_ts)
            num_read += len(output.outputs[0].token_ids)
            num_outputs += 1
        if num_read != run.num_tokens:
            raise RuntimeError(f"a stream of {run.num_tokens} tokens has brought {num_read}")

    front, core, began = time.process_time(), cpu_seconds(core_pid), time.perf_counter()
    await asyncio.gather(*(read(index) for index in range(run.num_streams)))
    return Sample(
        tokens=run.num_streams * run.num_tokens,
        outputs=num_outputs,
        seconds=time.perf_counter() - began,
        front_cpu=time.process_time() - front,
        core_cpu=cpu_seconds(core_pid) - core,
        delays=delays,
    )


def _row(run: Run, samples: Sequence[Sample], tokens_per_second: float | None) -> dict[str, Any]:
    def median_us(seconds: Sequence[float]) -> float:
        return round(statistics.median(seconds) * 1e6, 1)

    making = own_seconds(run.num_streams)
    row: dict[str, Any] = {
        "streams": run.num_streams,
        "tokens_per_second_of_a_stream": tokens_per_second,
        "front_cpu_us_per_token": median_us([each.front_cpu / each.tokens for each in samples]),
        "core_cpu_us_per_token": median_us([each.core_cpu / each.tokens - making for each in samples]),
        "mock_cpu_us_per_token": median_us([making]),
        "tokens_per_second": round(statistics.median(each.tokens / each.seconds for each in samples)),
        "tokens_per_output": round(statistics.median(each.tokens / each.outputs for each in samples), 2),
    }
    if tokens_per_second is not None:  # else outputs queue up before the reader, however short the way
        delays = sorted(delay for each in samples for delay in each.delays)
        row |= {name: round(delays[int(q * (len(delays) - 1))] * 1e3, 2) for name, q in QUANTILES.items()}
    return row


QUANTILES = {"delay_ms_p50": 0.5, "delay_ms_p99": 0.99, "delay_ms_max": 1.0}


def own_seconds(num_streams: int) -> float:
    """Return the CPU seconds that a mock core takes to make a token, without a front end."""
    core = MockCore(list(range(1000)), max_num_seqs=num_streams, num_blocks=2)
    for index in range(num_streams):
        core.add_request(
            EngineCoreRequest(
                request_id=str(index), prompt_token_ids=[1], sampling_params=SamplingParams(), eos_token_id=None,
                max_tokens=OWN_STEPS, seed=index, arrival_time=0.0,
            )
        )  # fmt: skip
    began = time.process_time()
    for _ in range(OWN_STEPS):
        core.step()
    return (time.process_time() - began) / OWN_STEPS / num_streams
