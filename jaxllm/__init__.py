"""LLM inference on JAX with vLLM's user API. Importing is cheap: each name loads its module on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxllm.version import __version__, __version_tuple__

if TYPE_CHECKING:
    from jaxllm.engine.async_llm_engine import AsyncLLMEngine
    from jaxllm.engine.offline.llm_engine import LLMEngine
    from jaxllm.engine.online.async_llm import AsyncLLM
    from jaxllm.inputs import PromptType, TextPrompt, TokensPrompt
    from jaxllm.llm import LLM
    from jaxllm.models.registry import ModelRegistry, register_model
    from jaxllm.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from jaxllm.pooling_params import PoolingParams
    from jaxllm.resolve.async_engine_args import AsyncEngineArgs
    from jaxllm.resolve.engine_args import EngineArgs
    from jaxllm.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "ModelRegistry",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "__version_tuple__",
    "register_model",
]

_MODULES = {
    "LLM": "jaxllm.llm",
    "AsyncEngineArgs": "jaxllm.resolve.async_engine_args",
    "AsyncLLM": "jaxllm.engine.online.async_llm",
    "AsyncLLMEngine": "jaxllm.engine.async_llm_engine",
    "ClassificationOutput": "jaxllm.outputs",
    "ClassificationRequestOutput": "jaxllm.outputs",
    "CompletionOutput": "jaxllm.outputs",
    "EmbeddingOutput": "jaxllm.outputs",
    "EmbeddingRequestOutput": "jaxllm.outputs",
    "EngineArgs": "jaxllm.resolve.engine_args",
    "LLMEngine": "jaxllm.engine.offline.llm_engine",
    "ModelRegistry": "jaxllm.models.registry",
    "PoolingOutput": "jaxllm.outputs",
    "PoolingParams": "jaxllm.pooling_params",
    "PoolingRequestOutput": "jaxllm.outputs",
    "PromptType": "jaxllm.inputs",
    "RequestOutput": "jaxllm.outputs",
    "SamplingParams": "jaxllm.sampling_params",
    "ScoringOutput": "jaxllm.outputs",
    "ScoringRequestOutput": "jaxllm.outputs",
    "TextPrompt": "jaxllm.inputs",
    "TokensPrompt": "jaxllm.inputs",
    "register_model": "jaxllm.models.registry",
}


def __getattr__(name: str) -> Any:
    """Load the module that holds `name` (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_MODULES))
