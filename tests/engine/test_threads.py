"""One `LLM` and several threads, or a call within a call: every answer is its caller's own, or there is an error."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxllm.llm import LLM
from jaxllm.sampling_params import BeamSearchParams, SamplingParams
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.utils.turn import FairLock
from tests.engine.fake_core import FakeCore
from tests.engine.support import make_llm
from tests.engine.test_llm import Bar


def answer(llm: LLM, prompt: str) -> list[int]:
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert output.prompt == prompt
    return list(output.outputs[0].token_ids)


def slow_steps(core: FakeCore) -> threading.Event:
    """Make each step take 10 ms; return what is set when the first one begins."""
    inside = threading.Event()

    def before_step(step: int) -> None:
        inside.set()
        time.sleep(0.01)

    core.before_step = before_step
    return inside


def test_threads_take_turns(llm: LLM, core: FakeCore) -> None:
    core.before_step = lambda step: time.sleep(0)  # where another thread would come in
    prompts = [f"prompt {i}" for i in range(60)]
    alone = [answer(llm, prompt) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda prompt: answer(llm, prompt), prompts)) == alone


def test_all_calls_take_turns(core: FakeCore, tokenizer: Tokenizer) -> None:
    """While one thread is in a call, every other call that touches the engine waits for its end."""
    llm = make_llm(core, tokenizer)
    inside, go_on = threading.Event(), threading.Event()

    def hold(step: int) -> None:
        inside.set()
        assert go_on.wait(20)

    core.before_step = hold
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate("a", use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": "a"}], use_tqdm=False),
        lambda: llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=2)),
        lambda: llm.enqueue("a"),
        lambda: llm.enqueue_chat([{"role": "user", "content": "a"}]),
        lambda: llm.wait_for_completion(use_tqdm=False),
        llm.reset_prefix_cache,
    ]
    with ThreadPoolExecutor(len(calls) + 1) as pool:
        first = pool.submit(llm.generate, "first", use_tqdm=False)
        assert inside.wait(20)
        others = [pool.submit(call) for call in calls]
        time.sleep(0.05)
        assert not any(other.done() for other in others)
        assert (len(core.seen), core.num_resets) == (1, 0)
        go_on.set()
        assert [output.prompt for output in first.result(20)] == ["first"]
        for other in others:
            other.result(20)


def test_a_call_within_a_call_is_refused(llm: LLM, core: FakeCore) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate("nested", use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": "nested"}], use_tqdm=False),
        lambda: llm.enqueue("nested"),
        lambda: llm.wait_for_completion(use_tqdm=False),
        llm.reset_prefix_cache,
        llm.shutdown,
    ]
    for call in calls:

        def bar(call: Callable[[], Any] = call, **_options: Any) -> Any:
            call()

        with pytest.raises(RuntimeError, match=r"was called from within LLM\.generate\(\).* one call at a time"):
            llm.generate(["a", "b"], use_tqdm=bar)
        assert not core.requests
    assert len(llm.generate(["a", "b"], use_tqdm=False)) == 2


def test_ctrl_c_while_waiting_for_a_turn(llm: LLM, core: FakeCore) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold(step: int) -> None:
        inside.set()
        assert go_on.wait(20)

    core.before_step = hold
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(llm.generate, "first", use_tqdm=False)
        assert inside.wait(20)
        pressed = pool.submit(lambda: (time.sleep(0.1), os.kill(os.getpid(), signal.SIGINT)))
        with pytest.raises(KeyboardInterrupt):
            llm.generate("second", use_tqdm=False)
        pressed.result(20)
        go_on.set()
        assert [output.prompt for output in first.result(20)] == ["first"]
    assert len(core.seen) == 1
    assert [output.prompt for output in llm.generate("third", use_tqdm=False)] == ["third"]


def test_a_callback_that_steps_the_engine_takes_no_output_in_silence(llm: LLM) -> None:
    def make_bar(**options: Any) -> Bar:
        for _ in range(20):
            llm.llm_engine.step()
        return Bar(**options)

    with pytest.raises(RuntimeError, match=r"2 of 2 requests ended without an output"):
        llm.generate(["a", "b"], SamplingParams(max_tokens=4), use_tqdm=make_bar)


def test_shutdown_ends_the_call_of_another_thread(llm: LLM, core: FakeCore) -> None:
    inside = slow_steps(core)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(llm.generate, ["a"] * 8, SamplingParams(max_tokens=100), use_tqdm=False)
        assert inside.wait(20)
        llm.shutdown()
        assert core.num_shutdowns == 1
        with pytest.raises(RuntimeError, match="was shut down by another thread"):
            running.result(20)
    assert core.num_steps < 50
    assert not core.requests


def test_another_thread_may_abort_through_the_engine(llm: LLM, core: FakeCore) -> None:
    """The abort waits for the step's end. The call says that an output is missing."""
    inside = slow_steps(core)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(llm.generate, ["a", "b"], SamplingParams(max_tokens=100), use_tqdm=False)
        assert inside.wait(20)
        llm.llm_engine.abort_request("0")
        with pytest.raises(RuntimeError, match=r"1 of 2 requests ended without an output"):
            running.result(20)
    assert not core.requests


def test_the_lock_goes_to_the_thread_that_waits() -> None:
    """A loop that gives the lock back and takes it again, as one of steps does, lets another thread in between."""
    lock, order = FairLock(), []

    def take(name: str) -> None:
        with lock.take(), lock.take():
            order.append(name)

    with ThreadPoolExecutor(1) as pool:
        with lock.take():
            other = pool.submit(take, "other")
            time.sleep(0.1)
            assert not order
        take("loop")
        other.result(20)
    assert order == ["other", "loop"]


def test_requests_that_a_scheduler_loses_are_not_waited_for(llm: LLM, core: FakeCore) -> None:
    core.before_step = lambda step: core.requests.clear()
    llm.enqueue(["a", "b"])
    with pytest.raises(RuntimeError, match="has lost 2 requests"):
        llm.wait_for_completion(use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    core.before_step = lambda step: None
    assert len(llm.generate(["a", "b"], use_tqdm=False)) == 2


def test_enqueued_requests_that_a_failing_step_ended(llm: LLM, core: FakeCore) -> None:
    """Waiting for them raises the failure; those that were finished before it can still be had."""
    llm.enqueue("short", SamplingParams(max_tokens=2))
    llm.enqueue("long", SamplingParams(max_tokens=30))

    def fail(step: int) -> None:
        if step == 5:
            raise RuntimeError("a scheduler of the user's")

    core.before_step = fail
    with pytest.raises(RuntimeError, match="a scheduler of the user's"):
        llm.generate("other", use_tqdm=False)
    with pytest.raises(RuntimeError, match="ended without an output") as error:
        llm.wait_for_completion(use_tqdm=False)
    assert "a scheduler of the user's" in str(error.value.__cause__)
    assert [output.prompt for output in llm.wait_for_completion(use_tqdm=False)] == ["short"]
    assert not core.requests
    core.before_step = lambda step: None
    llm.enqueue("again")
    assert [output.prompt for output in llm.wait_for_completion(use_tqdm=False)] == ["again"]
