"""Ragged segments for segment attention, with poisoned padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.segment_attention import SegmentAttention, SegmentShape
from pallas_kernels.segment_attention.reference import reference_segment_attention

from .trial import Call, Outcome, Trial, allowed_error, describe, largest_error

_STEPS = {"ragged": (320, [1, 220, 2, 30]), "whole": (640, [128, 512])}
"""The number of rows and the lengths of segments."""


def make_segments(
    p: int, lengths: Sequence[int], dtype: Any, n: int = 3, h: int = 8, seed: int = 0
) -> tuple[list[jax.Array], np.ndarray, np.ndarray]:
    """Return q, k and v, with NaN in padding, and starts and ends.

    The rows that no segment takes are padding, half of them before the last segment.
    """
    rng = np.random.default_rng(seed)
    starts, ends = np.zeros(p, np.int32), np.zeros(p, np.int32)
    gap, start = (p - sum(lengths)) // 2, 0
    for number, length in enumerate(lengths):
        start += gap if number == len(lengths) - 1 else 0
        starts[start : start + length], ends[start : start + length] = start, start + length
        start += length
    heads = [rng.standard_normal((p, n, h)) for _ in range(3)]
    return [jnp.asarray(np.where((starts < ends)[:, None, None], x, np.nan), dtype) for x in heads], starts, ends


def segment_trials(op: SegmentAttention, shape: SegmentShape) -> Iterator[Trial]:
    """Yield the trials of an op for a tower's heads."""
    for name, (p, lengths) in _STEPS.items():
        make = partial(_make_call, op, shape, p, lengths)
        yield Trial("segment_attention", op.implementation, describe(shape), name, make)


def _make_call(op: SegmentAttention, shape: SegmentShape, p: int, lengths: Sequence[int]) -> Call:
    heads, starts, ends = make_segments(p, lengths, shape.dtype, shape.num_heads, shape.head_dim)
    scale = shape.head_dim**-0.5

    def compare(result: Any) -> Outcome:
        q, k, v = (np.asarray(x, np.float32) for x in heads)
        exact, is_live = reference_segment_attention(q, k, v, starts, ends, scale=scale), starts < ends
        out = np.asarray(result, np.float32)
        missed = () if not out[~is_live].any() else ("padding is not 0",)
        return Outcome(largest_error(out[is_live], exact[is_live]), allowed_error(shape.dtype), missed)

    return Call(partial(op, scale=scale), (*heads, jnp.asarray(starts), jnp.asarray(ends)), compare)
