"""An engine core dies, hangs or fails: every request ends with an error that says why, and nothing is left behind."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import EngineDeadError
from jaxllm.outputs import RequestOutput
from tests.async_engine import faults
from tests.async_engine.support import (
    END_SECONDS,
    core_process,
    greedy,
    handle_of,
    ids,
    mock_llm,
    nothing_left,
    read,
    tiny_args,
    tokens_of,
    until,
)

pytestmark = pytest.mark.server

NUM_STREAMS = 32
LONG = 400


@asynccontextmanager
async def streams(llm: AsyncLLM, count: int = NUM_STREAMS) -> AsyncIterator[list[asyncio.Task[list[RequestOutput]]]]:
    """Open long streams, and wait until each one that fits in the core has had a token."""
    tasks = [asyncio.create_task(read(llm, f"open {i}", greedy(max_tokens=LONG))) for i in range(count)]
    stream = llm.generate(ids(), greedy(max_tokens=3), "first")
    assert [output async for output in stream][-1].finished
    yield tasks


async def assert_all_dead(
    llm: AsyncLLM, tasks: list[asyncio.Task[list[RequestOutput]]], reason: str, seconds: float = END_SECONDS
) -> None:
    """Check that streams, and all later calls of the engine, end in time with the reason."""
    ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), seconds)
    assert {type(each) for each in ends} == {EngineDeadError}
    assert all(reason in str(each) for each in ends)
    started = time.monotonic()
    for call in (lambda: read(llm, "late", greedy()), llm.check_health, llm.reset_prefix_cache):
        with pytest.raises(EngineDeadError, match=reason):
            await call()
    assert time.monotonic() - started < 0.5
    assert (llm.errored, llm.is_stopped, llm.is_running) == (True, True, False)
    assert reason in str(llm.dead_error)


def test_r1_a_killed_core_ends_all_streams(tokenizer: str) -> None:
    """R1: kill -9 with 32 streams open. No child is left even before `shutdown`."""

    async def run() -> None:
        async with streams(llm, NUM_STREAMS - 1) as tasks:
            calling = asyncio.create_task(llm.reset_prefix_cache())
            core_process(llm).kill()
            await assert_all_dead(llm, tasks, "SIGKILL")
            await asyncio.gather(calling, return_exceptions=True)

    with nothing_left(), mock_llm(tiny_args(tokenizer), in_process=True, tokens_per_second=50) as llm:
        process = core_process(llm)
        asyncio.run(run())
        assert not process.is_running()


def test_r1_requests_that_come_before_the_death_is_noticed(tokenizer: str) -> None:
    """R1: the request comes in the turn of the loop in which the core died, and finds no socket to go to."""

    async def run() -> None:
        await read(llm, "before", greedy())
        handle._process.kill()
        handle._process.wait(END_SECONDS)  # the loop has had no turn to hear of it
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await asyncio.wait_for(read(llm, "after", greedy(max_tokens=LONG)), END_SECONDS)

    with nothing_left(), mock_llm(tiny_args(tokenizer), in_process=True, tokens_per_second=50) as llm:
        handle = handle_of(llm)
        asyncio.run(run())


def test_r2_a_stopped_core_is_found(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R2: SIGSTOP with work pending. Before, the engine is healthy when idle and when it has all it can do."""
    monkeypatch.setenv("JAXLLM_SILENCE_TIMEOUT", "3")
    monkeypatch.setenv("JAXLLM_STEP_TIMEOUT", "3")

    async def stay_healthy(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await llm.check_health()
            await asyncio.sleep(0.1)

    async def run() -> None:
        await stay_healthy(3.5)
        async with streams(llm) as tasks:
            await stay_healthy(3.5)
            core.send_signal(signal.SIGSTOP)
            stopped = time.monotonic()
            with pytest.raises(EngineDeadError, match="no sign of life"):
                await stay_healthy(60)
            assert 2 < time.monotonic() - stopped < 3 + END_SECONDS
            await assert_all_dead(llm, tasks, "no sign of life")
        await until(lambda: not core.is_running())

    with nothing_left(), mock_llm(tiny_args(tokenizer), in_process=True, tokens_per_second=20) as llm:
        core = core_process(llm)
        asyncio.run(run())


def real_llm(**arguments: object) -> AsyncLLM:
    """Start an engine with a model, its core in a process of its own."""
    return AsyncLLM.from_engine_args(tiny_args(**arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise", "ZeroDivisionError: the tenth step"),
        ("memory", "MemoryError: no room for the tenth step"),
        ("hang", "JAXLLM_STEP_TIMEOUT"),
    ],
)
def test_r3_a_step_that_fails_or_hangs(
    fault: str, reason: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R3, R2: the tenth step of one request raises, is out of memory, or never ends: all streams get a clear error,
    and a core that failed has told why and ends with status 1.
    """
    monkeypatch.setenv("JAXLLM_STEP_TIMEOUT", "3")

    async def run() -> None:
        assert len(tokens_of(await read(llm, "well", greedy(max_tokens=12)))) == 12
        others = [asyncio.create_task(read(llm, f"{i}", greedy(max_tokens=LONG))) for i in range(4)]
        culprit = asyncio.create_task(read(llm, "culprit", greedy(max_tokens=20, extra_args={"fault": fault})))
        await asyncio.wait([culprit], timeout=60)
        assert culprit.done()
        await assert_all_dead(llm, [culprit, *others], reason)
        assert await asyncio.to_thread(status) == (-signal.SIGKILL if fault == "hang" else 1)

    def status() -> int:
        return handle._process.wait(10)

    with nothing_left(), real_llm(logits_processors=[faults.Faults]) as llm:
        handle = handle_of(llm)
        asyncio.run(run())
    printed = capfd.readouterr().err
    if fault != "hang":
        assert "Traceback (most recent call last)" in printed
        assert reason in printed


def test_r3_a_long_compile_is_no_hang_and_one_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """R2, R3: steps may take a second and compiling two; then a program is needed that cannot be compiled."""
    monkeypatch.setenv("JAXLLM_STEP_TIMEOUT", "1")

    async def run() -> None:
        started = time.monotonic()
        assert tokens_of(await read(llm, "slow", greedy(max_tokens=12), ids([30, 31])))
        assert time.monotonic() - started > faults.SLOW_SECONDS / 2
        tasks = [asyncio.create_task(read(llm, f"{i}", greedy(max_tokens=LONG))) for i in range(12)]
        await asyncio.wait(tasks, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        await assert_all_dead(llm, tasks, "rows beyond eight")

    with nothing_left(), real_llm(logits_processors=[faults.slow_to_compile], cudagraph_capture_sizes=[4, 16]) as llm:
        asyncio.run(run())


def test_a_core_that_ends_is_found_by_an_idle_engine(tokenizer: str) -> None:
    """The engine is asked for its health alone."""

    async def run() -> None:
        await llm.check_health()
        core.terminate()
        await until(lambda: llm.errored)
        with pytest.raises(EngineDeadError, match="SIGTERM"):
            await llm.check_health()

    with nothing_left(), mock_llm(tiny_args(tokenizer), in_process=True) as llm:
        core = core_process(llm)
        asyncio.run(run())
