"""Every name of vLLM's `AsyncLLM` works here with what it takes there, or is refused with what to do instead."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
from types import FunctionType, MethodType
from typing import Any

import pytest

from jaxllm.engine.front.refused_methods import ASYNC_LACKS, ASYNC_REFUSES
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.engine.online.request_stream import RequestOutputCollector
from jaxllm.exceptions import EngineGenerateError, VLLMValidationError
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.sampling_params import RequestOutputKind
from jaxllm.usage.usage_lib import UsageContext
from jaxllm.utils.awaitable import awaitable
from tests.engine.support import byte_level

METHODS = {
    "abort": "request_id internal",
    "add_lora": "lora_request",
    "add_request": "request_id prompt params arrival_time lora_request tokenization_kwargs trace_headers priority "
    "data_parallel_rank session_id prompt_text reasoning_ended reasoning_parser_kwargs",
    "check_health": "",
    "checkpoint_prepare": "",
    "checkpoint_restore": "",
    "collective_rpc": "method timeout args kwargs",
    "do_log_stats": "",
    "encode": "prompt pooling_params request_id",
    "finish_weight_update": "weight_version",
    "from_engine_args": "engine_args start_engine_loop usage_context stat_loggers",
    "from_vllm_config": "vllm_config start_engine_loop usage_context stat_loggers enable_log_requests "
    "aggregate_engine_logging disable_log_stats client_addresses client_count client_index",
    "generate": "prompt sampling_params request_id",
    "get_external_elastic_ep_phase": "",
    "get_status": "",
    "get_supported_tasks": "",
    "get_tokenizer": "",
    "get_weight_version": "",
    "handle_fault": "fault_tolerance_request",
    "init_weight_transfer_engine": "request",
    "is_paused": "",
    "is_sleeping": "",
    "is_tracing_enabled": "",
    "list_loras": "",
    "notify_kv_transfer_request_rejected": "request_id kv_transfer_params",
    "pause_generation": "",
    "pin_lora": "lora_id",
    "remove_lora": "lora_id",
    "reset_encoder_cache": "",
    "reset_mm_cache": "",
    "reset_prefix_cache": "reset_running_requests reset_connector",
    "resume_generation": "",
    "scale_elastic_ep": "new_data_parallel_size drain_timeout",
    "shutdown": "timeout",
    "sleep": "level mode",
    "start_draft_weight_update": "",
    "start_profile": "profile_prefix",
    "start_weight_update": "",
    "stop_profile": "",
    "update_weight_version": "new_version",
    "update_weights": "request",
    "wait_for_requests_to_drain": "drain_timeout",
    "wake_up": "tags",
}
"""The methods of vLLM's AsyncLLM in August 2026, with the parameters that may be given by position."""
KEYWORDS = {
    "generate": "prompt_text lora_request tokenization_kwargs trace_headers priority data_parallel_rank session_id "
    "reasoning_ended reasoning_parser_kwargs",
    "pause_generation": "mode wait_for_inflight_requests clear_cache",
}
"""The parameters that have to be named there."""
ATTRIBUTES = {"log_requests", "vllm_config", "model_config", "tokenizer"} | {
    "dead_error",
    "errored",
    "is_running",
    "is_stopped",
}
"""The attributes that work here; `log_requests` is set when an engine is made."""


def test_every_method_works_or_is_refused() -> None:
    works = {name for name in METHODS if isinstance(getattr(AsyncLLM, name, None), (FunctionType, MethodType))}
    assert works.isdisjoint(ASYNC_REFUSES), "a row of the table hides a method"
    assert works | (set(ASYNC_REFUSES) - {"apply_model"}) == set(METHODS), "write it, or say in the table why not"


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(ASYNC_REFUSES)))
def test_a_method_takes_what_it_takes_there(name: str) -> None:
    parameters = list(inspect.signature(getattr(AsyncLLM, name)).parameters.values())
    positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "self"]
    expected = METHODS[name].split()
    assert positional[: len(expected)] == expected
    assert set(KEYWORDS.get(name, "").split()) <= {each.name for each in parameters}
    asked = [each.name for each in parameters if each.default is each.empty and each.name != "self"]
    assert asked == expected[: len(asked)], "what has a default there has one here"


@pytest.mark.parametrize("name", sorted(ASYNC_REFUSES))
def test_a_refused_method_says_what_to_do(name: str) -> None:
    with pytest.raises(VLLMValidationError, match=rf"^AsyncLLM\.{name}\(\) is .{{40,}}\.$") as error:
        getattr(AsyncLLM, name)("anything", at="all")
    assert error.value.parameter == name


def test_attributes_are_there_or_say_what_to_use_instead() -> None:
    llm = AsyncLLM.__new__(AsyncLLM)
    assert set(dir(llm)) >= ATTRIBUTES - {"log_requests"}
    for name in ASYNC_LACKS:
        assert not hasattr(llm, name), "programs that look for it must not find it"
        with pytest.raises(AttributeError, match=rf"^AsyncLLM\.{name} is not .{{30,}}\.$"):
            getattr(llm, name)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("stat_loggers", {"stat_loggers": [object]}),
        ("client_addresses", {"client_addresses": {"input_address": "ipc:///x"}}),
        ("client_count", {"client_count": 2}),
        ("client_index", {"client_index": 1}),
    ],
)
def test_what_an_engine_cannot_be_made_with_is_named(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match=f"{name} is not supported"):
        AsyncLLM.from_vllm_config(AsyncEngineArgs("m").create_engine_config(), **arguments)


def test_a_configuration_of_another_engine_is_named() -> None:
    with pytest.raises(VLLMValidationError, match="vllm_config must be what AsyncEngineArgs"):
        AsyncLLM.from_vllm_config(EngineArgs("m"))


def test_an_engine_is_made_as_programs_make_it() -> None:
    class Recorder(AsyncLLM):
        def __init__(
            self, start: Any, *, admission: Any, logs_requests: bool = False, reasoning_parser: str = ""
        ) -> None:
            self.log_requests = logs_requests

    args = AsyncEngineArgs("m", disable_log_requests=True)
    made = [
        Recorder.from_engine_args(args, True, UsageContext.API_SERVER, None),
        Recorder.from_engine_args(engine_args=args, start_engine_loop=False, stat_loggers=[]),
        Recorder.from_engine_args(EngineArgs("m")),  # type: ignore[arg-type]
        Recorder.from_vllm_config(
            vllm_config=args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER),
            usage_context=UsageContext.OPENAI_API_SERVER,
            disable_log_requests=True,
            disable_log_stats=True,
        ),
        Recorder.from_vllm_config(args, True, UsageContext.LLM_CLASS, None, False, False, True, None, 1, 0),
    ]
    assert [each.log_requests for each in made] == [False] * 5
    assert Recorder.from_vllm_config(args, enable_log_requests=True).log_requests


def output(*token_ids: int, index: int = 0, finished: bool = False) -> RequestOutput:
    text = "".join(map(chr, token_ids))
    end = "length" if finished else None
    completion = CompletionOutput(index, text, list(token_ids), None, None, finish_reason=end)
    return RequestOutput("r", None, [1, 2], None, [completion], finished)


def test_a_collector_appends_deltas_that_nobody_has_read() -> None:
    async def run() -> list[tuple[str, bool]]:
        collector = RequestOutputCollector(RequestOutputKind.DELTA, "r")
        assert (collector.request_id, collector.get_nowait()) == ("r", None)
        seen = []
        for puts in ([output(97)], [output(98), output(99)], [output(100), output(101), output(102, finished=True)]):
            for piece in puts:
                collector.put(piece)
            got = await collector.get()
            seen.append((got.outputs[0].text, got.finished))
            assert len(got.outputs[0].token_ids) == len(puts)
            assert collector.get_nowait() is None
        return seen

    assert asyncio.run(run()) == [("a", False), ("bc", False), ("def", True)]


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
def test_a_collector_keeps_the_last_of_what_is_cumulative(kind: RequestOutputKind) -> None:
    collector = RequestOutputCollector(kind, "r")
    collector.put(output(97))
    collector.put(output(97, 98, index=1))
    collector.put(output(97, 98, 99, finished=True))
    got = collector.get_nowait()
    assert got is not None
    assert [(each.index, each.text) for each in got.outputs] == [(0, "abc"), (1, "ab")]
    assert got.finished


def test_a_collector_raises_an_error_after_what_came_before_it() -> None:
    async def run() -> str:
        collector = RequestOutputCollector(RequestOutputKind.DELTA, "r")
        collector.put(output(97))
        collector.put(EngineGenerateError("it broke"))
        got = await collector.get()
        for read in (collector.get, collector.get):
            with pytest.raises(EngineGenerateError, match="it broke"):
                await read()
        with pytest.raises(EngineGenerateError, match="it broke"):
            collector.get_nowait()
        return got.outputs[0].text

    assert asyncio.run(run()) == "a"


def test_a_tokenizer_that_may_be_awaited_is_what_it_was() -> None:
    value = byte_level().hf
    kind = type(value)
    assert awaitable(value) is value
    assert awaitable(value) is value

    async def run() -> Any:
        return await value  # type: ignore[misc]

    assert asyncio.run(run()) is value
    assert isinstance(value, kind)
    assert (type(value).__name__, type(value).__module__) == (kind.__name__, kind.__module__)
    for again in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):  # noqa: S301 - our own
        assert type(again) is kind
        assert again.encode("hello world") == value.encode("hello world") != []
