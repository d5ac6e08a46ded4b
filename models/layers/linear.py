"""Multiply a step's rows by weights, with the ops that the model was made with."""

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

from pallas_kernels.grouped_matmul import Groups
from pallas_kernels.linear.xla import ACTIVATIONS as FUSED_ACTIVATIONS

from ..params import Axes
from ..weights import LayerOf, Weight, held_by
from .params import Part, split

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    **FUSED_ACTIVATIONS,
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
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
    """Return act(weight x + plus + bias), [t, *out], of x [t, *in], in x's dtype; float32 is never rounded in between.

    A weight is [*out, in]: with several axes of inputs XLA would copy it into another order in each step, on a CPU and,
    if its heads do not fill tiles, on a TPU. `plus` has the result's shape and dtype, `bias` is [*out].
    """
    if act is not None and act not in FUSED_ACTIVATIONS:
        return ACTIVATIONS[act](linear(x, weight, out_dtype, plus, bias=bias))
    held: Weight = held_by(weight)
    t, out_shape = len(x), held.shape[:-1]
    n = math.prod(out_shape)
    plus_to = None if plus is None else plus.reshape(t, n)
    bias_o = None if bias is None else bias[...].reshape(n)
    options: dict[str, Any] = {"out_dtype": out_dtype, "activation": act, "is_gated": False}
    out_to = held.multiply(x.reshape(t, -1), _axes(weight), plus_to=plus_to, bias_o=bias_o, **options)
    return out_to.reshape(t, *out_shape)


def gated_linear(x_td: Array, gate_up: nnx.Param[Array], parts: Sequence[Part], act: str) -> Array:
    """Return act(gate(x)) * up(x), [t, f], of a weight [num_shards, rows, d] that holds both `parts`."""
    held: Weight = held_by(gate_up)
    if held.can_gate and held.shape[0] == 1 and act in FUSED_ACTIVATIONS:
        return held.multiply(x_td, _axes(gate_up), activation=act)
    gate_tf, up_tf = split(linear(x_td, gate_up), parts)
    return ACTIVATIONS[act](gate_tf) * up_tf


def heads_linear(x_tni: Array, weight: nnx.Param[Array]) -> Array:
    """Multiply each head's part of tokens by the head's own matrix, [n, o, i]; return [t, n, o] in x's dtype."""
    held: LayerOf = held_by(weight)
    if held.ops.by_head.implementation != "xla":
        return _heads_as_groups(x_tni, held)
    precision = jax.lax.Precision.HIGHEST if x_tni.dtype == jnp.float32 else None
    out_nto = jnp.einsum(
        "nti,noi->nto", x_tni.swapaxes(0, 1), weight[...], precision=precision, preferred_element_type=jnp.float32
    )
    return out_nto.astype(x_tni.dtype).swapaxes(0, 1)


def _heads_as_groups(x_tni: Array, held: LayerOf) -> Array:
    """Multiply by the matrices in place in their stack, as if they were experts with equal numbers of tokens."""
    t, n, i = x_tni.shape
    op = held.ops.by_head
    rows = -(-t // op.row_alignment) * op.row_alignment
    x_ri = jnp.pad(x_tni.swapaxes(0, 1), ((0, 0), (0, rows - t), (0, 0))).reshape(n * rows, i)
    groups = Groups(rows * jnp.arange(n, dtype=jnp.int32), jnp.full(n, held.num_rows, jnp.int32))
    out_ro = op(x_ri, held.stack, held.layer, groups)
    return out_ro.reshape(n, rows, -1)[:, :t].swapaxes(0, 1)


def _axes(weight: nnx.Param[Array]) -> Axes:
    metadata = weight.get_metadata()
    return Axes(tuple(metadata["out_sharding"]), metadata["num_inputs"])
