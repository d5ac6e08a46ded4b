"""Convert gRPC messages to embedding requests, and the engine's outputs to messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import PoolingRequestOutput
from jaxllm.server.grpc.fields import read_fields
from jaxllm.server.grpc.inference_pb2 import Embedding, EmbedRequest, EmbedResponse, Usage
from jaxllm.server.pooling.embedding_protocol import EmbeddingRequest
from jaxllm.server.pooling.requests import usage_of


def embedding_request(data: bytes) -> EmbeddingRequest:
    """Return the unchecked request in an `EmbedRequest`. Raises VLLMValidationError for a malformed message, or one
    with both texts and token ids.
    """
    fields = read_fields(data, EmbedRequest)
    if "token_ids" in fields:  # over HTTP they are `input` too
        if "input" in fields:
            raise VLLMValidationError("give either input or token_ids.", parameter="input")
        fields["input"] = fields.pop("token_ids")
    return EmbeddingRequest(**fields)


def embedding_response(
    answer_id: str, model: str, outputs: Sequence[PoolingRequestOutput[Any]], *, tells_cached: bool
) -> EmbedResponse:
    """Return the message of an answer with `model`'s outputs; `tells_cached` shows the cached tokens."""
    usage = usage_of(outputs, tells_cached=tells_cached)
    details = usage.prompt_tokens_details
    return EmbedResponse(
        id=answer_id,
        model=model,
        created=int(time.time()),
        data=[_embedding(index, each.outputs.data) for index, each in enumerate(outputs)],
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            total_tokens=usage.total_tokens,
            cached_tokens=None if details is None else details.cached_tokens,
        ),
    )


def _embedding(index: int, array: Any) -> Embedding:
    """Return the message of an array [o], or [tokens, o]."""
    num_vectors = len(array) if array.ndim > 1 else None
    return Embedding(index=index, embedding=array.reshape(-1).tolist(), num_vectors=num_vectors)
