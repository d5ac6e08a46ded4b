"""Attention of encoders whose scores depend on contents and on distances (DeBERTa), within sequences, without a cache.

`reference.py` defines what is correct.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax import Array

from pallas_kernels.implementations import RELATIVE_ATTENTION, load

from .buckets import bucket_rows

__all__ = ["RelativeAttention", "bucket_rows"]


@dataclass(frozen=True)
class RelativeAttention:
    """The op in one implementation."""

    implementation: str = "xla"

    def __post_init__(self) -> None:
        """Raise ValueError for an implementation that does not exist."""
        if self.implementation not in RELATIVE_ATTENTION:
            raise ValueError(f"relative attention: there is no implementation {self.implementation!r}")

    def __call__(
        self,
        q_tnh: Array,
        k_tnh: Array,
        v_tnh: Array,
        q_rnh: Array,
        k_rnh: Array,
        starts_s: Array,
        ends_s: Array,
        *,
        scale: float,
        max_distance: int | None,
        longest: int,
    ) -> Array:
        """Return the softmax of scores times v over each sequence, [t, n, h] in q's dtype; it is taken in float32.

        The score of query i and key j is scale * (q_i k_j + q_i k_r + k_j q_r), where r is the row of i - j.

        Args:
          q_tnh, k_tnh, v_tnh: the heads of all tokens, bfloat16 or float32.
          q_rnh, k_rnh: the queries and keys of distances; `bucket_rows` has the row of each. Rows of distances that no
            sequence of the step has may hold anything, NaN too.
          starts_s, ends_s: int32; the rows of each sequence in t, and no rows for padding. The results of rows in no
            sequence are 0, and their heads may hold anything.
          scale: the factor on scores.
          max_distance: the second argument of `bucket_rows`.
          longest: the most tokens of a sequence.

        Raises:
          ValueError: for arrays that do not fit each other.
        """
        (t, n, h), r = q_tnh.shape, q_rnh.shape[0]
        shapes = [x.shape for x in (q_tnh, k_tnh, v_tnh, q_rnh, k_rnh)]
        if shapes != [(t, n, h)] * 3 + [(r, n, h)] * 2 or r % 2 or starts_s.shape != ends_s.shape:
            raise ValueError(f"relative attention: heads of tokens and of distances are {shapes}, which do not fit")
        function = load(RELATIVE_ATTENTION[self.implementation].function)
        arrays = q_tnh, k_tnh, v_tnh, q_rnh, k_rnh, starts_s, ends_s
        return function(*arrays, scale=scale, max_distance=max_distance, longest=min(longest, t))
