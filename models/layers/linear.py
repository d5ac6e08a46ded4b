"""Matmuls of a step's rows by weights, by whichever op the model was made with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul import Groups
from pallas_kernels.linear.xla import ACTIVATIONS as FUSED_ACTIVATIONS
from pallas_kernels.weights.held import Quantized

from ..adapters import Adapted
from ..ops import LayerOf, held_by
from ..params import Joined, cut_of
from .params import Part, split
from .spread import multiply_spread

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    **FUSED_ACTIVATIONS,
    "gelu_new": partial(jax.nn.gelu, approximate=True),
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
    """Return act(weight x + plus + bias), [t, *out], of x [t, *in], in x's dtype; float32 is never rounded on the way.

    A weight is [*out, in]: with several axes of inputs XLA would copy it into another order in each step, on a CPU and,
    where its heads do not fill tiles, on a TPU. `plus`, of the result's shape and dtype, and `bias`, [*out], are added
    if given.
    """
    held, axes = held_by(weight), _axes(weight)
    if isinstance(held, Joined):
        members = [_product(x, each, axes, out_dtype=out_dtype) for each in held.members]
        return _finish(jnp.concatenate(members, axis=2), plus, bias, act)
    if act is not None and act not in FUSED_ACTIVATIONS:
        return ACTIVATIONS[act](linear(x, weight, out_dtype, plus, bias=bias))
    return _product(x, held, axes, plus, bias, out_dtype=out_dtype, activation=act, is_gated=False)


def gated_linear(x_td: Array, gate_up: nnx.Param[Array], parts: Sequence[Part], act: str) -> Array:
    """Return act(gate(x)) * up(x), [t, f], of a weight [num_shards, rows, d] that holds both `parts`."""
    held = held_by(gate_up)
    # Of the kernels that apply the activation few add anything before it.
    can_be_fused = held.can_be_fused if isinstance(held, Adapted) else not isinstance(held, Joined)
    if can_be_fused and held.shape[0] == 1 and act in FUSED_ACTIVATIONS:
        return _multiply(x_td, held, held.shape[1], _axes(gate_up), activation=act)
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
    """Multiply by the matrices in place in their stack, as by those of experts with equally many tokens each."""
    t, n, i = x_tni.shape
    op = held.ops.by_head
    rows = -(-t // op.row_alignment) * op.row_alignment
    x_ri = jnp.pad(x_tni.swapaxes(0, 1), ((0, 0), (0, rows - t), (0, 0))).reshape(n * rows, i)
    groups = Groups(rows * jnp.arange(n, dtype=jnp.int32), jnp.full(n, held.num_rows, jnp.int32))
    out_ro = op(x_ri, held.stack, held.layer, groups)
    return out_ro.reshape(n, rows, -1)[:, :t].swapaxes(0, 1)


def _product(
    x: Array,
    held: LayerOf | Quantized | Adapted,
    axes: Axes,
    plus: Array | None = None,
    bias: nnx.Param[Array] | None = None,
    **options: Any,
) -> Array:
    """Return the product with a weight [*out, in], as [t, *out]."""
    t, out_shape = x.shape[0], held.shape[:-1]
    n = math.prod(out_shape)
    plus_to = None if plus is None else plus.reshape(t, n)
    bias_o = None if bias is None else bias[...].reshape(n)
    out = _multiply(x.reshape(t, -1), held, n, axes, plus_to=plus_to, bias_o=bias_o, **options)
    return out.reshape(t, *out_shape)


def _multiply(x_ti: Array, held: LayerOf | Quantized | Adapted, n: int, axes: Axes, **options: Any) -> Array:
    """Multiply by a weight taken as [n, in]."""
    if isinstance(held, Adapted):
        return _multiply_adapted(x_ti, held, n, axes, **options)
    if not isinstance(held, Quantized):
        stack = held.stack.reshape(held.stack.shape[0], n, -1)
        return held.ops.linear(x_ti, stack, held.layer, num_rows=held.num_rows, **options)
    held, order = held.unordered()
    if order is not None:
        x_ti = x_ti[:, order[...]]
    place, stack = held.codes, held.map(lambda part: part.stack.reshape(part.stack.shape[0], n, -1))
    if place.ops.mesh is not None and place.ops.mesh.size > 1:
        cut = cut_of(axes.names, held.shape, axes.num_inputs, place.ops.mesh.size)
        if options.pop("is_gated", True) and options.get("activation"):
            raise ValueError("on several devices gates and what they gate are in different columns of an array")
        return multiply_spread(x_ti, stack, place, cut, **options)
    return place.ops.linear(x_ti, stack, place.layer, num_rows=place.num_rows, **options)


def _multiply_adapted(
    x_ti: Array, held: Adapted, n: int, axes: Axes, plus_to: Array | None = None, **options: Any
) -> Array:
    """Multiply by a weight and its adapters, which add to the product, or if it is activated before that."""
    out_dtype = options.get("out_dtype") or x_ti.dtype

    def multiply(plus_to: Array | None) -> Array:
        return _multiply(x_ti, held.weight, n, axes, plus_to=plus_to, **options)

    if options.get("activation") is None:
        return held.add_to(multiply(plus_to), x_ti, out_dtype)
    return held.if_any(lambda: multiply(held.add_to(plus_to, x_ti, out_dtype)), lambda: multiply(plus_to))


class Axes(NamedTuple):
    """The logical axes of a weight, the last `num_inputs` of which are its inputs."""

    names: tuple[str | None, ...]
    num_inputs: int


def _axes(weight: nnx.Param[Array]) -> Axes:
    metadata = weight.get_metadata()
    return Axes(tuple(metadata["out_sharding"]), metadata["num_inputs"])


def _finish(out: Array, plus: Array | None, bias: nnx.Param[Array] | None, act: str | None) -> Array:
    """Return act(out + plus + bias)."""
    if plus is not None:
        out = plus + out
    if bias is not None:
        out = out + bias[...][None]
    return out if act is None else ACTIVATIONS[act](out)
