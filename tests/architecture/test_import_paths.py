"""Import paths that vLLM's tests and examples use, with jaxllm for vllm."""

from __future__ import annotations

import copy
import gc
import importlib
import weakref

import pytest

import jaxllm
from jaxllm.distributed import cleanup_dist_env_and_memory

PATHS = {
    "jaxllm": (
        "LLM",
        "AsyncEngineArgs",
        "AsyncLLM",
        "AsyncLLMEngine",
        "EngineArgs",
        "LLMEngine",
        "ModelRegistry",
        "SamplingParams",
        "TokensPrompt",
        "RequestOutput",
        "__version_tuple__",
    ),
    "jaxllm.config": (
        "AttentionConfig",
        "PoolerConfig",
        "ProfilerConfig",
        "ReasoningConfig",
        "StructuredOutputsConfig",
    ),
    "jaxllm.distributed": ("cleanup_dist_env_and_memory",),
    "jaxllm.engine.arg_utils": ("AsyncEngineArgs", "EngineArgs"),
    "jaxllm.engine.async_llm_engine": ("AsyncLLMEngine",),
    "jaxllm.engine.offline.llm_engine": ("LLMEngine",),
    "jaxllm.engine.protocol": ("EngineClient",),
    "jaxllm.entrypoints.llm": ("LLM",),
    "jaxllm.entrypoints.openai.api_server": (
        "build_app",
        "build_async_engine_client",
        "build_async_engine_client_from_engine_args",
        "init_app_state",
        "run_server",
    ),
    "jaxllm.entrypoints.openai.cli_args": ("make_arg_parser", "validate_parsed_serve_args"),
    "jaxllm.exceptions": (
        "ChatTemplateResolutionError",
        "EngineDeadError",
        "EngineGenerateError",
        "GenerationError",
        "GracefulHTTPError",
        "LoRAAdapterNotFoundError",
        "MaxQueuedTokensError",
        "ProfilerAlreadyActiveError",
        "QueueOverflowError",
        "RetryableRequestError",
        "VLLMClientError",
        "VLLMError",
        "VLLMNotFoundError",
        "VLLMServerError",
        "VLLMUnprocessableEntityError",
        "VLLMValidationError",
    ),
    "jaxllm.inputs": ("PromptType", "TextPrompt", "TokensPrompt"),
    "jaxllm.logprobs": ("FlatLogprobs", "Logprob", "LogprobsOnePosition", "PromptLogprobs", "SampleLogprobs"),
    "jaxllm.outputs": ("CompletionOutput", "RequestOutput"),
    "jaxllm.plugins": ("load_general_plugins",),
    "jaxllm.renderers.hf": ("resolve_chat_template",),
    "jaxllm.tokenizers": ("get_tokenizer",),
    "jaxllm.sampling_params": ("BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"),
    "jaxllm.utils.argparse_utils": ("FlexibleArgumentParser",),
    "jaxllm.usage.usage_lib": ("UsageContext",),
    "jaxllm.utils": ("random_uuid",),
    "jaxllm.utils.async_utils": ("merge_async_iterators",),
    "jaxllm.v1.engine.async_llm": ("AsyncLLM",),
    "jaxllm.v1.engine.exceptions": ("EngineDeadError", "EngineGenerateError"),
    "jaxllm.v1.engine.llm_engine": ("LLMEngine",),
    "jaxllm.v1.engine.output_processor": ("RequestOutputCollector",),
    "jaxllm.v1.metrics.reader": ("Counter", "Gauge", "Histogram", "Metric", "Vector"),
    "jaxllm.v1.sample.logits_processor": ("AdapterLogitsProcessor", "BatchUpdate", "LogitsProcessor"),
    "jaxllm.v1.sample.logits_processor.builtin": ("process_dict_updates",),
    "jaxllm.v1.sample.logits_processor.interface": ("AddedRequest", "BatchUpdate", "LogitsProcessor"),
}


def test_import_paths_of_vllm():
    """A name means the same thing wherever it is imported from."""
    offences = [
        (name, getattr(importlib.import_module(module), name)) for module, names in PATHS.items() for name in names
    ]
    assert len({name for name, _ in offences}) == len({(name, id(value)) for name, value in offences})


def test_cleanup_frees_what_nothing_refers_to():
    class Engine:
        def __init__(self) -> None:
            self.itself = self

    gc.disable()
    try:
        engine = weakref.ref(Engine())
        assert engine() is not None
        cleanup_dist_env_and_memory()
        assert engine() is None
    finally:
        gc.enable()


def test_errors_are_of_vllms_kinds():
    from jaxllm import exceptions as found

    for name, kind in (
        ("VLLMValidationError", "VLLMClientError"),
        ("LoRAAdapterNotFoundError", "VLLMNotFoundError"),
        ("ChatTemplateResolutionError", "VLLMClientError"),
        ("EngineGenerateError", "GenerationError"),
        ("EngineDeadError", "VLLMServerError"),
        ("QueueOverflowError", "GracefulHTTPError"),
        ("ProfilerAlreadyActiveError", "GracefulHTTPError"),
        ("GenerationError", "VLLMServerError"),
        ("VLLMClientError", "VLLMError"),
    ):
        assert issubclass(getattr(found, name), getattr(found, kind)), name
    missing = copy.copy(found.LoRAAdapterNotFoundError("a", "/b"))  # as a pickle would make it
    assert str(missing) == missing.message == "Loading lora a failed: No adapter found for /b"


def test_the_version_is_a_tuple_too():
    assert ".".join(map(str, jaxllm.__version_tuple__)) == jaxllm.__version__


def test_the_registry_has_vllms_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxllm.ModelRegistry, "_added", {})
    assert "LlamaForCausalLM" in jaxllm.ModelRegistry.get_supported_archs()
    jaxllm.ModelRegistry.register_model("MineForCausalLM", "mine:MINE")
    assert "MineForCausalLM" in jaxllm.ModelRegistry.get_supported_archs()
