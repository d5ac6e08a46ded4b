"""The types of embeddings: OpenAI's request and answer, with vLLM's fields."""

from __future__ import annotations

import time

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import LateChunkingMetadata
from jaxllm.pooling_params import LateChunkingParams, PoolingParams
from jaxllm.server.openai.usage import UsageInfo
from jaxllm.server.pooling.pooling_protocol import VectorFields


class EmbeddingRequest(VectorFields, kw_only=True):
    """The request of `/v1/embeddings`."""

    task: str | None = None
    """The name of a prompt of the model, which is put before each text, with its adapter if it has one; Jina's API
    calls it so."""
    late_chunking_params: LateChunkingParams | None = None
    """`{"chunk_size": 64}` makes an embedding of every 64 tokens of a text, which the model reads whole."""

    def params(self, task: str) -> PoolingParams:
        """Return the engine's params. Raises VLLMValidationError."""
        if self.late_chunking_params is None:
            return super().params(task)
        if self.task is not None:
            message = "late_chunking_params takes texts without a prompt: leave out task."
            raise VLLMValidationError(message, parameter="task", value=self.task)
        if self.encoding_format not in (None, "float"):
            message = "encoding_format must be 'float' with late_chunking_params: leave it out."
            raise VLLMValidationError(message, parameter="encoding_format", value=self.encoding_format)
        return PoolingParams(
            task="token_embed",
            dimensions=self.dimensions,
            use_activation=self.use_activation,
            late_chunking_params=self.late_chunking_params,
        )


class EmbeddingResponseData(msgspec.Struct, frozen=True, kw_only=True):
    """The embedding of one input."""

    index: int
    object: str = "embedding"
    embedding: list[list[float] | float] | str
    """One for each chunk with late_chunking_params."""
    late_chunking: LateChunkingMetadata | UnsetType = UNSET


class EmbeddingResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/embeddings`."""

    id: str
    object: str = "list"
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    model: str
    data: list[EmbeddingResponseData]
    usage: UsageInfo
