"""Serve embeddings, in OpenAI's form and in Cohere's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import UNSET

from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import PoolingRequestOutput
from jaxllm.server.http.caller import Caller
from jaxllm.server.openai.prompt_fields import renamed
from jaxllm.server.pooling.cohere_protocol import (
    CohereBilledUnits,
    CohereEmbeddings,
    CohereEmbedRequest,
    CohereEmbedResponse,
    CohereMeta,
)
from jaxllm.server.pooling.embedding_protocol import EmbeddingRequest, EmbeddingResponse, EmbeddingResponseData
from jaxllm.server.pooling.requests import PooledRequests, usage_of
from jaxllm.server.pooling.vectors import VectorBytes, encoder, in_base64, numbers
from jaxllm.utils.async_utils import threaded_if_long


class ServingEmbedding:
    """Answers embedding requests."""

    def __init__(self, pooled: PooledRequests, *, tells_cached: bool, task: str = "embed") -> None:
        """Make one embedding for each input, or one per token in the task "token_embed"."""
        self._pooled, self._tells_cached, self._task = pooled, tells_cached, task

    async def answer(self, request: EmbeddingRequest, caller: Caller) -> EmbeddingResponse | VectorBytes:
        """Answer a request in OpenAI's form. Raises exceptions that `error_response` handles."""
        encode = encoder(request)
        outputs = await self.outputs(request, caller)
        vectors = [each.outputs.data for each in outputs]
        answer_id, model = caller.shown_id("embd", request.request_id), self._pooled.models.shown(request.model)
        usage, size = usage_of(outputs, tells_cached=self._tells_cached), sum(each.size for each in vectors)
        if request.is_in_bytes:
            return await threaded_if_long(size, VectorBytes.of, request, vectors, answer_id, model, usage)
        chunks = [UNSET if each.late_chunking is None else each.late_chunking for each in outputs]
        data = await threaded_if_long(
            size,
            lambda: [
                EmbeddingResponseData(index=i, embedding=encode(each), late_chunking=chunks[i])
                for i, each in enumerate(vectors)
            ],
        )
        return EmbeddingResponse(id=answer_id, model=model, data=data, usage=usage)

    async def outputs(self, request: EmbeddingRequest, caller: Caller) -> list[PoolingRequestOutput[Any]]:
        """Return the outputs of a request's inputs in order. Raises exceptions that `error_response` handles."""
        self._pooled.models.check(request.model)
        params = request.params(self._task)
        if request.task is not None and params.task != "embed":
            message = f"task goes with embeddings of texts, and this model makes {params.task}: leave it out."
            raise VLLMValidationError(message, parameter="task", value=request.task)
        with renamed({"prompt_name": "task"}):
            return await self._pooled.run_inputs(request, params, caller, prompt_name=request.task)

    async def answer_cohere(self, request: CohereEmbedRequest, caller: Caller) -> CohereEmbedResponse:
        """Answer a request in Cohere's form. Raises exceptions that `error_response` handles."""
        self._pooled.models.check(request.model)
        request.check()
        before = request.prompt(self._pooled.settings.prompts)
        with request.fields_named("texts"):
            params = request.params()
        prompts = [{"prompt": text} for text in request.texts]
        outputs = await self._pooled.run(request, prompts, params, caller, ["texts"] * len(prompts), before)
        for output in outputs:
            request.check_length(len(output.prompt_token_ids))
        usage = usage_of(outputs, tells_cached=False)
        kinds = set(request.embedding_types or ["float"])
        return CohereEmbedResponse(
            id=caller.shown_id("embd", request.request_id),
            embeddings=await threaded_if_long(outputs[0].outputs.data.size * len(outputs), _by_type, outputs, kinds),
            texts=request.texts,
            meta=CohereMeta(billed_units=CohereBilledUnits(usage.prompt_tokens)),
        )


def _by_type(outputs: Sequence[PoolingRequestOutput[Any]], kinds: set[str]) -> CohereEmbeddings:
    vectors = [each.outputs.data for each in outputs]
    unsigned = _bits(vectors) if kinds & {"binary", "ubinary"} else None
    return CohereEmbeddings(
        floats=list(map(numbers, vectors)) if "float" in kinds else UNSET,
        base64=list(map(in_base64, vectors)) if "base64" in kinds else UNSET,
        binary=(unsigned.astype(np.int16) - 128).tolist() if unsigned is not None and "binary" in kinds else UNSET,
        ubinary=unsigned.tolist() if unsigned is not None and "ubinary" in kinds else UNSET,
    )


def _bits(vectors: list[np.ndarray]) -> np.ndarray:
    """Return the signs of the vectors' numbers, 8 to a byte, most significant bit first. Raises VLLMValidationError."""
    if vectors[0].size % 8:
        message = "Embedding dimension must be a multiple of 8 for binary embedding types, "
        raise VLLMValidationError(f"{message}but got {vectors[0].size}.", parameter="embedding_types")
    return np.packbits(np.stack(vectors) >= 0, axis=-1)
