"""Token counts say how often each token is in the output, and whether it is in the prompt: one uint16 per id.

The low 15 bits count the output, the top bit says "in the prompt". Row 0 of the device's counts stays zero: rows that
count nothing read it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

UNCOUNTED_ROW = 0
MAX_COUNT = 0x7FFF
IN_PROMPT = 0x8000


def count_tokens(token_ids: Sequence[int] | np.ndarray, num_prompt_tokens: int, vocab_size: int) -> np.ndarray:
    """Return uint16[v], the counts of a request from all of its tokens."""
    ids = np.asarray(token_ids, np.int64)
    row_v = np.minimum(np.bincount(ids[num_prompt_tokens:], minlength=vocab_size), MAX_COUNT).astype(np.uint16)
    row_v[ids[:num_prompt_tokens]] |= np.uint16(IN_PROMPT)
    return row_v


def set_row(counts_cv: Array, row: Array, row_v: Array) -> Array:
    """Replace one request's counts."""
    return counts_cv.at[row].set(row_v)


def add_tokens(counts_cv: Array, rows_s: Array, tokens_s: Array) -> Array:
    """Count one more output token in each of `rows_s`, which differ but for UNCOUNTED_ROW; counts stop at MAX_COUNT."""
    counts_s = counts_cv[rows_s, tokens_s]
    grows_s = (rows_s != UNCOUNTED_ROW) & (output_counts(counts_s) < MAX_COUNT)
    return counts_cv.at[rows_s, tokens_s].set(counts_s + grows_s.astype(jnp.uint16))


def output_counts(counts: Array) -> Array:
    """Return how often each token is in the output, int32."""
    return (counts & MAX_COUNT).astype(jnp.int32)


def in_prompt(counts: Array) -> Array:
    """Say which tokens the prompt holds."""
    return counts >= IN_PROMPT
