"""vLLM's import path for `EngineArgs`."""

from jaxllm.config.engine_args import EngineArgs

__all__ = ["EngineArgs"]
