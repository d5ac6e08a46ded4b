"""vLLM's import path for `EngineArgs` and `AsyncEngineArgs`."""

from jaxllm.config.async_engine_args import AsyncEngineArgs
from jaxllm.config.engine_args import EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
