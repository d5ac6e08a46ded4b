"""Prompts of embeddings are read from files in base64, and known by their numbers in parts."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import safetensors.numpy

from jaxllm.core_messages import EMBEDS_PART
from jaxllm.media.embeds.prompt import read_prompt_embeds
from jaxllm.media.errors import MediaError

WIDTH = 6


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, WIDTH), np.float32)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_safetensors_with_headers_of_all_sizes(dtype: type) -> None:
    """A header of 128 bytes begins like a pickle."""
    array = rows(2).astype(dtype)
    for length in range(1, 300):
        file = safetensors.numpy.save({"a" * length: array}, {"made": "by hand"})
        media = read_prompt_embeds(base64.b64encode(file).decode(), WIDTH, 2)
        assert media.items[0].patches == array.astype(np.float32).tobytes()


def test_parts_are_known_by_their_numbers() -> None:
    long, other = rows(2 * EMBEDS_PART + 3), rows(2 * EMBEDS_PART + 3)
    other[EMBEDS_PART, 0] += 1
    one, two = (read_prompt_embeds(array, WIDTH, 10_000) for array in (long, other))
    spans = [(span.offset, span.num_rows, span.first_row) for item in one.items for span in item.spans]
    assert spans == [(0, 256, 0), (256, 256, 0), (512, 3, 0)]
    assert b"".join(item.patches for item in one.items) == long.tobytes()
    assert [a.key == b.key for a, b in zip(one.items, two.items, strict=True)] == [True, False, True]
    assert one.is_whole_prompt


def test_the_bound_of_rows() -> None:
    assert read_prompt_embeds(rows(5), WIDTH, 5).items[0].spans[0].num_rows == 5
    with pytest.raises(MediaError, match="6 rows, and there may be 5 at most"):
        read_prompt_embeds(rows(6), WIDTH, 5)
