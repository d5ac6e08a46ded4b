"""Matmuls of a step's rows by weights, by whichever op the model was made with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.linear import ACTIVATIONS as FUSED_ACTIVATIONS
from pallas_kernels.weights.held import Quantized

from ..ops import LayerOf, held_by
from .params import Part, split

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
}


def linear(
    x: Array,
    weight: nnx.Param[Array],
    out_dtype: DTypeLike | None = None,
    plus: Array | None = None,
    *,
    bias: nnx.Param[Array] | None = None,
    act: str | None = None,
) -> Array:
    """Return act(weight x + plus + bias), [t, *out], of x [t, *in], in x's dtype; float32 is never rounded on the way.

    `plus`, of the result's shape and dtype, and `bias`, [*out], are added if given. Both operands of the product are
    flattened to matrices: with more dimensions XLA:CPU would copy the weight into another order in each step.
    """
    if act is not None and act not in FUSED_ACTIVATIONS:
        return ACTIVATIONS[act](linear(x, weight, out_dtype, plus, bias=bias))
    out_shape = _out_shape(held_by(weight), x.ndim - 1)
    t, n = x.shape[0], math.prod(out_shape)
    out_to = _multiply(
        x.reshape(t, -1),
        weight,
        n,
        out_dtype=out_dtype,
        plus_to=None if plus is None else plus.reshape(t, n),
        bias_o=None if bias is None else bias[...].reshape(n),
        activation=act,
        is_gated=False,
    )
    return out_to.reshape(t, *out_shape)


def gated_linear(x_td: Array, gate_up: nnx.Param[Array], parts: Sequence[Part], act: str) -> Array:
    """Return act(gate(x)) * up(x), [t, f], of a weight [num_shards, rows, d] that holds both `parts`."""
    num_shards, rows = _out_shape(held_by(gate_up), 1)
    if num_shards == 1 and act in FUSED_ACTIVATIONS:
        return _multiply(x_td, gate_up, rows, activation=act)
    gate_tf, up_tf = split(linear(x_td, gate_up), parts)
    return ACTIVATIONS[act](gate_tf) * up_tf


def _out_shape(held: LayerOf | Quantized, num_inputs: int) -> tuple[int, ...]:
    """Return the shape of a weight's outputs; a quantized one's inputs are one axis."""
    return held.shape[:-1] if isinstance(held, Quantized) else held.shape[: held.ndim - num_inputs]


def _multiply(x_ti: Array, weight: nnx.Param[Array], n: int, **options: Any) -> Array:
    """Multiply by a weight taken as [n, in]."""
    held: LayerOf | Quantized = held_by(weight)
    if isinstance(held, Quantized):
        place, stack = held.codes, held.map(lambda part: part.stack.reshape(part.stack.shape[0], n, -1))
    else:
        place, stack = held, held.stack.reshape(held.stack.shape[0], n, -1)
    return place.ops.linear(x_ti, stack, place.layer, num_rows=place.num_rows, **options)
