"""Multiply a matrix by the transpose of another on a CPU."""

from __future__ import annotations

from jax import Array
from jax.typing import DTypeLike

from .cpu import ACTIVATIONS, INT8, Kind, can_multiply, cpu_linear, prepare

__all__ = ["ACTIVATIONS", "INT8", "Kind", "can_multiply", "linear", "prepare"]


def linear(
    x_tk: Array,
    w_lnk: Array,
    layer: Array | int,
    out_dtype: DTypeLike,
    *,
    scales_ln: Array | None = None,
    num_rows: Array | int | None = None,
    activation: str | None = None,
    is_gated: bool = True,
    plus_tn: Array | None = None,
    bias_n: Array | None = None,
) -> Array:
    """Return `cpu_linear` of weights of x's dtype or, with scales, of int8."""
    weight, form = (w_lnk, None) if scales_ln is None else ({"codes": w_lnk, "scales": scales_ln}, INT8)
    return cpu_linear(
        x_tk,
        weight,
        form,
        layer,
        out_dtype,
        num_rows=num_rows,
        activation=activation,
        is_gated=is_gated,
        plus_tn=plus_tn,
        bias_n=bias_n,
    )
