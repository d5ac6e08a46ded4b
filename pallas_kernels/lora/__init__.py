"""LoRA: add to each row of a matmul's result the product B A x with the row's own adapter.

The matrices of several adapters lie side by side, in slots. `reference.py` defines what is correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.implementations import LORA, load
from pallas_kernels.matmul_op import MatmulOp

from .rows import Rows, sort_rows
from .shape import LoraShape

__all__ = ["Lora", "LoraShape", "Rows", "pick", "sort_rows"]


@dataclass(frozen=True)
class Lora(MatmulOp):
    """The op in one implementation. Adapters that the implementation cannot take run in plain XLA."""

    implementations = LORA

    def __call__(
        self,
        x_ti: Array,
        down_lci: Array,
        up_lco: Array,
        layer: Array | int,
        rows: Rows,
        parts: Sequence[int],
        num_slots: int,
        *,
        plus_to: Array | None = None,
        out_dtype: DTypeLike | None = None,
    ) -> Array:
        """Return plus + B A x [t, o] for each row, with the A and B of its own slot; a row of slot 0 is unchanged.

        A x is added up in float32 and rounded to x's dtype; B times that is added up in float32. No row depends on the
        others.

        Args:
          x_ti: rows, bfloat16 or float32.
          down_lci: A of all layers, of x's dtype. The rows of a layer are ordered by slot, then by part of the outputs,
            with `rank` rows for each part.
          up_lco: B of all layers, transposed, in the same order. Entries outside a part's own outputs are zero, and may
            or may not be multiplied.
          layer: index of the layer, may be traced.
          rows: the slot of each row, as `sort_rows` makes it.
          parts: the number of outputs of each part, in order.
          num_slots: the number of slots.
          plus_to: the array that is added to; zeros if None.
          out_dtype: the result's dtype, that of `plus_to` or of x if None.

        Raises:
          ValueError: for arrays that do not fit each other.
        """
        out_dtype = jnp.dtype(out_dtype or (x_ti if plus_to is None else plus_to).dtype)
        num_columns, num_outputs = up_lco.shape[1:]
        if down_lci.shape != (up_lco.shape[0], num_columns, x_ti.shape[1]):
            raise ValueError(f"lora: x {x_ti.shape}, A {down_lci.shape} and B {up_lco.shape} do not fit each other")
        rank, rest = divmod(num_columns, num_slots * len(parts))
        if rest or sum(parts) != num_outputs:
            raise ValueError(f"lora: B {up_lco.shape} is not of {num_slots} slots and of parts {list(parts)}")
        shape = LoraShape(rank, x_ti.shape[1], tuple(parts), x_ti.dtype, out_dtype)
        name = "xla" if self.refusal(shape) or down_lci.dtype != x_ti.dtype else self.implementation
        run = load(LORA[name].function)
        return run(x_ti, down_lci, up_lco, layer, rows, parts, num_slots, plus_to=plus_to, out_dtype=out_dtype)


def pick(platform: str) -> Lora:
    """Return the op for a platform: "cpu", "tpu" or "gpu"."""
    return Lora(next((key for key, entry in LORA.items() if entry.platform == platform), "xla"))
