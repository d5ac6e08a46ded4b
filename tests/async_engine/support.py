"""Helpers that start asynchronous engines, read their streams, and check that nothing is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import glob
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from lib.mock_core import start_mock, start_mock_process

from jaxllm.engine.client.core_handle import CoreProcess
from jaxllm.engine.client.remote_core import RemoteCore
from jaxllm.engine.front.metrics import Counter, Gauge
from jaxllm.engine.front.start import meet
from jaxllm.engine.online.admission import Admission
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.outputs import RequestOutput
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from tests.e2e.tiny_engine import CASE, CONTEXT
from tests.models.tiny import folder

PROMPT = list(range(30, 42))
END_SECONDS = 2.0
"""Every request has to end within this time after its engine."""


def tiny_args(tokenizer: str | None = None, **arguments: Any) -> AsyncEngineArgs:
    """Return arguments of a tiny model in float32, in blocks of 8 and steps of 16 tokens; little is to be compiled."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "tokenizer": tokenizer,
        "skip_tokenizer_init": tokenizer is None,
        "block_size": 8,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 16,
        "cudagraph_capture_sizes": [16],
        "enforce_eager": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "hf_overrides": {"max_position_embeddings": CONTEXT},
    }
    return AsyncEngineArgs(model=str(folder(CASE)), **(defaults | arguments))


@contextlib.contextmanager
def mock_llm(
    args: AsyncEngineArgs,
    *,
    in_process: bool = False,
    tokens_per_second: float | None = None,
    replies: str | None = None,
) -> Iterator[AsyncLLM]:
    """Start an engine whose core has no model, in a thread or in a process; lib/mock_core.py describes `replies`."""

    def start_thread():
        start = functools.partial(start_mock, args, tokens_per_second=tokens_per_second, replies=replies)
        return meet(RemoteCore.in_thread(start), args, asks_core=False)

    def start_process():
        return start_mock_process(args, tokens_per_second=tokens_per_second, replies=replies)

    start = start_process if in_process else start_thread
    with AsyncLLM(start, admission=Admission.of(args), reasoning_parser=args.reasoning_parser) as llm:
        yield llm


def greedy(**fields: Any) -> SamplingParams:
    """Return params of a greedy request for 8 tokens, as deltas; the seed is where a core without a model begins."""
    defaults: dict[str, Any] = {"temperature": 0.0, "seed": 1, "max_tokens": 8, "ignore_eos": True}
    defaults["output_kind"] = RequestOutputKind.DELTA
    return SamplingParams(**(defaults | fields))


def ids(prompt: list[int] | None = None) -> dict[str, list[int]]:
    """Return a prompt of token ids."""
    return {"prompt_token_ids": PROMPT if prompt is None else prompt}


async def read(
    llm: AsyncLLM, request_id: str, params: SamplingParams, prompt: Any = None, priority: int = 0
) -> list[RequestOutput]:
    """Return all outputs of a request, as they come."""
    stream = llm.generate(ids() if prompt is None else prompt, params, request_id, priority=priority)
    return [output async for output in stream]


async def read_one(llm: AsyncLLM, request_id: str, params: SamplingParams, prompt: Any = None) -> RequestOutput:
    """Return the last output of a request."""
    return (await read(llm, request_id, params, prompt))[-1]


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    """Return the tokens of the first completion of some deltas."""
    return [token for output in outputs for each in output.outputs if each.index == 0 for token in each.token_ids]


async def until(condition: Callable[[], bool], seconds: float = END_SECONDS) -> None:
    """Wait until a condition is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come about in time"
        await asyncio.sleep(0.01)


def remote_of(llm: AsyncLLM) -> RemoteCore:
    """Return the client of an engine's only core."""
    remote = llm._core.remote
    assert isinstance(remote, RemoteCore)
    return remote


def handle_of(llm: AsyncLLM) -> CoreProcess:
    """Return the watch over the process of an engine's core."""
    handle = remote_of(llm).handle
    assert isinstance(handle, CoreProcess)
    return handle


def core_process(llm: AsyncLLM) -> psutil.Process:
    """Return the process of an engine's core."""
    return psutil.Process(handle_of(llm).pid)


def metric(llm: AsyncLLM, name: str, **labels: str) -> float:
    """Return a counter's or gauge's value by its name without prefix, and labels."""
    for metric in llm.get_metrics():
        if metric.name == f"vllm:{name}" and labels.items() <= metric.labels.items():
            assert isinstance(metric, (Counter, Gauge))
            return metric.value
    raise AssertionError(f"there is no metric {name} {labels}")


def traces() -> set[str]:
    """Return the names of children of this process, folders of sockets and shared memory, which engines could leave."""
    children = {f"child {each.pid}" for each in psutil.Process().children(recursive=True)}
    files = glob.glob(os.path.join(tempfile.gettempdir(), "jaxllm-*")) + glob.glob("/dev/shm/*")
    return children | set(files)


@contextlib.contextmanager
def nothing_left(seconds: float = END_SECONDS) -> Iterator[None]:
    """Check that what happens within leaves no process, no socket and no shared memory, `seconds` later at most.

    Engines have a folder of their own for sockets meanwhile: those of other tests at the same time do not count.
    """
    with tempfile.TemporaryDirectory(prefix="left-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        before = traces()
        yield
        deadline = time.monotonic() + seconds
        while (left := traces() - before) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left
