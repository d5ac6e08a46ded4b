"""Late chunking: the tokens' outputs of a whole text become one embedding for each run of tokens, as vLLM's do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import LateChunk, LateChunkingMetadata
from jaxllm.pooling_params import PoolingParams
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np

_LEAST_LENGTH = 1e-12


def find_chunks(
    text: str | None, token_ids: Sequence[int], chunk_size: int, tokenizer: Tokenizer | None
) -> LateChunkingMetadata:
    """Return which tokens, and which characters of the text, each chunk has.

    Raises VLLMValidationError for a prompt that is not the whole of one text.
    """
    offsets = _offsets(text, token_ids, tokenizer)
    chunks: list[LateChunk] = []
    for start in range(0, len(token_ids), chunk_size):
        end = min(start + chunk_size, len(token_ids))
        seen = [(first, last) for first, last in offsets[start:end] if first < last]
        span = (min(first for first, _ in seen), max(last for _, last in seen)) if seen else None
        chunks.append(LateChunk((start, end), span))
    return LateChunkingMetadata(chunk_size, len(token_ids), chunks)


def _offsets(text: str | None, token_ids: Sequence[int], tokenizer: Tokenizer | None) -> list[tuple[int, int]]:
    if text and tokenizer is not None:
        for special in (True, False):
            encoding = tokenizer.backend.encode(text, add_special_tokens=special)
            if encoding.ids == list(token_ids):
                return encoding.offsets
    message = "late_chunking_params needs one text that is not cut, lowercased or put into a template."
    raise VLLMValidationError(message, parameter="late_chunking_params")


def chunk_embeddings(rows_td: np.ndarray, chunks: LateChunkingMetadata, params: PoolingParams) -> np.ndarray:
    """Return the mean of each chunk's rows [tokens, d], cut to the params' dimensions and made of length 1 if asked."""
    import numpy as np  # a front end that does not pool does without

    means = [
        rows_td[start:end].mean(axis=0, dtype=np.float64) for start, end in (each.token_range for each in chunks.chunks)
    ]
    rows_cd = np.stack(means).astype(np.float32)[:, : params.dimensions]
    if not params.use_activation:
        return rows_cd
    return rows_cd / np.maximum(np.linalg.norm(rows_cd, axis=1, keepdims=True), np.float32(_LEAST_LENGTH))
