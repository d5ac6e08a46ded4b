"""The types of scoring and reranking, in the forms of vLLM, Jina and Cohere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_int
from jaxllm.server.openai.usage import UsageInfo
from jaxllm.server.pooling.pooling_protocol import MAX_INPUTS, POOLED_REFUSED, PooledFields

SCORE_REFUSED: Mapping[str, str] = {
    **POOLED_REFUSED,
    **dict.fromkeys(("images", "mm_processor_kwargs", "media_io_kwargs"), "only texts are scored; leave it out"),
}
RERANK_REFUSED: Mapping[str, str] = {
    **SCORE_REFUSED,
    "rank_fields": "documents have one field, text",
    "max_chunks_per_doc": "documents are not cut in pieces: use max_tokens_per_doc",
}
"""Fields that are refused: they would change the answer and are not supported."""

type Text = str | dict[str, Any]
"""A text, or an object that has it under "text"."""
_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class ScoringFields(PooledFields, kw_only=True):
    """The fields of scoring requests besides their texts."""

    max_tokens_per_query: int = 0
    max_tokens_per_doc: int = 0
    """The maximum number of tokens of a text, which is cut; 0 cuts none."""
    instruction: str | None = None
    """The template's variable of this name."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the server's template for a query and a document."""

    def variables(self) -> dict[str, Any]:
        """Return the template's variables."""
        variables = {"instruction": self.instruction} if self.instruction else {}
        return {**variables, **(self.chat_template_kwargs or {})}


class ScoreRequest(ScoringFields, kw_only=True):
    """The request of `/score`: one text and one, one and many, or many and as many, in any of these pairs of fields."""

    text_1: Text | list[Text] | None = None
    text_2: Text | list[Text] | None = None
    queries: Text | list[Text] | None = None
    documents: Text | list[Text] | None = None
    items: Text | list[Text] | None = None
    data_1: Text | list[Text] | None = None
    data_2: Text | list[Text] | None = None

    def sides(self) -> tuple[str, str]:
        """Return the names of the two fields with the texts. Raises VLLMValidationError for any other two."""
        names = {name for pair in _SIDES for name in pair}
        present = {name for name in names if getattr(self, name) is not None}
        for pair in _SIDES:
            if present == set(pair):
                check_number(pair[1], getattr(self, pair[1]))
                return pair
        wrong = next((name for name in ("queries", "text_1", "data_1", *sorted(names)) if name in present), "text_1")
        shown = ", ".join(f"{one} and {two}" for one, two in _SIDES)
        raise VLLMValidationError(f"give two fields that belong together: {shown}.", parameter=wrong)


class ScoreResponseData(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one pair."""

    index: int
    object: str = "score"
    score: float


class ScoreResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/score`."""

    id: str
    object: str = "list"
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    model: str
    data: list[ScoreResponseData]
    usage: UsageInfo


class RerankRequest(ScoringFields, kw_only=True):
    """The request of `/rerank`."""

    query: Text
    documents: Text | list[Text]
    top_n: int | None = None
    """The number of best documents to return; 0 for all."""
    return_documents: bool | None = True
    """Whether the answer includes the documents' texts."""

    def check(self) -> None:
        """Check the fields before any work is done. Raises VLLMValidationError."""
        check_number("documents", self.documents)
        if self.top_n is not None:
            check_int("top_n", self.top_n, 0, INT32_MAX)


class RerankDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A document."""

    text: str


class RerankResult(msgspec.Struct, frozen=True, kw_only=True):
    """A document with its score."""

    index: int
    """The document's index in the request."""
    document: RerankDocument | UnsetType = UNSET
    relevance_score: float


class RerankResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/rerank`."""

    id: str
    model: str
    usage: UsageInfo
    results: list[RerankResult]
    """The best first."""


def check_number(name: str, value: Any) -> None:
    """Raise VLLMValidationError for more texts than a request may have."""
    if isinstance(value, list) and len(value) > MAX_INPUTS:
        message = f"{name} must be a list of at most {MAX_INPUTS}, got {len(value)}."
        raise VLLMValidationError(message, parameter=name, value=len(value))
