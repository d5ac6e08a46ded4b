"""List and describe the models of a server in Ollama's form."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec import UNSET

from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.server.http.model_names import name_in_json
from jaxllm.server.models.entry import ModelEntry, State
from jaxllm.server.models.registry import ServedModels
from jaxllm.server.ollama.protocol import OllamaDetails, OllamaModel, OllamaModels, OllamaShow

LATEST = ":latest"
_FOREVER = "9999-12-31T23:59:59Z"
_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Ollama's names of float types."""


async def names_in_json(body: bytes, headers: Mapping[bytes, bytes], query: bytes) -> tuple[str, ...]:
    """Return the names that a request may mean: Ollama's clients may add a tag, or leave it out."""
    return tuple(other for name in await name_in_json(body, headers, query) for other in spellings(name))


def spellings(name: str) -> tuple[str, ...]:
    """Return the names that a name may mean, the likeliest first."""
    return name, name + LATEST, name.removesuffix(LATEST)


def tags(models: ServedModels[Any]) -> OllamaModels:
    """Return all models, as `/api/tags` lists them."""
    return OllamaModels([_model(entry, name) for entry in models.entries for name in _names(entry)])


def running(models: ServedModels[Any]) -> OllamaModels:
    """Return the loaded models, as `/api/ps` lists them."""
    ready = [entry for entry in models.entries if entry.state is State.READY]
    return OllamaModels([_model(entry, name, is_running=True) for entry in ready for name in _names(entry)])


def describe(models: ServedModels[Any], name: str) -> OllamaShow:
    """Return the description of a model for `/api/show`, which loads none: one that has not been loaded has little.

    Raises RequestFailedError, 404, for an unknown name.
    """
    entry = models.find(spellings(name))
    if entry.record is not None:
        return entry.record.ollama.show(name, _details(entry), _modified(entry))
    info: dict[str, str | int] = {"general.architecture": "jaxllm"}
    return OllamaShow(
        template="", details=_details(entry), model_info=info, capabilities=[], modified_at=_modified(entry)
    )


def _names(entry: ModelEntry[Any]) -> list[str]:
    if entry.record is None:
        return [*entry.names, *entry.adapters]
    return [card.id for card in entry.record.models.cards()]


def _model(entry: ModelEntry[Any], name: str, *, is_running: bool = False) -> OllamaModel:
    """Return the entry of a name, for `/api/ps` with its expiry and context length."""
    tagged = name if ":" in name else name + LATEST
    ready = _ready(entry)
    size = (entry.num_weight_bytes or 0) if ready is None else ready.num_weight_bytes
    length = UNSET if ready is None or not is_running else ready.max_model_len
    return OllamaModel(
        name=tagged,
        model=tagged,
        modified_at=_modified(entry),
        size=size,
        digest=hashlib.sha256(tagged.encode()).hexdigest(),
        details=_details(entry),
        expires_at=_expiry(entry.expires_in) if is_running else UNSET,
        size_vram=size if is_running else UNSET,
        context_length=length,
    )


def _ready(entry: ModelEntry[Any]) -> EngineReady | None:
    return None if entry.record is None else entry.record.engine.front.ready


def _details(entry: ModelEntry[Any]) -> OllamaDetails:
    ready = _ready(entry)
    name = "" if ready is None else ready.weight_type
    return OllamaDetails(quantization_level=_FLOATS.get(name, name))


def _modified(entry: ModelEntry[Any]) -> str:
    return entry.created.isoformat()


def _expiry(seconds: float | None) -> str:
    """Return when a model sleeps if no request comes for it."""
    if seconds is None:
        return _FOREVER
    return (datetime.now(UTC) + timedelta(seconds=min(seconds, 1e9))).isoformat().replace("+00:00", "Z")
