"""An asynchronous engine's life: what sleeps, wakes, pauses or ends it, while calls, searches and loops come and go."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxllm.engine.client.core_handle import CoreThread
from jaxllm.engine.client.remote_core import RemoteCore
from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.engine.front.prompt_encoder import EncodedPrompt
from jaxllm.engine.offline.llm_engine import LLMEngine
from jaxllm.engine.online import async_beam_search
from jaxllm.engine.online.admission import Admission
from jaxllm.engine.online.async_core import AsyncCore
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.engine.online.prompt_encoding import encode_prompt
from jaxllm.exceptions import EngineBusyError, EngineDeadError, VLLMValidationError
from jaxllm.outputs import RequestOutput
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.sampling_params import BeamSearchParams
from tests.async_engine.support import END_SECONDS, greedy, ids, read, read_one, remote_of, until
from tests.engine.fake_core import FakeCore
from tests.engine.support import make_ready

pytestmark = pytest.mark.server

STEP_SECONDS = 0.01


class Cores:
    """Starts engines over fake cores in threads, and keeps references to the cores."""

    def __init__(self) -> None:
        self.cores: list[FakeCore] = []
        self.remotes: list[RemoteCore] = []
        self.engines: list[AsyncLLM] = []
        self.platform = "cpu"
        """What the cores say that they run on; on a "gpu" they end in place of sleeping."""
        self.before_start: Callable[[], None] = lambda: None
        self.before_step: Callable[[], None] = lambda: time.sleep(STEP_SECONDS)

    def start(self) -> tuple[RemoteCore, FrontEnd]:
        core = FakeCore(lambda request: [300 + i % 20 for i in range(request.max_tokens)])
        core.before_step = lambda _: self.before_step()
        self.cores.append(core)

        def begin(on_tokenizer: Callable[[None], None]):
            on_tokenizer(None)
            self.before_start()
            return core, make_ready(stats=core.stats(), skip_tokenizer_init=True, device_type=self.platform)

        remote = RemoteCore.in_thread(begin)
        self.remotes.append(remote)
        remote.wait_tokenizer()
        return remote, FrontEnd(remote.wait_ready(), None, None)

    def make(self) -> AsyncLLM:
        self.engines.append(AsyncLLM(self.start, admission=Admission(None, None)))
        return self.engines[-1]

    def thread(self, index: int) -> threading.Thread:
        handle = self.remotes[index].handle
        assert isinstance(handle, CoreThread)
        return handle._thread


@pytest.fixture
def cores() -> Iterator[Cores]:
    """Return a function that starts engines, and check at the end that all of them have ended."""
    made = Cores()
    yield made
    for engine in made.engines:
        engine.shutdown()
    gc.collect()
    for index in range(len(made.remotes)):
        made.thread(index).join(END_SECONDS)
        assert not made.thread(index).is_alive()
    assert [core.num_shutdowns for core in made.cores] == [1] * len(made.cores)


def begin_read(llm: AsyncLLM, request_id: str, max_tokens: int) -> asyncio.Task[RequestOutput]:
    return asyncio.create_task(read_one(llm, request_id, greedy(max_tokens=max_tokens, detokenize=False)))


def begin_search(llm: AsyncLLM, request_id: str = "search", max_tokens: int = 60) -> asyncio.Task[RequestOutput]:
    async def search() -> RequestOutput:
        params = BeamSearchParams(beam_width=2, max_tokens=max_tokens)
        return await anext(llm.beam_search(ids(), request_id, params))

    return asyncio.create_task(search())


async def soon[T](task: asyncio.Future[T]) -> T:
    return await asyncio.wait_for(task, END_SECONDS)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_waking_waits_until_sleep_is_deep(cores: Cores, platform: str) -> None:
    cores.platform = platform

    async def run() -> None:
        llm = cores.make()
        reading = begin_read(llm, "a", 30)
        await asyncio.sleep(0.05)
        sleeping = asyncio.create_task(llm.sleep(mode="wait"))
        await asyncio.sleep(0.05)
        await llm.wake_up()
        assert sleeping.done()
        assert (await reading).outputs[0].finish_reason == "length"
        assert not await llm.is_sleeping()
        assert [remote.is_closed for remote in cores.remotes] == {"cpu": [False], "gpu": [True, False]}[platform]
        await soon(begin_read(llm, "b", 2))

    asyncio.run(run())


def test_sleep_that_is_cancelled_while_it_waits_is_undone(cores: Cores) -> None:
    async def run() -> None:
        llm = cores.make()
        reading = begin_read(llm, "a", 40)
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.sleep(mode="wait"), 0.05)
        assert not await llm.is_sleeping()
        await soon(begin_read(llm, "b", 2))
        assert (await reading).outputs[0].finish_reason == "length"
        assert len(cores.remotes) == 1

    asyncio.run(run())


def test_a_start_that_nobody_waits_for_any_more_goes_on(cores: Cores) -> None:
    cores.platform = "gpu"

    async def run() -> None:
        llm = cores.make()
        await llm.sleep()
        cores.before_start = lambda: time.sleep(0.3)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.wake_up(), 0.05)
        assert await llm.is_sleeping()
        await llm.wake_up()
        assert len(cores.cores) == 2
        await soon(begin_read(llm, "a", 2))

    asyncio.run(run())


def test_an_event_loop_that_ends_during_a_start_leaves_no_core(cores: Cores) -> None:
    cores.platform = "gpu"

    async def run() -> None:
        await llm.sleep()
        cores.before_start = lambda: time.sleep(0.3)
        waking = asyncio.create_task(llm.wake_up())
        await asyncio.sleep(0.05)
        assert not waking.done()

    llm = cores.make()
    asyncio.run(run())
    gc.collect()
    cores.thread(1).join(END_SECONDS)
    assert not cores.thread(1).is_alive()


def test_a_call_that_is_pending_when_the_core_is_to_end_asleep_ends(cores: Cores) -> None:
    cores.platform = "gpu"

    async def run() -> None:
        llm = cores.make()
        calling = asyncio.create_task(llm.reset_prefix_cache())
        await asyncio.sleep(0)
        await llm.sleep()
        with pytest.raises(EngineDeadError, match="wake_up"):
            await soon(calling)
        assert not llm.errored

    asyncio.run(run())


def test_a_paused_engine_sleeps_and_wakes_paused(cores: Cores) -> None:
    async def run() -> None:
        llm = cores.make()
        await llm.pause_generation()
        await llm.sleep()
        await llm.wake_up()
        reading = begin_read(llm, "a", 2)
        await asyncio.sleep(0.05)
        assert await llm.is_paused()
        assert not reading.done()
        await llm.resume_generation()
        await soon(reading)

    asyncio.run(run())


def test_a_pause_that_is_cancelled_is_undone(cores: Cores) -> None:
    async def run() -> None:
        llm = cores.make()
        reading = begin_read(llm, "a", 40)
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.pause_generation(mode="wait"), 0.05)
        assert not await llm.is_paused()
        await soon(begin_read(llm, "b", 2))
        await reading

    asyncio.run(run())


def test_a_pause_says_when_the_cache_could_not_be_cleared(
    cores: Cores, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeCore, "reset_prefix_cache", lambda *_: False)
    llm = cores.make()
    with caplog.at_level(logging.WARNING, "jaxllm"):
        asyncio.run(llm.pause_generation())
    assert "prefix cache" in caplog.text


def test_a_block_ends_its_engine_while_the_loop_goes_on(cores: Cores) -> None:
    async def run() -> None:
        async with cores.make() as llm:
            reading = begin_read(llm, "a", 400)
            await asyncio.sleep(0.05)
            cores.before_step = lambda: time.sleep(0.3)
            num_turns, ticking = [0], asyncio.create_task(tick())
            await asyncio.sleep(0.05)
            num_turns[0] = turns[0]
        assert turns[0] > num_turns[0] + 5
        ticking.cancel()
        assert llm.is_stopped
        assert not cores.thread(0).is_alive()
        with pytest.raises(EngineDeadError, match="shut down"):
            await soon(reading)
        await llm.aclose()

    async def tick() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0.01)

    turns = [0]
    asyncio.run(run())


def test_an_engine_that_closes_while_it_wakes_leaves_no_core(cores: Cores) -> None:
    cores.platform = "gpu"

    async def run() -> None:
        llm = cores.make()
        await llm.sleep()
        cores.before_start = lambda: time.sleep(0.2)
        waking = asyncio.create_task(llm.wake_up())
        await asyncio.sleep(0.05)
        await llm.aclose()
        assert not cores.thread(1).is_alive()
        await soon(waking)
        assert llm.is_stopped

    asyncio.run(run())


@pytest.mark.parametrize("end", [AsyncLLM.shutdown, lambda llm: asyncio.run(llm.aclose())], ids=["call", "loop"])
def test_another_thread_may_end_the_engine(cores: Cores, end: Callable[[AsyncLLM], None]) -> None:
    """The loop, which has nothing else to do, hears of it."""

    async def run() -> None:
        asyncio.get_running_loop().set_debug(True)  # which finds what is done to it from elsewhere
        llm = cores.make()
        reading = begin_read(llm, "a", 100)
        await asyncio.sleep(0.05)
        await asyncio.to_thread(end, llm)
        with pytest.raises(EngineDeadError, match="shut down"):
            await soon(reading)

    asyncio.run(run())


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_an_engine_that_is_shut_down_while_it_sleeps_says_so(cores: Cores, platform: str) -> None:
    cores.platform = platform

    async def run() -> None:
        llm = cores.make()
        await llm.pause_generation()
        reading = begin_read(llm, "a", 2)
        await asyncio.sleep(0.05)
        await llm.sleep()
        await llm.aclose()
        assert not await llm.is_sleeping()
        for call in (soon(reading), llm.check_health(), llm.sleep()):
            with pytest.raises(EngineDeadError, match="shut down"):
                await call

    asyncio.run(run())


def test_a_thread_in_a_long_step_ends_after_it(cores: Cores) -> None:
    async def run() -> None:
        llm = cores.make()
        reading = begin_read(llm, "a", 100)
        await asyncio.sleep(0.05)
        cores.before_step = lambda: time.sleep(0.5)
        await asyncio.sleep(0.05)
        llm.shutdown(timeout=0.1)
        assert cores.thread(0).is_alive()
        with pytest.raises(EngineDeadError):
            await soon(reading)

    asyncio.run(run())


def test_what_a_closed_loop_has_left_is_ended(cores: Cores) -> None:
    """Its tasks cannot be woken, and nothing of the next loop is touched: requests, searches, and calls."""

    async def leave() -> list[asyncio.Task[RequestOutput]]:
        tasks = [begin_read(llm, "a", 100), begin_search(llm)]
        await asyncio.sleep(0.05)
        return tasks

    async def go_on() -> None:
        await llm.check_health()
        assert not llm._requests.ids()
        assert (await soon(begin_read(llm, "a", 10))).outputs[0].finish_reason == "length"
        await llm.wait_for_requests_to_drain(END_SECONDS)

    llm = cores.make()
    loop = asyncio.new_event_loop()
    left = loop.run_until_complete(leave())
    loop.close()
    asyncio.run(go_on())
    for task in left:
        task._log_destroy_pending = False  # type: ignore[attr-defined] - it was destroyed on purpose


def test_a_search_that_cannot_be_sent_leaves_nothing(cores: Cores, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: RemoteCore, request: object) -> None:
        raise VLLMValidationError("too large", parameter="prompt")

    async def run() -> None:
        llm = cores.make()
        searching = begin_search(llm)
        await asyncio.sleep(0.1)
        with monkeypatch.context() as spoiled:
            spoiled.setattr(RemoteCore, "add_request", refuse)
            with pytest.raises(VLLMValidationError, match="too large"):
                await soon(searching)
        assert not llm._requests.ids()
        await llm.wait_for_requests_to_drain(1)

    asyncio.run(run())


def test_an_aborted_search_returns_what_it_has(cores: Cores) -> None:
    async def run() -> None:
        llm = cores.make()
        searching = begin_search(llm)
        await asyncio.sleep(0.1)
        await llm.abort("search")
        result = await soon(searching)
        assert {each.finish_reason for each in result.outputs} == {"abort"}
        assert 0 < len(result.outputs[0].token_ids) < 60
        assert not llm._requests.ids()
        await soon(begin_read(llm, "search", 2))
        assert not cores.cores[0].requests
        assert not cores.cores[0].parked

    asyncio.run(run())


def test_a_search_is_in_hand_until_its_end(cores: Cores) -> None:
    async def run() -> None:
        llm = cores.make()
        searching = begin_search(llm, max_tokens=20)
        await asyncio.sleep(0.05)
        for again in (begin_search(llm), begin_read(llm, "search", 2)):
            with pytest.raises(VLLMValidationError, match="'search' is in use"):
                await soon(again)
        await llm.pause_generation(mode="wait")
        assert len(searching.result().outputs[0].token_ids) == 20
        await llm.resume_generation()
        searching = begin_search(llm)
        await asyncio.sleep(0.05)
        assert not await llm.drain(0)
        assert (await soon(searching)).outputs[0].finish_reason == "abort"
        with pytest.raises(VLLMValidationError, match="request_id"):
            await begin_search(llm, 7)  # type: ignore[arg-type]

    asyncio.run(run())


def test_a_search_waits_at_the_gate(cores: Cores, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is paused while its prompt is tokenized; what runs it is the core that is there after a sleep."""
    cores.platform = "gpu"

    async def run() -> None:
        llm = cores.make()
        await llm.check_health()
        searching = begin_search(llm, max_tokens=5)
        await encoding.wait()
        await llm.pause_generation()
        encoded.set()
        await asyncio.sleep(0.1)
        assert not cores.cores[0].seen
        await llm.sleep()
        await llm.wake_up()
        await llm.resume_generation()
        assert len((await soon(searching)).outputs[0].token_ids) == 5
        assert not cores.cores[0].seen

    async def encode(inputs: Any, prompt: Any, options: Any = None, *, pools: bool = False) -> EncodedPrompt:
        encoding.set()
        await encoded.wait()
        return await encode_prompt(inputs, prompt, options, pools=pools)

    monkeypatch.setattr(async_beam_search, "encode_prompt", encode)
    encoding, encoded = asyncio.Event(), asyncio.Event()
    asyncio.run(run())


def test_a_search_ends_with_its_core(cores: Cores) -> None:
    async def run() -> None:
        llm = cores.make()
        searching = begin_search(llm)
        await asyncio.sleep(0.05)
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await soon(searching)
        assert not llm._requests.ids()

    asyncio.run(run())


def test_a_draining_engine_is_healthy_and_busy(cores: Cores) -> None:
    async def run() -> None:
        llm = cores.make()
        reading = begin_read(llm, "a", 20)
        await asyncio.sleep(0.05)
        draining = asyncio.create_task(llm.drain())
        await asyncio.sleep(0)
        await llm.check_health()
        assert not await llm.reset_prefix_cache()
        with pytest.raises(EngineBusyError, match="about to end"):
            await read(llm, "late", greedy())
        assert await draining
        assert (await reading).finished

    asyncio.run(run())


def test_an_end_is_told_by_a_new_error_each_time(cores: Cores) -> None:
    """One alone would grow with each traceback, and keep alive what it shows."""

    async def run() -> None:
        llm = cores.make()
        tasks = [begin_read(llm, f"{i}", 100) for i in range(3)]
        await asyncio.sleep(0.05)
        llm.shutdown()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):
            with pytest.raises(EngineDeadError) as caught:
                await llm.check_health()
            ends.append(caught.value)
        assert len({id(each) for each in ends}) == len({str(each) for each in ends}) * 6 == 6

    asyncio.run(run())


def test_a_cancelled_call_leaves_no_reply(cores: Cores) -> None:
    async def run() -> None:
        llm = cores.make()
        for _ in range(5):
            calling = asyncio.create_task(llm.reset_prefix_cache())
            await asyncio.sleep(0)
            calling.cancel()
        await until(lambda: cores.cores[0].num_resets == 5)
        await llm.reset_prefix_cache()
        assert not remote_of(llm)._replies

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["asynchronous", "synchronous"])
def test_a_forked_child_starts_no_core(cores: Cores, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    cores.make()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        forked.setattr(
            "jaxllm.engine.offline.llm_engine.start_in_place", lambda *_: pytest.fail("it has started a core")
        )
        make = cores.make if kind == "asynchronous" else lambda: LLMEngine.from_engine_args(EngineArgs(model="none"))
        with pytest.raises(RuntimeError, match="was forked"):
            make()
    assert len(cores.cores) == 1


def test_a_core_that_has_ended_is_not_listened_to(cores: Cores) -> None:
    llm = cores.make()
    llm.shutdown()

    async def attach() -> None:
        AsyncCore(cores.remotes[0], lambda _: [], lambda *_: []).attach()

    with pytest.raises(EngineDeadError):
        asyncio.run(attach())
