"""vLLM's import path for the engine that a server stands on."""

from jaxllm.engine.async_client import build_async_engine_client, build_async_engine_client_from_engine_args

__all__ = ["build_async_engine_client", "build_async_engine_client_from_engine_args"]
