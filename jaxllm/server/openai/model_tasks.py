"""Refuse requests to routes that the model cannot serve, in vLLM's words."""

from __future__ import annotations

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError


def check_generates(engine: AsyncLLM, api: str) -> None:
    """Raise VLLMValidationError for an engine that does not generate text from text."""
    if not engine.front.ready.generates or engine.front.ready.transcribes:
        raise _unsupported(api)


def supported[T](serving: T | None, api: str) -> T:
    """Return the object that serves a route. Raises VLLMValidationError if the model has none."""
    if serving is None:
        raise _unsupported(api)
    return serving


def _unsupported(api: str) -> VLLMValidationError:
    return VLLMValidationError(f"The model does not support {api} API")
