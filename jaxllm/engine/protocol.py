"""vLLM's import path for `EngineClient`."""

from jaxllm.engine.online.engine_client import EngineClient

__all__ = ["EngineClient"]
