"""Matmuls of a step's rows: in plain XLA or, with weights that are read in place in a stack, in the CPU's kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels import linear as native

from ..loop import LayerOf
from ..quantization import Quantized
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
    flattened to matrices: with more dimensions XLA:CPU would copy the weight into another order in each step. The
    CPU's own matmul rounds once, at the end.
    """
    if act is not None and act not in native.ACTIVATIONS:
        return ACTIVATIONS[act](linear(x, weight, out_dtype, plus, bias=bias))
    x_ti, out_dtype = x.reshape(x.shape[0], -1), out_dtype or x.dtype
    out_shape = weight.shape[: weight.ndim - x.ndim + 1]
    n, k = math.prod(out_shape), x_ti.shape[1]
    if native_linear := find_native_linear(weight, n, k, x.dtype, act, is_gated=False):
        plus_to = None if plus is None else plus.reshape(x.shape[0], -1)
        added = {"plus_tn": plus_to, "bias_n": None if bias is None else bias[...].reshape(n)}
        out_to = native_linear(x_ti, out_dtype=out_dtype, activation=act, is_gated=False, **added)
        return out_to.reshape(x.shape[0], *out_shape)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    multiply = partial(jnp.einsum, "ti,oi->to", x_ti, precision=precision)
    held = weight.get_raw_value()
    if isinstance(held, Quantized):
        weight_oi = held.values[...].reshape(n, k).astype(x.dtype)
        out_to = multiply(weight_oi, preferred_element_type=jnp.float32) * held.scales[...].reshape(1, n)
        out_to = out_to.astype(out_dtype)
    else:
        out_to = multiply(weight[...].reshape(n, k), preferred_element_type=out_dtype)
    out = out_to.reshape(x.shape[0], *out_shape)
    if plus is not None:
        out = plus + out
    if bias is not None:
        out = out + bias[...][None]
    return out if act is None else ACTIVATIONS[act](out)


def gated_linear(x_td: Array, gate_up: nnx.Param[Array], parts: Sequence[Part], act: str) -> Array:
    """Return act(gate(x)) * up(x), [t, f], of a weight [num_shards, rows, d] that holds both `parts`."""
    num_shards, rows, d = gate_up.shape
    if num_shards == 1 and (native_linear := find_native_linear(gate_up, rows, d, x_td.dtype, act)):
        return native_linear(x_td, out_dtype=x_td.dtype, activation=act)
    gate_tf, up_tf = split(linear(x_td, gate_up), parts)
    return ACTIVATIONS[act](gate_tf) * up_tf


def find_native_linear(
    weight: nnx.Param[Array],
    n: int,
    k: int,
    dtype: DTypeLike,
    activation: str | None = None,
    *,
    is_gated: bool = True,
) -> Callable[..., Array] | None:
    """Return the CPU's own `linear`, bound to a weight taken as [n, k]; None if it cannot multiply by that weight."""
    held = weight.get_raw_value()
    values, scales = held if isinstance(held, Quantized) else (held, None)
    if not (isinstance(values, LayerOf) and native.can_multiply((n, k), dtype, activation, is_gated=is_gated)):
        return None
    return partial(
        native.linear,
        w_lnk=values.stack.reshape(-1, n, k),
        layer=values.layer,
        scales_ln=None if scales is None else scales.stack.reshape(-1, n),
        num_rows=values.num_rows,
    )
