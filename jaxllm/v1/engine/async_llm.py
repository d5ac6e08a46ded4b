"""vLLM's import path for `AsyncLLM`."""

from jaxllm.engine.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
