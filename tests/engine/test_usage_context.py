"""What an engine is for reaches the resolver from every program that starts one, and settles the same limits."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import msgspec
import pytest

from jaxllm.cli import serve
from jaxllm.cli.batch import run_batch
from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.core import core_process, follower, startup
from jaxllm.engine.offline.llm_engine import LLMEngine
from jaxllm.engine.online.async_client import build_async_engine_client
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.resolve.resolve_engine import resolve
from jaxllm.server.processes.start import run_front_ends
from jaxllm.usage.usage_lib import UsageContext
from tests.models.tiny import folder


class Gpu:
    """A GPU as JAX shows it, with so much memory that its steps are large."""

    platform, device_kind, compute_capability, id, process_index = "gpu", "a GPU", "9.0", 0, 0

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 80 * 2**30}


class Limits(NamedTuple):
    """What depends on an engine's use."""

    tokens_on_gpu: int
    has_target_on_cpu: bool
    is_online: bool


ONLINE, OFFLINE = Limits(8192, True, True), Limits(16_384, False, False)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[Limits]:
    """Return the list of limits that cores and followers settle, and have each start end there."""
    seen: list[Limits] = []

    def resolve_twice(args: EngineArgs, *, disproved: Any, usage_context: UsageContext) -> NoReturn:
        assert not disproved
        config = resolve(args, usage_context=usage_context)
        gpu: Any = Gpu()
        tokens = resolve(args, [gpu], usage_context=usage_context).max_num_batched_tokens
        seen.append(Limits(tokens, config.step_target is not None, config.usage_context.is_online))
        raise VLLMValidationError("settled")

    class Ordered:
        """Popen for cores: what they do with the order is done here."""

        def __init__(self, command: object, stdin: Any, **_: object) -> None:
            order = msgspec.json.decode(stdin.read(), type=core_process.StartOrder)
            core_process._start(AsyncEngineArgs(**order.engine_args), order.usage_context, lambda _: None)

    def raise_it(_: object, error: BaseException) -> NoReturn:
        raise error

    for module in (startup, follower):
        monkeypatch.setattr(module, "resolve", resolve_twice)
        monkeypatch.setattr(module, "disproved_ops", lambda _: {})
    monkeypatch.setattr("jaxllm.engine.client.core_handle.subprocess", _Subprocess(Ordered))
    monkeypatch.setattr(follower, "join", lambda _: [None])
    for thread in ("_listen", "_beat"):  # without a first host they would end this process
        monkeypatch.setattr(follower._Follower, thread, _rest)
    monkeypatch.setattr(follower.signal, "signal", lambda *_: None)
    monkeypatch.setattr(follower._Follower, "give_up", raise_it)
    return seen


def _rest(_: object) -> None:
    pass


class _Subprocess:
    """The module, with another Popen."""

    PIPE, TimeoutExpired = subprocess.PIPE, subprocess.TimeoutExpired

    def __init__(self, popen: Callable[..., Any]) -> None:
        self.Popen = popen


def command_line(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_serve_flags(parser)
    args = parser.parse_args([str(folder("qwen3")), *words])
    [args.model] = args.model_tag
    return args


async def one_front_end(args: argparse.Namespace) -> None:
    async with build_async_engine_client(args):
        pass


async def several_front_ends(args: argparse.Namespace) -> None:
    with contextlib.closing(socket.socket()) as listener:
        await run_front_ends(args, ServerArgs.from_cli_args(args), listener)


async def batch(args: argparse.Namespace) -> None:
    async with run_batch._start(args):
        pass


SERVERS: dict[str, Callable[[], object]] = {
    "one front end": lambda: asyncio.run(one_front_end(command_line())),
    "a core in a thread": lambda: asyncio.run(one_front_end(command_line("--disable-frontend-multiprocessing"))),
    "several front ends": lambda: asyncio.run(several_front_ends(command_line("--api-server-count", "2"))),
    "another host": lambda: serve.run(
        command_line("--nnodes", "2", "--node-rank", "1", "--tensor-parallel-size", "1", "--headless")
    ),
    "a program's own": lambda: AsyncLLM.from_engine_args(AsyncEngineArgs(str(folder("qwen3")))),
}


@pytest.mark.parametrize("start", SERVERS.values(), ids=SERVERS.keys())
def test_all_servers_settle_the_limits_of_streams(start: Callable[[], object], limits: list[Limits]) -> None:
    with pytest.raises(VLLMValidationError, match="settled"):
        start()
    assert limits == [ONLINE]


OTHERS: dict[str, Callable[[], object]] = {
    "LLM": lambda: LLMEngine.from_engine_args(EngineArgs(str(folder("qwen3")))),
    "run-batch": lambda: asyncio.run(batch(command_line("--max-num-queued-reqs", "8"))),
}


@pytest.mark.parametrize("start", OTHERS.values(), ids=OTHERS.keys())
def test_others_settle_those_of_the_most_tokens(start: Callable[[], object], limits: list[Limits]) -> None:
    with pytest.raises(VLLMValidationError, match="settled"):
        start()
    assert limits == [OFFLINE]


def test_no_argument_says_what_an_engine_is_for() -> None:
    with pytest.raises(TypeError, match="is_online"):
        AsyncEngineArgs("m", is_online=True)  # type: ignore[call-arg]
