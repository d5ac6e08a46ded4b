"""Serve the list of models, each by one or more names, with their LoRA adapters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import LoRAAdapterNotFoundError, VLLMValidationError
from jaxllm.lora.request import LoRARequest
from jaxllm.resolve.vllm_config import ModelConfig
from jaxllm.server.http.errors import RequestFailedError, unknown_model
from jaxllm.server.models.entry import ModelEntry
from jaxllm.server.models.registry import ServedModels

logger = logging.getLogger(__name__)


class LoRAModule(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter to load at startup: NAME=PATH, or the same as JSON."""

    name: str
    path: str
    base_model_name: str | None = None

    @classmethod
    def read(cls, text: str) -> LoRAModule:
        """Read an entry of `lora_modules`. Raises VLLMValidationError."""
        try:
            if text.lstrip().startswith("{"):
                return msgspec.json.decode(text, type=cls)
            name, path = text.split("=", 1)
            return cls(name=name, path=path)
        except (ValueError, msgspec.MsgspecError) as error:
            message = f"lora_modules: {text!r} is neither NAME=PATH nor JSON with name and path ({error})."
            raise VLLMValidationError(message, parameter="lora_modules", value=text) from error


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model as listed by `/v1/models`."""

    id: str
    object: str = "model"
    type: str = "model"
    """This, `display_name` and `created_at` are for Anthropic's clients."""
    display_name: str
    created_at: str
    created: int
    owned_by: str = "jaxllm"
    root: str
    """What it was loaded from."""
    parent: str | None = None
    """The model that the adapter is for."""
    max_model_len: int | None
    """None for a model that has not been loaded yet, as the next two are empty for it."""
    default_sampling_params: dict[str, Any]
    """The default sampling parameters from the model or a flag."""
    capabilities: dict[str, bool]
    """`vision`: whether messages may have images."""
    status: str = "ready"
    """Where the model is: absent, loading, ready, leaving, asleep or failed."""
    error: str | UnsetType = UNSET
    """Why it could not be loaded, or has ended."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/models`."""

    object: str = "list"
    data: list[ModelCard]
    has_more: bool = False
    """This and the next two are for Anthropic's clients: there is one page."""
    first_id: str
    last_id: str


class AdapterLoadError(VLLMValidationError):
    """An adapter exists and cannot be loaded."""


class AdapterChange(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that was loaded, or unloaded."""

    name: str
    number: int | None
    """The engine's number of it; None once it is unloaded."""
    path: str = ""
    base_model_name: str | None = None


class OpenAIServingModels:
    """Knows the names of the model and its adapters."""

    def __init__(
        self,
        model_config: ModelConfig,
        names: Sequence[str] | None,
        sampling: Mapping[str, Any] | None = None,
        *,
        sees: bool = False,
    ) -> None:
        """Give the model these `names`, the first for answers; without any, the name that it was loaded by.

        `sees` says whether it takes images.
        """
        self._names = list(names or [model_config.model])
        self._max_model_len, self._sampling = model_config.max_model_len, dict(sampling or {})
        self._sees = sees
        self._cards = {name: self._card(name, model_config.model) for name in self._names}
        self._adapters: dict[str, LoRARequest] = {}
        self._num_added = self._num_at_start = 0
        self._next_number: Callable[[], int] | None = None
        self._tell: Callable[[AdapterChange], Awaitable[None]] | None = None
        self._changes = asyncio.Lock()

    @property
    def name(self) -> str:
        """Return the model's name in answers."""
        return self._names[0]

    def has(self, name: str) -> bool:
        """Return whether the model, or an adapter, has this name."""
        return name in self._cards

    def check(self, name: str | None) -> None:
        """Raise RequestFailedError, 404, for an unknown name. None is the model itself."""
        if name is not None and name not in self._cards:
            raise unknown_model(name)

    def shown(self, name: str | None) -> str:
        """Return the name in the answer to a request: an adapter's, or the model's."""
        return name if name in self._adapters else self.name

    def adapter(self, name: str | None) -> LoRARequest | None:
        """Return the adapter of a request's model name; None for the model itself."""
        return None if name is None else self._adapters.get(name)

    def cards(self) -> list[ModelCard]:
        """Return the entries of all names."""
        return list(self._cards.values())

    def share(self, next_number: Callable[[], int], tell: Callable[[AdapterChange], Awaitable[None]]) -> None:
        """Share later changes of the adapters with other front ends: `next_number` returns the numbers of new ones, and
        `tell` has all front ends, this one too, `take` a change.
        """
        self._num_at_start, self._next_number, self._tell = self._num_added, next_number, tell

    def take(self, change: AdapterChange) -> None:
        """Take in a change of the adapters, which the engine knows."""
        if change.number is None:
            self._adapters.pop(change.name, None)
            self._cards.pop(change.name, None)
            return
        self._adapters[change.name] = LoRARequest(
            change.name, change.number, change.path, base_model_name=change.base_model_name
        )
        self._cards[change.name] = self._card(change.name, change.path, change.base_model_name or self.name)

    async def _apply(self, change: AdapterChange) -> None:
        if self._tell is None:
            self.take(change)
        else:
            await self._tell(change)

    async def add_all(self, engine: AsyncLLM, modules: Iterable[LoRAModule], *, are_loaded: bool = False) -> None:
        """Load adapters, unless they `are_loaded`. Raises VLLMValidationError for a bad one, and for a name in use."""
        for module in modules:
            await self.add(engine, module, is_loaded=are_loaded)

    async def add(
        self, engine: AsyncLLM, module: LoRAModule, *, replaces: bool = False, is_loaded: bool = False
    ) -> None:
        """Load an adapter. With `replaces` the one of that name is read again; one that `is_loaded` gets a name only.

        Raises LoRAAdapterNotFoundError for a missing one, AdapterLoadError for a bad one, and VLLMValidationError for
        a name in use.
        """
        async with self._changes:
            known = self._adapters.get(module.name)
            if module.name in self._cards and not (known and replaces):
                message = f"The name {module.name!r} is in use: unload the adapter first, or choose another name."
                raise VLLMValidationError(message, parameter="lora_name", value=module.name)
            number = self._new_number() if known is None else known.lora_int_id
            request = LoRARequest(
                module.name, number, module.path, base_model_name=module.base_model_name, load_inplace=known is not None
            )
            if not is_loaded:
                await _load(engine, request)
            self._num_added = max(self._num_added, number)
            change = AdapterChange(
                name=module.name, number=number, path=module.path, base_model_name=module.base_model_name
            )
            await self._apply(change)

    async def add_others(self, engine: AsyncLLM, before: OpenAIServingModels) -> None:
        """Load what another had besides. One that cannot be loaded any more is logged and left out."""
        for request in before._adapters.values():
            if request.lora_name in self._adapters:
                continue
            module = LoRAModule(name=request.lora_name, path=request.lora_path, base_model_name=request.base_model_name)
            try:
                await self.add(engine, module)
            except VLLMValidationError as error:
                logger.warning("the adapter %s is lost: %s", request.lora_name, error)

    async def remove(self, engine: AsyncLLM, name: str) -> None:
        """Unload an adapter; running requests keep it. Raises RequestFailedError, 404, for an unknown name."""
        async with self._changes:
            request = self._adapters.get(name)
            if request is None:
                message = f"The LoRA adapter `{name}` does not exist."
                raise RequestFailedError(HTTPStatus.NOT_FOUND, message, param="lora_name")
            await self._apply(AdapterChange(name=name, number=None))
            await engine.remove_lora(request.lora_int_id)

    def _new_number(self) -> int:
        """Return a number that no adapter has had, at no front end: those of the start have the first ones."""
        return self._num_added + 1 if self._next_number is None else self._num_at_start + self._next_number()

    def _card(self, name: str, root: str, parent: str | None = None) -> ModelCard:
        return ModelCard(
            **_dated(name, datetime.now(UTC).replace(microsecond=0)),
            root=root,
            parent=parent,
            max_model_len=self._max_model_len,
            default_sampling_params=self._sampling,
            capabilities={"vision": self._sees},
        )


def list_models(models: ServedModels[Any]) -> ModelList:
    """Return the entries of all models of a server, and of their adapters."""
    cards = [card for entry in models.entries for card in cards_of(entry)]
    return ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id)


def find_card(models: ServedModels[Any], name: str) -> ModelCard:
    """Return the entry of a model or an adapter. Raises RequestFailedError, 404, for an unknown name."""
    entry = models.find((name,))
    card = next((card for card in cards_of(entry) if card.id == name), None)
    if card is None:
        raise unknown_model(name)
    return card


def cards_of(entry: ModelEntry[Any]) -> list[ModelCard]:
    """Return the entries of a model and its adapters, with the state that it is in."""
    if entry.record is not None:
        shown: dict[str, Any] = {"status": entry.state.value, "error": entry.error or UNSET}
        return [msgspec.structs.replace(card, **shown) for card in entry.record.models.cards()]
    parents = dict.fromkeys(entry.names) | dict.fromkeys(entry.adapters, entry.name)
    return [
        ModelCard(
            **_dated(name, entry.created),
            root=entry.source,
            parent=parent,
            max_model_len=None,
            default_sampling_params={},
            capabilities={},
            status=entry.state.value,
            error=entry.error or UNSET,
        )
        for name, parent in parents.items()
    ]


def _dated(name: str, created: datetime) -> dict[str, Any]:
    """Return the fields of an entry that say its name and its time."""
    text = created.isoformat().replace("+00:00", "Z")
    return {"id": name, "display_name": name, "created_at": text, "created": int(created.timestamp())}


async def _load(engine: AsyncLLM, request: LoRARequest) -> None:
    try:
        await engine.add_lora(request)
    except VLLMValidationError as error:
        if error.parameter == "lora_path":
            raise LoRAAdapterNotFoundError(request.lora_name, request.lora_path) from error
        raise AdapterLoadError(str(error), parameter=error.parameter) from error
