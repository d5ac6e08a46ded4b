"""The models that a server has: one, which may go by several names."""

from __future__ import annotations

import time
from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from jaxllm.config.vllm_config import ModelConfig
from jaxllm.server.errors import RequestFailedError


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model as `/v1/models` tells of it."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "jaxllm"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/models`."""

    object: str = "list"
    data: list[ModelCard]


class OpenAIServingModels:
    """This knows what the model is called."""

    def __init__(self, model_config: ModelConfig, names: Sequence[str] | None) -> None:
        """Call the model by `names`, of which answers show the first; by what it was loaded as without any."""
        self._names = list(names or [model_config.model])
        self._cards = [
            ModelCard(
                id=name,
                created=int(time.time()),
                root=model_config.model,
                max_model_len=model_config.max_model_len,
            )
            for name in self._names
        ]

    @property
    def name(self) -> str:
        """Return the name that answers show."""
        return self._names[0]

    def check(self, given: str | None) -> None:
        """Raise RequestFailedError, 404, for a name that no model has; a request may leave it out."""
        if given is not None and given not in self._names:
            message = f"The model `{given}` does not exist."
            raise RequestFailedError(HTTPStatus.NOT_FOUND, message, param="model")

    def find(self, name: str) -> ModelCard:
        """Return what is known of the model by one of its names. Raises RequestFailedError, 404, for another."""
        self.check(name)
        return self._cards[self._names.index(name)]

    def show(self) -> ModelList:
        """Return all names with what is known of the model."""
        return ModelList(data=self._cards)
