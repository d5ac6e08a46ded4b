"""vLLM's import path for `AsyncLLM`."""

from jaxllm.engine.online.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
