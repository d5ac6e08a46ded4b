"""vLLM's import path for `EngineArgs` and `AsyncEngineArgs`."""

from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.resolve.engine_args import EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
