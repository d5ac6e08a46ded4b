"""An asynchronous engine without references ends its core while its event loop goes on, as in a notebook."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator

import psutil
import pytest

from jaxllm.engine.online.admission import Admission
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import EngineDeadError
from jaxllm.outputs import RequestOutput
from tests.async_engine.support import END_SECONDS, core_process, greedy, ids, nothing_left, read, tiny_args, until
from tests.async_engine.test_life import Cores

pytestmark = pytest.mark.server


@pytest.fixture
def cores() -> Iterator[Cores]:
    """Return a function that starts engines. Python's garbage collector is off: they must end without it."""
    gc.disable()
    try:
        yield Cores()
    finally:
        gc.enable()


def make(cores: Cores) -> AsyncLLM:
    return AsyncLLM(cores.start, admission=Admission(None, None))


async def until_ended(cores: Cores) -> None:
    await until(lambda: not cores.thread(0).is_alive())
    assert [core.num_shutdowns for core in cores.cores] == [1]


def params(max_tokens: int = 8):
    return greedy(max_tokens=max_tokens, detokenize=False)


def test_cells_that_make_an_engine_again_leave_one_process() -> None:
    """Real cores, one event loop, and a name that is bound anew: each cell ends the engine of the one before."""

    async def run() -> None:
        processes: list[psutil.Process] = []
        llm = None
        for cell in range(3):
            llm = AsyncLLM.from_engine_args(tiny_args())
            processes.append(core_process(llm))
            await read(llm, f"cell {cell}", greedy())
            for before in processes[:-1]:
                await asyncio.to_thread(before.wait, 10)
            assert processes[-1].is_running()
        llm = None
        await asyncio.to_thread(processes[-1].wait, 10)

    with nothing_left(10):
        asyncio.run(run())


def test_the_event_loop_does_not_wait_for_the_end(cores: Cores) -> None:
    async def run() -> None:
        cores.before_step = lambda: time.sleep(1.0)
        llm = make(cores)
        waiting = asyncio.create_task(anext(llm.generate(ids(), params(400), "a")))
        await asyncio.sleep(0.2)
        waiting.cancel()
        await asyncio.wait([waiting])
        del waiting
        started = time.monotonic()
        del llm
        await asyncio.sleep(0)
        assert time.monotonic() - started < 0.5
        await until_ended(cores)

    asyncio.run(run())


def test_who_reads_a_request_holds_its_engine(cores: Cores) -> None:
    """Also in a task that nobody holds: its outputs hold it."""

    async def read_all(outputs: list[RequestOutput]) -> None:
        async for output in make(cores).generate(ids(), params(20), "a"):
            outputs.append(output)

    async def run() -> None:
        outputs: list[RequestOutput] = []
        task = weakref.ref(asyncio.create_task(read_all(outputs)))
        await until(lambda: bool(outputs) and outputs[-1].finished)
        assert sum(len(each.outputs[0].token_ids) for each in outputs) == 20
        await until(lambda: task() is None)
        await until_ended(cores)

    asyncio.run(run())


def test_who_holds_a_collector_alone_is_told_of_the_end(cores: Cores) -> None:
    async def run() -> None:
        llm = make(cores)
        stream = await llm.add_request("a", ids(), params(4000))
        await stream.get()
        del llm
        await until_ended(cores)
        with pytest.raises(EngineDeadError):
            await stream.get()

    asyncio.run(run())


def test_it_may_be_dropped_in_another_thread(cores: Cores) -> None:
    async def run() -> None:
        held = [make(cores)]
        await read(held[0], "a", params())
        dropping = threading.Thread(target=held.clear)
        dropping.start()
        await asyncio.to_thread(dropping.join)
        await until_ended(cores)

    asyncio.run(run())


@pytest.mark.parametrize(("platform", "num_cores"), [("cpu", 1), ("gpu", 2)])
def test_it_may_be_dropped_after_it_woke(cores: Cores, platform: str, num_cores: int) -> None:
    cores.platform = platform

    async def run() -> None:
        llm = make(cores)
        await llm.sleep()
        await llm.wake_up()
        await read(llm, "a", params())
        del llm
        await until(lambda: not cores.thread(num_cores - 1).is_alive(), END_SECONDS)
        assert [core.num_shutdowns for core in cores.cores] == [1] * num_cores

    asyncio.run(run())


def test_it_may_be_dropped_asleep(cores: Cores) -> None:
    async def run() -> None:
        llm = make(cores)
        await llm.sleep()
        del llm
        await until_ended(cores)

    asyncio.run(run())


def test_it_may_be_dropped_between_two_runs_of_its_loop(cores: Cores) -> None:
    """A terminal's IPython keeps a loop that runs while a cell does."""
    loop = asyncio.new_event_loop()
    llm = make(cores)
    loop.run_until_complete(read(llm, "a", params()))
    del llm
    loop.run_until_complete(until_ended(cores))
    loop.close()
