"""vLLM's older name, and import path, for `AsyncLLM`."""

from jaxllm.engine.online.async_llm import AsyncLLM

AsyncLLMEngine = AsyncLLM

__all__ = ["AsyncLLMEngine"]
