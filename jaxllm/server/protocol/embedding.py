"""Embeddings: OpenAI's request and answer, with vLLM's fields."""

from __future__ import annotations

import time

import msgspec

from jaxllm.server.protocol.pooling import VectorFields
from jaxllm.server.protocol.usage import UsageInfo


class EmbeddingRequest(VectorFields, kw_only=True):
    """What `/v1/embeddings` takes."""


class EmbeddingResponseData(msgspec.Struct, frozen=True, kw_only=True):
    """The embedding of one input."""

    index: int
    object: str = "embedding"
    embedding: list[float] | str


class EmbeddingResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/embeddings`."""

    id: str
    object: str = "list"
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    model: str
    data: list[EmbeddingResponseData]
    usage: UsageInfo
