"""Rows times the transpose of a layer's weights, which stay in the checkpoint's dtype or quantized.

It is the matmul of all dense layers and of the output head. `reference.py` defines what is correct.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.implementations import LINEAR, default_for, load
from pallas_kernels.matmul_op import MatmulOp
from pallas_kernels.weights import WeightFormat
from pallas_kernels.weights.held import Quantized

from .cpu.rounding import rounding_refusal
from .fp8 import fp8_device_refusal
from .shape import ACTIVATIONS, LinearShape, linear_name

__all__ = ["ACTIVATIONS", "Linear", "LinearShape", "fp8_device_refusal", "linear_name", "pick", "rounding_refusal"]


@dataclass(frozen=True)
class Linear(MatmulOp):
    """The op in one implementation. A matmul that the implementation cannot run is run in plain XLA."""

    implementations = LINEAR

    interpret: bool = False
    """Run a TPU's or GPU's kernels in their interpreter, on a CPU. Slow; for tests."""
    num_cores: int | None = None
    """The number of a GPU's multiprocessors, as `pick` takes it."""
    without: tuple[WeightFormat | None, ...] = ()
    """The formats of weights that it does not multiply by, although the implementation could."""

    def refusal(self, shape: LinearShape) -> str | None:
        """Return why the op runs a matmul in plain XLA, None if it does not."""
        if shape.format not in self.without:
            return super().refusal(shape)
        return f"weights of {shape.format.name if shape.format else jnp.dtype(shape.dtype).name} are left out"

    def __call__(
        self,
        x_ti: Array,
        weight: Array | Quantized,
        layer: Array | int,
        *,
        out_dtype: DTypeLike | None = None,
        num_rows: Array | int | None = None,
        activation: str | None = None,
        is_gated: bool = True,
        plus_to: Array | None = None,
        bias_o: Array | None = None,
    ) -> Array:
        """Return x @ w[layer].T [t, o], summed in float32.

        Args:
          x_ti: rows, bfloat16 or float32.
          weight: the weights of all layers [l, o, i], of x's dtype, of float32, or quantized. Rows of bfloat16 are
            multiplied by float32 weights as exactly as if they were float32 too. Quantized weights are multiplied as if
            they had been widened to x's dtype, or for up to 8 rows on a GPU in plain XLA to float32; those with one
            scale for each output scale the sums instead.
          layer: index of the layer, may be traced.
          out_dtype: the result's dtype, x's if None.
          num_rows: the number of rows of x that count; results of other rows may be anything but NaN. None: all.
          activation: one of `ACTIVATIONS`. If gated, the result is the activation of the first half of the columns
            times the second half, [t, o / 2]; if not, the activation of all columns, after the additions.
          plus_to, bias_o: arrays to add, of the result's dtype. A gated result has no bias, and only plain XLA and the
            CPU's kernel add to it: [t, o], to both halves before the activation.

        Raises:
          ValueError: for arrays that do not fit each other.
        """
        out_dtype = jnp.dtype(out_dtype or x_ti.dtype)
        form = weight.format if isinstance(weight, Quantized) else None
        if x_ti.ndim != 2 or len(weight.shape) != 3 or weight.shape[2] != x_ti.shape[1]:
            raise ValueError(f"linear: x {x_ti.shape} and w {weight.shape} are not [t, in] and [layers, out, in]")
        if activation not in (None, *ACTIVATIONS):
            raise ValueError(f"linear: activation must be one of {', '.join(ACTIVATIONS)}, not {activation!r}")
        dtype = x_ti.dtype if isinstance(weight, Quantized) else weight.dtype
        if self.platform == "cpu":
            x_ti = x_ti.astype(dtype)
        shape = LinearShape(weight.shape[1], weight.shape[2], x_ti.dtype, out_dtype, form, activation, is_gated)
        name = "xla" if dtype != x_ti.dtype or self.refusal(shape) else self.implementation
        entry = LINEAR[name]
        return load(entry.function)(
            x_ti,
            weight,
            layer,
            out_dtype=out_dtype,
            num_rows=num_rows,
            activation=activation,
            is_gated=is_gated,
            plus_to=plus_to,
            bias_o=bias_o,
            interpret=self.interpret,
            **({"num_cores": self.num_cores} if entry.takes_cores else {}),
        )


def pick(platform: str, *, architecture: str | None = None, num_cores: int | None = None) -> tuple[Linear, str | None]:
    """Return the op for a platform ("cpu", "tpu" or "gpu"), and why it is not the platform's own if it is not.

    `architecture` and `num_cores` are as `paged_attention.pick` takes them.
    """
    name, reason = default_for(LINEAR, platform, architecture)
    return Linear(name, num_cores=num_cores), reason
