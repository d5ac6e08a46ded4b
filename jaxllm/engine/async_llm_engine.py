"""vLLM's older name, and import path, for `AsyncLLM`."""

from jaxllm.engine.async_llm import AsyncLLM

AsyncLLMEngine = AsyncLLM

__all__ = ["AsyncLLMEngine"]
