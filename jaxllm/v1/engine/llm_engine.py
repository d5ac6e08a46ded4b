"""vLLM's import path for `LLMEngine`."""

from jaxllm.engine.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
