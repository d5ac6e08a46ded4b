"""Grouped matmul: rows sorted by expert, each group times its own expert's weights.

It is the matmul of layers with a mixture of experts. `reference.py` defines what is correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.implementations import GROUPED_MATMUL, choose, load
from pallas_kernels.matmul_op import MatmulOp
from pallas_kernels.weights.held import Quantized

from .groups import Grouping, Groups, capacity, group_rows
from .shape import ACTIVATIONS, MatmulShape
from .top_experts import top_experts, within_groups

__all__ = [
    "ACTIVATIONS",
    "GroupedMatmul",
    "Grouping",
    "Groups",
    "MatmulShape",
    "capacity",
    "group_rows",
    "pick",
    "top_experts",
    "within_groups",
]


@dataclass(frozen=True)
class GroupedMatmul(MatmulOp):
    """The op in one implementation; make it with `pick`."""

    implementations = GROUPED_MATMUL

    interpret: bool = False
    """Run a TPU's or GPU's kernels in their interpreter, on a CPU. Slow; for tests."""
    architecture: str | None = None
    """The device's, as `pick` takes it."""
    num_cores: int | None = None
    """The number of a GPU's multiprocessors, as `pick` takes it."""

    @property
    def row_alignment(self) -> int:
        """Return the number that each group's first row is a multiple of."""
        return self._entry.row_alignment

    def __call__(
        self,
        x_ri: Array,
        weight: Array | Quantized,
        layer: Array | int,
        groups: Groups,
        *,
        activation: str | None = None,
        out_dtype: DTypeLike | None = None,
    ) -> Array:
        """Multiply each group's rows by its expert's transposed weights of one layer, summed in float32.

        Args:
          x_ri: rows in groups; rows of no group may hold anything.
          weight: the weights of all layers and experts [l, e, out, in], of x's dtype or quantized. Quantized ones are
            multiplied as if they had been widened to x's dtype, or for few rows on a GPU in plain XLA to float32; those
            with one scale for each output scale the sums.
          layer: index of the layer, may be traced.
          groups: each expert's rows, as `group_rows` places them for this op's `row_alignment`.
          activation: one of `ACTIVATIONS`: the first half of the outputs are gates, and the result is their activation
            times the second half, [r, o / 2]. None returns all outputs.
          out_dtype: the result's dtype, x's if None.

        Returns:
          The product [r, o]; rows of no group may hold anything.

        Raises:
          ValueError: for arrays that do not fit each other, or that the implementation cannot multiply.
        """
        out_dtype = jnp.dtype(out_dtype or x_ri.dtype)
        _check(x_ri, weight, groups, activation)
        _, num_experts, num_outputs, num_inputs = weight.shape
        form = weight.format if isinstance(weight, Quantized) else None
        shape = MatmulShape(num_experts, num_outputs, num_inputs, x_ri.dtype, form, out_dtype, activation)
        if reason := self.refusal(shape):
            raise ValueError(f"grouped_matmul: {self.implementation!r} cannot run this: {reason}")
        return load(self._entry.function)(
            x_ri,
            weight,
            layer,
            groups,
            activation=activation,
            out_dtype=out_dtype,
            interpret=self.interpret,
            **({"num_cores": self.num_cores} if self._entry.takes_cores else {}),
        )


def _check(x_ri: Array, weight: Array | Quantized, groups: Groups, activation: str | None) -> None:
    if x_ri.ndim != 2 or len(weight.shape) != 4 or weight.shape[3] != x_ri.shape[1]:
        raise ValueError(
            f"grouped_matmul: x {x_ri.shape} and w {weight.shape} are not [rows, in] and [layers, experts, out, in]"
        )
    _, num_experts, num_outputs, _ = weight.shape
    if {x.shape for x in groups} != {(num_experts,)}:
        raise ValueError(f"grouped_matmul: groups {[x.shape for x in groups]} are not of w's {num_experts} experts")
    if not isinstance(weight, Quantized) and weight.dtype != x_ri.dtype:
        raise ValueError(f"grouped_matmul: w must be {x_ri.dtype}, as x is, or quantized, not {weight.dtype}")
    if activation is not None and (activation not in ACTIVATIONS or num_outputs % 2):
        raise ValueError(
            f"grouped_matmul: activation must be one of {', '.join(ACTIVATIONS)}, with an even number of outputs, "
            f"not {activation!r} with {num_outputs}"
        )


def pick(
    shapes: Sequence[MatmulShape],
    platform: str,
    name: str | None = None,
    *,
    architecture: str | None = None,
    num_cores: int | None = None,
) -> tuple[GroupedMatmul, str | None]:
    """Return the op for a platform ("cpu", "tpu" or "gpu"), and why it is not the platform's own kernel if it is not.

    One op runs all of a layer's matmuls, of these shapes, since they share their groups. `name` is a key of
    `GROUPED_MATMUL`; a CPU runs the kernels of other platforms in their interpreters. `architecture` and
    `num_cores` are as `paged_attention.pick` takes them. Raises ValueError for a name that does not exist, or that
    cannot run these shapes.
    """
    choice = choose(GROUPED_MATMUL, shapes, platform, name, architecture, "grouped matmul")
    return GroupedMatmul(choice.implementation, choice.interpret, architecture, num_cores), choice.reason
