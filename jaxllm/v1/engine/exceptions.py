"""vLLM's import path for the errors of an engine."""

from jaxllm.exceptions import EngineDeadError, EngineGenerateError

__all__ = ["EngineDeadError", "EngineGenerateError"]
