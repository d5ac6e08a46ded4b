"""Grouped matmul: rows sorted by expert, each group times its own expert's weights.

It is the matmul of layers with a mixture of experts. `reference.py` defines what is correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .groups import Grouping, Groups, capacity, group_rows
from .implementations import IMPLEMENTATIONS, Implementation
from .shape import ACTIVATIONS, MatmulShape

__all__ = [
    "ACTIVATIONS",
    "IMPLEMENTATIONS",
    "GroupedMatmul",
    "Grouping",
    "Groups",
    "MatmulShape",
    "capacity",
    "group_rows",
    "pick",
]


@dataclass(frozen=True)
class GroupedMatmul:
    """The op in one implementation; make it with `pick`."""

    implementation: str = "xla"
    interpret: bool = False
    """Run a TPU's or GPU's kernels in their interpreter, on a CPU. Slow; for tests."""
    architecture: str | None = None
    """The device's, as `pick` takes it."""

    @property
    def _entry(self) -> Implementation:
        return IMPLEMENTATIONS[self.implementation]

    @property
    def row_alignment(self) -> int:
        """Return the number of which each group's first row is a multiple."""
        return self._entry.row_alignment()

    def prepare(self, shapes: Sequence[MatmulShape], folder: Path | None = None) -> None:
        """Compile and register what programs with these matmuls call, so that this process can load such programs.

        Machine code is kept in `folder`, if given, for other processes.
        """
        for shape in shapes:
            self._entry.prepare(shape, folder)

    def __call__(
        self,
        x_ri: Array,
        w_leoi: Array,
        layer: Array | int,
        groups: Groups,
        *,
        scales_leo: Array | None = None,
        activation: str | None = None,
        out_dtype: DTypeLike | None = None,
    ) -> Array:
        """Multiply each group's rows by its expert's weights of one layer, transposed, added up in float32.

        Args:
          x_ri: rows in groups; rows of no group may hold anything.
          w_leoi: the weights of all layers and experts [out, in], of x's dtype or int8.
          layer: index of the layer, may be traced.
          groups: each expert's rows, as `group_rows` places them for this op's `row_alignment`.
          scales_leo: float32, the scale of each output of int8 weights; None for other weights.
          activation: one of `ACTIVATIONS`: the first half of the outputs are gates, and the result is their activation
            times the second half, [r, o / 2]. None returns all outputs.
          out_dtype: the result's dtype, x's if None.

        Returns:
          The product [r, o]; rows of no group may hold anything.

        Raises:
          ValueError: for arrays that do not fit each other, or that the implementation cannot multiply.
        """
        out_dtype = jnp.dtype(out_dtype or x_ri.dtype)
        _check(x_ri, w_leoi, groups, scales_leo, activation)
        _, num_experts, num_outputs, num_inputs = w_leoi.shape
        shape = MatmulShape(num_experts, num_outputs, num_inputs, x_ri.dtype, w_leoi.dtype, out_dtype, activation)
        if reason := self._entry.refusal(shape):
            raise ValueError(f"grouped_matmul: {self.implementation!r} cannot run this: {reason}")
        return self._entry.load(self.architecture)(
            x_ri,
            w_leoi,
            layer,
            groups,
            scales_leo=scales_leo,
            activation=activation,
            out_dtype=out_dtype,
            interpret=self.interpret,
        )


def _check(x_ri: Array, w_leoi: Array, groups: Groups, scales_leo: Array | None, activation: str | None) -> None:
    if x_ri.ndim != 2 or w_leoi.ndim != 4 or w_leoi.shape[3] != x_ri.shape[1]:
        raise ValueError(
            f"grouped_matmul: x {x_ri.shape} and w {w_leoi.shape} are not [rows, in] and [layers, experts, out, in]"
        )
    num_layers, num_experts, num_outputs, _ = w_leoi.shape
    if {x.shape for x in groups} != {(num_experts,)}:
        raise ValueError(f"grouped_matmul: groups {[x.shape for x in groups]} are not of w's {num_experts} experts")
    if w_leoi.dtype not in (x_ri.dtype, jnp.int8):
        raise ValueError(f"grouped_matmul: w must be {x_ri.dtype}, as x is, or int8, not {w_leoi.dtype}")
    if (w_leoi.dtype == jnp.int8) != (scales_leo is not None):
        raise ValueError("grouped_matmul: int8 weights have scales_leo, and others have none")
    if scales_leo is not None and scales_leo.shape != (num_layers, num_experts, num_outputs):
        raise ValueError(
            f"grouped_matmul: scales {scales_leo.shape} are not [layers, experts, out] of w {w_leoi.shape}"
        )
    if activation is not None and (activation not in ACTIVATIONS or num_outputs % 2):
        raise ValueError(
            f"grouped_matmul: activation must be one of {', '.join(ACTIVATIONS)}, with an even number of outputs, "
            f"not {activation!r} with {num_outputs}"
        )


def pick(
    shapes: Sequence[MatmulShape], platform: str, name: str | None = None, *, architecture: str | None = None
) -> tuple[GroupedMatmul, str | None]:
    """Return the op for a platform ("cpu", "tpu" or "gpu"), and why it is not the platform's own kernel if it is not.

    One op runs all of a layer's matmuls, of these shapes, since they share their groups. `name` is one of
    `IMPLEMENTATIONS`; a CPU runs the kernels of other platforms in their interpreters. `architecture` is as
    `paged_attention.pick` takes it. Raises ValueError for a name that does not exist, or that cannot run these shapes.
    """
    if name not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"grouped matmul: there is no implementation {name!r}, only {', '.join(IMPLEMENTATIONS)}")
    own = next((each for each, entry in IMPLEMENTATIONS.items() if entry.platform == platform), "xla")
    entry = IMPLEMENTATIONS[name or own]
    is_elsewhere = entry.platform not in (None, platform)
    reason = None if is_elsewhere else entry.device_refusal(architecture)
    reason = reason or next(filter(None, map(entry.refusal, shapes)), None)
    if name is None:
        return GroupedMatmul(own if reason is None else "xla", architecture=architecture), reason
    if is_elsewhere and platform != "cpu":
        raise ValueError(f"grouped matmul: {name!r} does not run on a {platform}")
    if reason is not None:
        raise ValueError(f"grouped matmul: {name!r} cannot run this model here: {reason}")
    return GroupedMatmul(name, interpret=is_elsewhere, architecture=architecture), None
