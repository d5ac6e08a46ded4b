"""vLLM's import path for `EngineArgs`."""

from jaxllm.config import EngineArgs

__all__ = ["EngineArgs"]
