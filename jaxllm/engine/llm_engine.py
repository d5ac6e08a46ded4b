"""vLLM's import path for `LLMEngine`."""

from jaxllm.engine.offline.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
