"""vLLM's import path for `LLM`."""

from jaxllm.llm import LLM

__all__ = ["LLM"]
