"""Attention of rows to the rows of their own segment, in both directions and without a cache; for vision towers.

`reference.py` defines what is correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
from jax import Array

from pallas_kernels.implementations import SEGMENT_ATTENTION, choose, load

from .shape import SegmentShape

__all__ = ["SegmentAttention", "SegmentShape", "pick"]


@dataclass(frozen=True)
class SegmentAttention:
    """The op in one implementation."""

    implementation: str = "xla"
    interpret: bool = False
    """The kernels of another platform are interpreted, on a CPU."""

    def __post_init__(self) -> None:
        """Raise ValueError for an implementation that does not exist."""
        if self.implementation not in SEGMENT_ATTENTION:
            raise ValueError(f"segment attention: there is no implementation {self.implementation!r}")

    def __call__(
        self,
        q_pnh: Array,
        k_pnh: Array,
        v_pnh: Array,
        starts_p: Array,
        ends_p: Array,
        *,
        scale: float,
        longest: int | None = None,
    ) -> Array:
        """Return softmax(scale * q k) v over each row's segment, [p, n, h] in q's dtype; the softmax is in float32.

        Args:
          q_pnh, k_pnh, v_pnh: the heads of all rows, bfloat16 or float32.
          starts_p, ends_p: int32; a row attends to the rows from its start up to its end, and it is one of them. A row
            whose end is not after its start is padding: its result is 0, no row may attend to it, and its heads may
            hold anything, NaN too.
          scale: the factor on scores.
          longest: the most rows of a segment, if that is known to be less than p.

        Raises:
          ValueError: for arrays that do not fit each other.
        """
        p, n, h = q_pnh.shape
        if not q_pnh.shape == k_pnh.shape == v_pnh.shape or not starts_p.shape == ends_p.shape == (p,):
            shapes = ", ".join(str(x.shape) for x in (q_pnh, k_pnh, v_pnh, starts_p, ends_p))
            raise ValueError(f"segment attention: q, k, v, starts and ends are {shapes}, which do not fit each other")
        entry = SEGMENT_ATTENTION[self.implementation]
        if reason := entry.refusal(SegmentShape(n, h, jnp.dtype(q_pnh.dtype))):
            raise ValueError(f"segment attention: {self.implementation!r} cannot run this: {reason}")
        settings = {"interpret": self.interpret} if entry.platform in ("tpu", "gpu") else {}
        longest = p if longest is None else min(p, longest)
        return load(entry.function)(q_pnh, k_pnh, v_pnh, starts_p, ends_p, scale=scale, longest=longest, **settings)

    def prepare(self, shapes: Sequence[SegmentShape], folder: Path | None = None) -> None:
        """Compile and register what programs with these heads call, so that this process can load such programs.

        Machine code is kept in `folder`, if it is not None, for other processes.
        """
        prepare = SEGMENT_ATTENTION[self.implementation].prepare
        for shape in shapes:
            if prepare:
                load(prepare)(shape, folder)


def pick(
    shapes: Sequence[SegmentShape], platform: str, name: str | None = None, *, architecture: str | None = None
) -> tuple[SegmentAttention, str | None]:
    """Return the op for a platform ("cpu", "tpu" or "gpu"), and why it is not the platform's own kernel if it is not.

    `name` and `architecture` are those of `paged_attention.pick`. Raises ValueError as it does.
    """
    chosen = choose(SEGMENT_ATTENTION, shapes, platform, name, architecture, "segment attention")
    implementation = chosen.implementation
    if implementation == "xla" and platform == "gpu":
        implementation = "xla_counted"
    return SegmentAttention(implementation, chosen.interpret), chosen.reason
