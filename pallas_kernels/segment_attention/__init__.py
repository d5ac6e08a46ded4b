"""Attention of rows to the rows of their own segment, in both directions and without a cache; for vision towers.

`reference.py` defines what is correct.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax import Array

from pallas_kernels.implementations import SEGMENT_ATTENTION, load

__all__ = ["SegmentAttention"]


@dataclass(frozen=True)
class SegmentAttention:
    """The op in one implementation."""

    implementation: str = "xla"

    def __post_init__(self) -> None:
        """Raise ValueError for an implementation that does not exist."""
        if self.implementation not in SEGMENT_ATTENTION:
            raise ValueError(f"segment attention: there is no implementation {self.implementation!r}")

    def __call__(
        self, q_pnh: Array, k_pnh: Array, v_pnh: Array, starts_p: Array, ends_p: Array, *, scale: float
    ) -> Array:
        """Return softmax(scale * q k) v over each row's segment, [p, n, h] in q's dtype; the softmax is in float32.

        Args:
          q_pnh, k_pnh, v_pnh: the heads of all rows, bfloat16 or float32.
          starts_p, ends_p: int32; a row attends to the rows from its start up to its end. A row whose end is not after
            its start is padding: its result is 0, no row may attend to it, and its heads may hold anything, NaN too.
          scale: the factor on scores.

        Raises:
          ValueError: for arrays that do not fit each other.
        """
        p = q_pnh.shape[0]
        if not q_pnh.shape == k_pnh.shape == v_pnh.shape or not starts_p.shape == ends_p.shape == (p,):
            shapes = ", ".join(str(x.shape) for x in (q_pnh, k_pnh, v_pnh, starts_p, ends_p))
            raise ValueError(f"segment attention: q, k, v, starts and ends are {shapes}, which do not fit each other")
        function = load(SEGMENT_ATTENTION[self.implementation].function)
        return function(q_pnh, k_pnh, v_pnh, starts_p, ends_p, scale=scale)
