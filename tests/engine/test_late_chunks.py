"""Chunks of a text's tokens: which characters they have, and their embeddings."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxllm.engine.front.late_chunks import chunk_embeddings, find_chunks
from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import LateChunk
from jaxllm.pooling_params import PoolingParams
from tests.engine.support import byte_level


@pytest.mark.parametrize("bos", [False, True])
def test_chunks_have_the_characters_of_their_tokens(bos: bool) -> None:
    tokenizer = byte_level(bos)
    text = "so wahr \u00e9 \U0001f642 x"
    ids = tokenizer.backend.encode(text).ids
    metadata = find_chunks(text, ids, 2, tokenizer)
    assert (metadata.chunk_size, metadata.input_tokens, metadata.strategy) == (2, len(ids), "fixed_tokens")
    assert [each.token_range for each in metadata.chunks] == [(i, min(i + 2, len(ids))) for i in range(0, len(ids), 2)]
    places = [each.char_range for each in metadata.chunks if each.char_range is not None]
    assert places[0][0] == 0
    assert places[-1][1] == len(text)
    for (_, end), (start, _) in itertools.pairwise(places):
        assert start in (end, end - 1)  # the bytes of one character may be of two tokens
    one = find_chunks(text, ids, 1, tokenizer).chunks[0]
    assert (one.char_range is None) == bos


def test_what_is_not_the_whole_of_a_text_is_refused() -> None:
    tokenizer = byte_level()
    ids = tokenizer.backend.encode("hello you").ids
    for text, tokens, known in ((None, ids, tokenizer), ("hello you", ids[:-1], tokenizer), ("hello you", ids, None)):
        with pytest.raises(VLLMValidationError, match="late_chunking_params"):
            find_chunks(text, tokens, 2, known)


def test_embeddings_are_means_of_rows() -> None:
    rows_td = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    chunks = find_chunks("aaaaa", byte_level().backend.encode("aaaaa").ids, 2, byte_level())
    chunks.chunks[:] = [LateChunk((0, 2), None), LateChunk((2, 4), None), LateChunk((4, 5), None)]
    means = np.stack([rows_td[:2].mean(0), rows_td[2:4].mean(0), rows_td[4]])
    plain = chunk_embeddings(rows_td, chunks, PoolingParams(use_activation=False))
    assert plain.dtype == np.float32
    np.testing.assert_allclose(plain, means, rtol=1e-6)
    short = chunk_embeddings(rows_td, chunks, PoolingParams(use_activation=True, dimensions=4))
    np.testing.assert_allclose(short, means[:, :4] / np.linalg.norm(means[:, :4], axis=1)[:, None], rtol=1e-6)
