"""What `LLM` and `LLMEngine` refuse before they sleep, while they sleep, and when they wake; the core is a fake."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.engine.front.asleep import sleeps_in_place
from jaxllm.exceptions import EngineBusyError, VLLMValidationError
from jaxllm.llm import LLM
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.sampling_params import BeamSearchParams, SamplingParams
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.fake_core import FakeCore
from tests.engine.support import make_llm


def test_the_core_sleeps_once_and_wakes_in_parts(llm: LLM, core: FakeCore) -> None:
    assert not llm.is_sleeping()
    llm.wake_up()
    assert core.woken == []
    llm.sleep(2)
    llm.sleep()
    assert core.slept == [2]
    llm.wake_up(["kv_cache"])
    llm.wake_up(["kv_cache"])
    assert llm.is_sleeping()
    llm.wake_up()
    assert core.woken == ["kv_cache", "weights"]
    assert llm.is_sleeping() is llm.llm_engine.is_sleeping() is False
    llm.sleep()
    llm.wake_up()
    assert core.woken[2:] == ["weights", "kv_cache"]


@pytest.mark.parametrize(
    ("arguments", "name", "message"),
    [
        ({"level": 0}, "level", "level must be 1 or 2, got 0"),
        ({"level": "1"}, "level", "level must be 1 or 2"),
        ({"mode": "keep"}, "mode", "mode must be 'abort' or 'wait'"),
    ],
)
def test_bad_arguments(llm: LLM, core: FakeCore, arguments: dict[str, Any], name: str, message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message) as error:
        llm.sleep(**arguments)
    assert error.value.parameter == name
    assert core.slept == []


@pytest.mark.parametrize("tags", [["kv"], "weights", 3, [["weights"]]])
def test_bad_tags(llm: LLM, core: FakeCore, tags: Any) -> None:
    llm.sleep()
    with pytest.raises(VLLMValidationError, match="tags must be None or a list of 'weights' and 'kv_cache', got"):
        llm.wake_up(tags)
    assert core.woken == []


def test_unfinished_requests_are_not_lost(llm: LLM, core: FakeCore) -> None:
    llm.enqueue(["a", "b"])
    with pytest.raises(VLLMValidationError, match="2 requests are unfinished: run them to their end, or abort them"):
        llm.sleep()
    assert (core.slept, llm.is_sleeping()) == ([], False)
    assert len(llm.wait_for_completion(use_tqdm=False)) == 2
    llm.sleep()


def test_nothing_runs_while_it_sleeps(llm: LLM, core: FakeCore) -> None:
    llm.sleep()
    engine = llm.llm_engine
    messages = [{"role": "user", "content": "a"}]
    calls = (
        lambda: llm.generate("a"),
        lambda: llm.chat(messages),
        lambda: llm.enqueue("a"),
        lambda: llm.enqueue_chat(messages),
        lambda: llm.beam_search([{"prompt": "a"}], BeamSearchParams(2, 3)),
        lambda: engine.add_request("1", "a", SamplingParams()),
        lambda: engine.align("a", [1]),
    )
    for call in calls:
        with pytest.raises(EngineBusyError, match=r"call wake_up\(\) first"):
            call()
    llm.wake_up(["weights"])
    for call in calls:
        with pytest.raises(EngineBusyError, match=r"call wake_up\(\) first, 'kv_cache' is not awake yet"):
            call()
    assert core.seen == []
    llm.wake_up()
    assert len(llm.generate("a", use_tqdm=False)) == 1


def test_several_hosts_cannot_sleep(core: FakeCore, tokenizer: Tokenizer) -> None:
    llm = make_llm(core, tokenizer, nnodes=2)
    with pytest.raises(VLLMValidationError, match=r"cannot sleep: .*Shut it down") as error:
        llm.sleep()
    assert error.value.parameter == "nnodes"
    assert core.slept == []


@pytest.mark.parametrize(
    ("platform", "allocator", "expected"),
    [
        ("cpu", "", True),
        ("gpu", "", False),
        ("gpu", "bfc", False),
        ("gpu", "platform", True),
        ("tpu", "platform", False),
    ],
)
def test_a_core_sleeps_where_that_frees_memory_for_others(
    monkeypatch: pytest.MonkeyPatch, platform: str, allocator: str, expected: bool
) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", allocator)
    assert sleeps_in_place(platform) is expected


def test_the_argument_is_taken() -> None:
    assert EngineArgs("m", enable_sleep_mode=True).enable_sleep_mode
