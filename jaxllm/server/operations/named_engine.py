"""The engine that a development route is about."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.models.entry import State
from jaxllm.server.models.registry import ServedModels


def named_engine(request: Request) -> AsyncLLM:
    """Return the engine of the only model, or of the one that the query's `model` names, which must be loaded."""
    models: ServedModels[Any] = request.app.state.models
    name = request.query_params.get("model")
    if models.only is None and name is None:
        message = "model: this server has several models: name one in the query. /v1/models lists them."
        raise VLLMValidationError(message, parameter="model")
    entry = models.find((name or "",))
    if entry.state is not State.READY:
        message = f"model: the model `{entry.name}` is not loaded. Requests load it."
        raise VLLMValidationError(message, parameter="model", value=name)
    return entry.engine
