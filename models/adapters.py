"""LoRA adapters: each adds the product of two thin matrices, B A, to a layer's weight.

An engine holds several adapters in slots. Of each weight the matrices of all slots lie side by side, so that two
ordinary matmuls give what every adapter would add to every row; what lies between them is set to zero but for the row's
own adapter. Zeros add nothing: what a row gets does not depend on which adapters other rows have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .joined import Joined
from .params import ArraySpec


class AdapterShape(NamedTuple):
    """The room that an engine has for adapters: slots from 1 on, as slot 0 stands for none."""

    num_slots: int
    rank: int
    """The largest rank; an adapter of a smaller one is filled up with zeros."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapters:
    """The matrices of all slots beside one weight [*lead, *out, in], or their specs.

    A slot has `rank` rows of `down` for each parameter that the weight is made of, in order, and as many columns of
    `up`; those of another parameter's outputs are zero.
    """

    down: Any
    """A, [*lead, slots x parts x rank, in]."""
    up: Any
    """B, scaled, [*lead, *out, slots x parts x rank]."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """A weight in a layer, the adapters beside it, and the slot of each token's adapter, [t]."""

    weight: Any
    adapters: Adapters
    slots_t: Any = None
    num_slots: int = field(default=1, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the weight's shape."""
        return self.weight.shape

    def added(self, x_ti: Array, plus_to: Array | None, out_dtype: DTypeLike) -> Array:
        """Return what the rows' adapters add to the weight's product, [t, o], itself added to `plus_to`."""
        down, up = self.adapters.down, self.adapters.up
        linear, num_columns = down.ops.linear, up.shape[-1]
        if plus_to is None:
            plus_to = jnp.zeros((x_ti.shape[0], prod(up.shape[:-1])), out_dtype)

        def add(plus_to: Array) -> Array:
            found_tc = linear(x_ti, _matrices(down), down.layer, num_rows=down.num_rows)
            slots_c = 1 + jnp.arange(num_columns) // (num_columns // self.num_slots)
            own_tc = jnp.where(slots_c == self.slots_t[:, None], found_tc, 0)
            return linear(own_tc, _matrices(up), up.layer, out_dtype=out_dtype, num_rows=up.num_rows, plus_to=plus_to)

        if linear.implementation != "cpu":  # a GPU's branches ask the host, and no step is one CUDA graph with them
            return add(plus_to)
        return jax.lax.cond(jnp.any(self.slots_t > 0), add, lambda plus_to: plus_to, plus_to)


def _matrices(held: Any) -> Array:
    """Return a stack of matrices, [layers, out, in]."""
    return held.stack.reshape(held.stack.shape[0], -1, held.shape[-1])


def adapter_specs(arrays: Mapping[str, ArraySpec], shape: AdapterShape, dtype: DTypeLike) -> dict[str, Adapters]:
    """Return the specs of adapters by the path of the weight that they are beside: those of all layers' matmuls but by
    the weights of experts.
    """
    return {
        path: _beside(array, shape, jnp.dtype(dtype))
        for path, array in arrays.items()
        if path.startswith("layers.") and array.num_inputs and array.num_experts is None
    }


def _beside(array: ArraySpec, shape: AdapterShape, dtype: Any) -> Adapters:
    lead, count = sum(axis == "layers" for axis in array.axes), array.num_inputs
    num_columns = shape.num_slots * len(array.params) * shape.rank
    axes, sizes = array.axes[:lead], array.shape[:lead]
    inputs = prod(array.shape[-count:])
    down = ArraySpec((*sizes, num_columns, inputs), dtype, (*axes, None, array.axes[-count]), {})
    up = ArraySpec((*array.shape[:-count], num_columns), dtype, (*array.axes[:-count], None), {})
    return Adapters(down, up)


def adapted_layers(params: Mapping[str, Any], shape: AdapterShape | None) -> Any:
    """Return the weights of all layers, with the adapters beside them if there are slots for any."""
    if shape is None:
        return params["layers"]
    layers = zip(params["layers"], params["adapters"]["layers"], strict=True)
    return tuple(_adapt(weights, adapters, shape.num_slots) for weights, adapters in layers)


def _adapt(weights: Any, adapters: Mapping[str, Any], num_slots: int) -> Any:
    """Return a layer's nested dict of weights with the adapters, nested alike, beside them."""
    found = dict(weights)
    for name, held in adapters.items():
        weight = weights[name]
        if isinstance(held, Adapters):
            found[name] = Adapted(weight, held, num_slots=num_slots)
        elif isinstance(held, Joined):
            members = zip(weight.members, held.members, strict=True)
            found[name] = Joined(tuple(Adapted(*member, num_slots=num_slots) for member in members))
        else:
            found[name] = _adapt(weight, held, num_slots)
    return found


def set_adapter(adapters: Any, slot: Array, one: Any) -> Any:
    """Return the adapters of all slots, nested, with a slot's replaced; `one` has the arrays of a single slot."""

    def put(held: Array, own: Array, axis: int) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(held, own, (slot - 1) * own.shape[axis], axis)

    def replaced(held: Adapters, own: Adapters) -> Adapters:
        return Adapters(put(held.down, own.down, held.down.ndim - 2), put(held.up, own.up, held.up.ndim - 1))

    return jax.tree.map(replaced, adapters, one, is_leaf=lambda held: isinstance(held, Adapters))
