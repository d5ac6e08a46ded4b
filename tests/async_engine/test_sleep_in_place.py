"""An asynchronous engine sleeps in its core: parts wake by their tags, and what fails leaves a state to go on from."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from jaxllm.exceptions import EngineBusyError, EngineDeadError, VLLMValidationError
from tests.async_engine.support import greedy, mock_llm, nothing_left, read, read_one, tiny_args, tokens_of, until
from tests.async_engine.test_life import Cores, begin_read, soon
from tests.async_engine.test_life import cores as cores  # noqa: PLC0414 - a fixture
from tests.async_engine.test_replicas import replicated
from tests.engine.fake_core import FakeCore

pytestmark = pytest.mark.server


def sleep_states(llm: Any) -> dict[str, float]:
    """Return what the metrics say of an engine's sleep."""
    metrics = [each for each in llm.get_metrics() if each.name == "vllm:engine_sleep_state"]
    return {each.labels["sleep_state"]: each.value for each in metrics}


def test_parts_wake_by_their_tags(cores: Cores) -> None:
    async def run() -> None:
        llm = cores.make()
        await llm.wake_up()
        assert cores.cores[0].woken == []
        await llm.sleep(2)
        await llm.sleep(1)
        assert cores.cores[0].slept[0] == 2
        assert sleep_states(llm) == {"awake": 0, "weights_offloaded": 0, "discard_all": 1}
        for tags in (["kv"], "weights", 3):
            with pytest.raises(VLLMValidationError, match="tags must be None or a list"):
                await llm.wake_up(tags)  # type: ignore[arg-type]
        await llm.wake_up([])
        with pytest.raises(EngineBusyError, match=r"call wake_up\(\) first"):
            await soon(begin_read(llm, "a", 2))
        await llm.wake_up(["weights"])
        await llm.wake_up(["weights"])
        assert await llm.is_sleeping()
        with pytest.raises(EngineBusyError, match="'kv_cache' is not awake yet"):
            await llm.check_health()
        await llm.wake_up(["kv_cache"])
        assert cores.cores[0].woken == ["weights", "kv_cache"]
        assert sleep_states(llm) == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        await soon(begin_read(llm, "b", 2))
        assert len(cores.cores) == 1

    asyncio.run(run())


def test_running_requests_are_aborted_or_end_first(cores: Cores) -> None:
    async def run() -> None:
        llm = cores.make()
        for mode, reason in (("abort", "abort"), ("wait", "length")):
            reading = begin_read(llm, mode, 20)
            await asyncio.sleep(0.05)
            await llm.sleep(mode=mode)  # type: ignore[arg-type]
            assert (await reading).outputs[0].finish_reason == reason
            assert cores.cores[0].requests == {}
            await llm.wake_up()
        with pytest.raises(VLLMValidationError, match="requests cannot be kept"):
            await llm.sleep(mode="keep")

    asyncio.run(run())


def test_a_request_that_is_aborted_lets_the_engine_fall_asleep(cores: Cores) -> None:
    async def run() -> None:
        llm = cores.make()
        reading = begin_read(llm, "a", 60)
        await asyncio.sleep(0.05)
        sleeping = asyncio.create_task(llm.sleep(mode="wait"))
        await asyncio.sleep(0.05)
        assert not sleeping.done()
        await llm.abort("a")
        await soon(sleeping)
        assert (await reading).outputs[0].finish_reason == "abort"
        assert cores.cores[0].slept == [1]

    asyncio.run(run())


def test_what_keeps_a_core_from_sleeping_or_waking_is_raised(cores: Cores, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is gone")

    async def run() -> None:
        llm = cores.make()
        with monkeypatch.context() as patch:
            patch.setattr(FakeCore, "sleep", fail)
            with pytest.raises(RuntimeError, match="the disk is gone"):
                await llm.sleep()
        assert not await llm.is_sleeping()
        await soon(begin_read(llm, "a", 2))
        await llm.sleep()
        with monkeypatch.context() as patch:
            patch.setattr(FakeCore, "wake_up", fail)
            with pytest.raises(RuntimeError, match="the disk is gone"):
                await llm.wake_up()
        assert await llm.is_sleeping()
        await llm.wake_up()
        await soon(begin_read(llm, "b", 2))

    asyncio.run(run())


def test_waking_goes_on_when_its_caller_is_cancelled(cores: Cores, monkeypatch: pytest.MonkeyPatch) -> None:
    wake_up = FakeCore.wake_up

    def wake_slowly(core: FakeCore, tags: list[str]) -> None:
        time.sleep(0.2)
        wake_up(core, tags)

    monkeypatch.setattr(FakeCore, "wake_up", wake_slowly)

    async def run() -> None:
        llm = cores.make()
        await llm.sleep()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.wake_up(), 0.05)
        assert await llm.is_sleeping()
        await llm.wake_up()
        assert cores.cores[0].woken == ["weights", "kv_cache"]
        await llm.sleep()
        waking = asyncio.create_task(llm.wake_up())
        await asyncio.sleep(0.05)
        await llm.aclose()
        with pytest.raises(EngineDeadError, match="shut down"):
            await soon(waking)
        assert llm.is_stopped

    asyncio.run(run())


@pytest.fixture
def killed_asleep() -> Iterator[None]:
    """Check that no process is left."""
    with nothing_left():
        yield


@pytest.mark.usefixtures("killed_asleep")
def test_a_core_that_dies_asleep_is_started_again_by_wake_up() -> None:
    async def run() -> None:
        expected = tokens_of(await read(llm, "before", greedy()))
        await llm.sleep()
        pid = llm.core_pids[0]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not llm.core_pids)
        assert await llm.is_sleeping()
        assert not llm.errored
        with pytest.raises(EngineBusyError):
            await llm.check_health()
        await llm.wake_up()
        assert llm.core_pids[0] != pid
        assert tokens_of(await read(llm, "after", greedy())) == expected

    with mock_llm(tiny_args(), in_process=True) as llm:
        asyncio.run(run())


@pytest.mark.usefixtures("killed_asleep")
def test_replicas_sleep_and_one_that_dies_asleep_stays_away_until_they_wake() -> None:
    async def run() -> None:
        remote = replicated(llm)
        pids = llm.core_pids
        await llm.sleep()
        assert llm.core_pids == pids
        os.kill(pids[1], signal.SIGKILL)
        await until(lambda: sorted(llm.core_pids) == [0])
        await asyncio.sleep(1.0)  # in which it would be started again
        assert sorted(llm.core_pids) == [0]
        await llm.wake_up(["weights"])
        await llm.wake_up(["kv_cache"])
        assert (await read_one(llm, "awake", greedy())).finished
        await until(lambda: len(remote.replicas.running()) == 2, 30)
        assert llm.core_pids[0] == pids[0]

    with mock_llm(tiny_args(data_parallel_size=2), in_process=True) as llm:
        asyncio.run(run())


@pytest.mark.usefixtures("killed_asleep")
def test_a_core_that_is_shut_down_while_it_wakes_ends() -> None:
    async def run() -> None:
        await llm.sleep(2)
        pid = llm.core_pids[0]
        waking = asyncio.create_task(llm.wake_up())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await llm.aclose()
        with pytest.raises(EngineDeadError, match="shut down"):
            await soon(waking)
        assert not psutil.pid_exists(pid)
        assert llm.is_stopped
        assert not await llm.is_sleeping()

    with mock_llm(tiny_args(), in_process=True) as llm:
        asyncio.run(run())
