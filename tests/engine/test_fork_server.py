"""Cores that are forks: they are children of this process, run without the server, and nothing is left of either."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from jaxllm.engine.client.fork_server import ForkServer
from jaxllm.engine.client.remote_core import RemoteCore
from jaxllm.engine.front.start import meet, start_processes
from jaxllm.engine.online.admission import Admission
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import EngineDeadError, VLLMValidationError
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.sampling_params import SamplingParams
from jaxllm.usage.usage_lib import UsageContext
from tests.async_engine.support import PROMPT, tiny_args
from tests.engine.test_core_handle import wait_end

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt others"),
]

USE = UsageContext.OPENAI_API_SERVER
NOBODYS = EngineArgs(model="./nobody's", kv_cache_memory_bytes=2**20)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """Return a fork server."""
    made = ForkServer()
    made.begin()
    yield made
    made.close()
    assert made.pid is None


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    """Check that all processes of a test but fork servers have ended, and that this process has taken their status."""
    before = set(psutil.Process().children())
    yield
    names = [" ".join(each.cmdline()[-1:]) for each in psutil.Process().children() if each not in before]
    assert set(names) <= {"jaxllm.engine.core.fork_server"}
    assert len(names) <= 1


def start(server: ForkServer) -> AsyncLLM:
    """Return an engine whose core is a fork."""
    args = tiny_args(kv_cache_memory_bytes=2**22)

    def start_core() -> object:
        core = start_processes(args, USE, forks=server)
        assert isinstance(core, RemoteCore)
        assert psutil.Process(core.process_ids[0]).cmdline()[-1] == "jaxllm.engine.core.fork_server"
        return meet(core, args, asks_core=False)

    return AsyncLLM(start_core, admission=Admission.of(args))  # type: ignore[arg-type]


async def tokens(llm: AsyncLLM, name: str) -> list[int]:
    """Return the tokens of a greedy request."""
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    outputs = [each async for each in llm.generate({"prompt_token_ids": PROMPT}, params, name)]
    return list(outputs[-1].outputs[0].token_ids)


def test_forks_answer_alike_and_go_on_without_the_server(server: ForkServer) -> None:
    async def run() -> None:
        first, other = await asyncio.gather(*(asyncio.to_thread(start, server) for _ in range(2)))
        pid, gone = first.core_pids[0], server.pid
        assert gone is not None
        for core in (pid, other.core_pids[0]):
            process = psutil.Process(core)
            assert (process.ppid(), os.getpgid(core)) == (os.getpid(), core)
        expected = await tokens(first, "0")
        os.kill(gone, signal.SIGKILL)
        assert await tokens(other, "1") == await tokens(first, "2") == expected
        assert server.fork(b"{}") is None
        server.begin()
        assert server.pid not in (None, gone)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await tokens(first, "3")
        for llm in (first, other):
            await llm.aclose(5)

    asyncio.run(run())


def test_arguments_that_are_refused_are_told(server: ForkServer) -> None:
    core = RemoteCore.in_process(NOBODYS, USE, forks=server)
    with pytest.raises(VLLMValidationError, match="nobody's"):
        core.wait_ready()
    core.shutdown()
    assert core.handle.end_reason() == "it ended with status 2"


def test_a_fork_that_is_killed_as_it_starts(server: ForkServer) -> None:
    core = RemoteCore.in_process(tiny_args(), USE, forks=server)
    os.kill(core.process_ids[0], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        core.wait_ready()
    core.shutdown()
    assert server.pid is not None


def test_without_a_server_a_core_is_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, elsewhere = ForkServer(), ForkServer()
    closed.close()
    closed.begin()
    monkeypatch.setattr(sys, "platform", "darwin")
    elsewhere.begin()
    for server in (closed, elsewhere):
        assert server.pid is None
        core = RemoteCore.in_process(NOBODYS, USE, [sys.executable, "-c", "raise SystemExit(3)"], forks=server)
        with pytest.raises(EngineDeadError, match="ended with status 3"):
            core.wait_ready()
        core.shutdown()


def test_nobody_waits_for_a_server_that_is_closed_at_its_imports() -> None:
    server = ForkServer()
    server.begin()
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(server.fork(b"{}")))
    thread.start()
    server.close()
    thread.join()
    assert got == [None]


def test_a_server_ends_with_the_process_that_has_begun_it() -> None:
    code = """
import time
from jaxllm.engine.client.fork_server import ForkServer
server = ForkServer()
server.begin()
print(server.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert psutil.pid_exists(pid)
        process.kill()
    wait_end(pid, 60)  # it looks after its imports
