"""The types of Cohere's embeddings: https://docs.cohere.com/reference/embed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown
from jaxllm.pooling_params import PoolingParams
from jaxllm.server.openai.prompt_fields import renamed
from jaxllm.server.pooling.pooling_protocol import MAX_INPUTS, PooledFields

_TEXT_ONLY = "this route takes texts alone: use /v1/embeddings with messages"
COHERE_REFUSED: Mapping[str, str] = dict.fromkeys(
    ("images", "inputs", "mm_processor_kwargs", "media_io_kwargs"), _TEXT_ONLY
)
"""Fields that are refused: they would change the answer and are not supported."""
_PROMPT_NAMES: Mapping[str, tuple[str, ...]] = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""Cohere's input types, with the names that models may give their prompts."""

type EmbeddingType = Literal["float", "base64", "binary", "ubinary"]


class CohereEmbedRequest(PooledFields, kw_only=True):
    """The request of `/v2/embed`."""

    texts: list[str]
    input_type: str | None = None
    """The purpose of the texts, which selects the model's prompt to put before each."""
    output_dimension: int | None = None
    embedding_types: list[EmbeddingType] | None = None
    """By default "float". The answer has a list for each type."""
    truncate: Literal["NONE", "START", "END"] = "END"
    """The side on which too long texts are cut; NONE refuses them."""
    max_tokens: int | None = None
    """The maximum number of tokens of a text; by default the model's."""

    def check(self) -> None:
        """Check the fields before any work is done. Raises VLLMValidationError."""
        if not self.texts:
            raise VLLMValidationError("texts must not be an empty list.", parameter="texts")
        if len(self.texts) > MAX_INPUTS:
            message = f"texts must be a list of at most {MAX_INPUTS}, got {len(self.texts)}."
            raise VLLMValidationError(message, parameter="texts", value=len(self.texts))
        for name in ("truncate_prompt_tokens", "truncation_side"):
            if getattr(self, name) is not None:
                raise VLLMValidationError(f"{name} is not of this route: use truncate and max_tokens.", parameter=name)

    def fields_named(self, prompt: str) -> AbstractContextManager[None]:
        """Make errors raised inside name the request's own fields; `prompt` is the prompt's field."""
        names = {"dimensions": "output_dimension", "truncate_prompt_tokens": "max_tokens"}
        return renamed({"prompt": prompt, "prompt_token_ids": prompt, **names})

    def params(self) -> PoolingParams:
        """Return the engine's params. Raises VLLMValidationError."""
        return PoolingParams(task="embed", dimensions=self.output_dimension, use_activation=self.use_activation)

    def prompt(self, prompts: Mapping[str, str]) -> str | None:
        """Return the one of a model's `prompts` to put before each text; None for the default. Raises
        VLLMValidationError for an unknown type. All models accept Cohere's types, since its client requires one.
        """
        if self.input_type is None:
            return None
        names = _PROMPT_NAMES.get(self.input_type, (self.input_type,))
        prompt = next((prompts[name] for name in names if name in prompts), None)
        if prompt is None and self.input_type not in _PROMPT_NAMES:
            known = ", ".join(sorted({*_PROMPT_NAMES, *prompts}))
            message = f"Unsupported input_type {shown(self.input_type)}. Supported values: {known}."
            raise VLLMValidationError(message, parameter="input_type", value=self.input_type)
        return prompt or ""

    def tokenization_kwargs(self) -> dict[str, Any] | None:
        """Return the options for cutting texts."""
        options = super().tokenization_kwargs() or {}
        if self.truncate == "NONE":
            return options or None
        cut: dict[str, Any] = {"truncate_prompt_tokens": -1 if self.max_tokens is None else self.max_tokens}
        return options | cut | {"truncation_side": "left" if self.truncate == "START" else "right"}

    def check_length(self, num_tokens: int) -> None:
        """Refuse a text that is too long, if texts are not cut. Raises VLLMValidationError."""
        if self.truncate == "NONE" and self.max_tokens is not None and num_tokens > self.max_tokens:
            message = f"Input of {num_tokens} tokens exceeds max_tokens={self.max_tokens} with truncate=NONE. "
            message += "Set truncate to END or START to allow truncation."
            raise VLLMValidationError(message, parameter="max_tokens", value=self.max_tokens)


class CohereEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The embeddings of all texts, for each type requested."""

    floats: list[list[float]] | UnsetType = msgspec.field(name="float", default=UNSET)
    base64: list[str] | UnsetType = UNSET
    """Little-endian float32 numbers in base64."""
    binary: list[list[int]] | UnsetType = UNSET
    """A bit for each number, set where that is not negative; 8 bits make a byte, minus 128."""
    ubinary: list[list[int]] | UnsetType = UNSET


class CohereApiVersion(msgspec.Struct, frozen=True):
    """The version of Cohere's API."""

    version: str = "2"


class CohereBilledUnits(msgspec.Struct, frozen=True):
    """The billed units."""

    input_tokens: int


class CohereMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of an answer."""

    api_version: CohereApiVersion = CohereApiVersion()
    billed_units: CohereBilledUnits


class CohereEmbedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v2/embed`."""

    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: CohereMeta
    response_type: str = "embeddings_by_type"
