"""What an asynchronous engine must have: vLLM's names, with the parameters that its programs give."""

from __future__ import annotations

import copy
import inspect

from jaxllm.engine.protocol import EngineClient
from jaxllm.exceptions import EngineBusyError, EngineDeadError, EngineGenerateError, QueueOverflowError
from jaxllm.usage.usage_lib import UsageContext

VLLM_METHODS = {
    "abort": "request_id",
    "add_lora": "lora_request",
    "check_health": "",
    "do_log_stats": "",
    "encode": "prompt pooling_params request_id lora_request trace_headers priority tokenization_kwargs",
    "generate": "prompt sampling_params request_id prompt_text lora_request tokenization_kwargs trace_headers priority "
    "data_parallel_rank",
    "get_tokenizer": "",
    "is_paused": "",
    "is_sleeping": "",
    "is_tracing_enabled": "",
    "pause_generation": "mode wait_for_inflight_requests clear_cache",
    "reset_encoder_cache": "",
    "reset_mm_cache": "",
    "reset_prefix_cache": "reset_running_requests reset_connector",
    "resume_generation": "",
    "sleep": "level mode",
    "start_profile": "",
    "stop_profile": "",
    "wake_up": "tags",
}
"""The abstract methods of vLLM's EngineClient, with their parameters."""


def test_every_method_of_vllm_takes_what_it_takes_there():
    for name, words in VLLM_METHODS.items():
        parameters = inspect.signature(getattr(EngineClient, name)).parameters
        assert set(words.split()) <= set(parameters), name
        required = [each.name for each in parameters.values() if each.default is each.empty]
        assert required == ["self", *words.split()[: len(required) - 1]], name
    properties = {"dead_error", "errored", "is_running", "is_stopped"}
    answered = {"is_tracing_enabled"}  # by the settings, whatever the engine
    assert EngineClient.__abstractmethods__ == set(VLLM_METHODS) - answered | properties


def test_generate_takes_older_positions_too():
    names = ("prompt", "sampling_params", "request_id", "lora_request", "trace_headers", "prompt_adapter_request")
    names += ("priority",)
    bound = inspect.signature(EngineClient.generate).bind(None, *names)
    del bound.arguments["self"]
    assert bound.arguments == dict(zip(names, names, strict=True))


def test_errors_travel():
    for error in (EngineDeadError("killed"), EngineGenerateError("why"), QueueOverflowError("full")):
        again = copy.copy(error)  # as pickle does it
        assert (type(again), str(again)) == (type(error), str(error))


def test_a_full_queue_is_an_answer_for_servers():
    assert issubclass(QueueOverflowError, EngineBusyError)
    assert QueueOverflowError("full").http_status == 503


def test_usage_contexts_are_strings():
    assert UsageContext("ENGINE_CONTEXT") is UsageContext.ENGINE_CONTEXT
    assert UsageContext.OPENAI_API_SERVER == "OPENAI_API_SERVER"
