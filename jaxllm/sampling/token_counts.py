"""Count how often each token is in a request's output, and mark the prompt's tokens: one uint16 per id.

The low 15 bits count the output, the top bit means "in the prompt". Row 0 of the device's counts stays zero, for rows
that count nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

UNCOUNTED_ROW = 0
MAX_COUNT = 0x7FFF
_IN_PROMPT = 0x8000


def count_tokens(token_ids: Sequence[int] | np.ndarray, num_prompt_tokens: int, vocab_size: int) -> np.ndarray:
    """Return uint16[v], the counts of a request from all of its tokens; negative ids in its prompt are none."""
    ids = np.asarray(token_ids, np.int64)
    row_v = np.minimum(np.bincount(ids[num_prompt_tokens:], minlength=vocab_size), MAX_COUNT).astype(np.uint16)
    prompt_ids = ids[:num_prompt_tokens]
    row_v[prompt_ids[prompt_ids >= 0]] |= np.uint16(_IN_PROMPT)
    return row_v


def set_row(counts_cv: Array, row: Array, row_v: Array) -> Array:
    """Replace one request's counts."""
    return counts_cv.at[row].set(row_v)


def add_tokens(counts_cv: Array, rows_s: Array, tokens_s: Array, drafts_sd: Array, draft_rows_sd: Array) -> Array:
    """Count one more output token in each of `rows_s`, except after drafts that were not sampled.

    Counts stop at MAX_COUNT. Rows with equally many drafts before them differ, except UNCOUNTED_ROW.
    """
    is_draft_sd = drafts_sd >= 0
    is_sampled_s = jnp.all(~is_draft_sd | (tokens_s[draft_rows_sd] == drafts_sd), axis=1)
    num_drafts_s = is_draft_sd.sum(axis=1)
    for num_drafts in range(drafts_sd.shape[1] + 1):
        counted_s = jnp.where(is_sampled_s & (num_drafts_s == num_drafts), rows_s, UNCOUNTED_ROW)
        counts_s = counts_cv[counted_s, tokens_s]
        grows_s = (counted_s != UNCOUNTED_ROW) & (output_counts(counts_s) < MAX_COUNT)
        counts_cv = counts_cv.at[counted_s, tokens_s].set(counts_s + grows_s.astype(jnp.uint16))
    return counts_cv


def with_drafts(counts_sv: Array, drafts_sd: Array) -> Array:
    """Return how often each token is in the output of each row, int32, with the row's drafts."""
    times_sv = output_counts(counts_sv)
    if not drafts_sd.shape[1]:
        return times_sv
    ids_sd = jnp.where(drafts_sd >= 0, drafts_sd, times_sv.shape[1])  # ids beyond the vocabulary add nothing
    rows_s1 = jnp.arange(drafts_sd.shape[0])[:, None]
    return jnp.minimum(times_sv.at[rows_s1, ids_sd].add(1, mode="drop"), MAX_COUNT)


def output_counts(counts: Array) -> Array:
    """Return how often each token is in the output, int32."""
    return (counts & MAX_COUNT).astype(jnp.int32)


def in_prompt(counts: Array) -> Array:
    """Return which tokens are in the prompt."""
    return counts >= _IN_PROMPT
