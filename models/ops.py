"""The ops that a model multiplies by its weights with, and its weights as these ops take them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from pallas_kernels.grouped_matmul import GroupedMatmul
from pallas_kernels.linear import Linear
from pallas_kernels.lora import Lora, Rows

from .adapters import Adapted


class Ops(NamedTuple):
    """The kernels that layers compute with, besides attention."""

    linear: Linear = Linear()
    grouped_matmul: GroupedMatmul = GroupedMatmul()
    """The op of one device, for the weights of experts."""
    mesh: Mesh | None = None
    """The devices that experts and quantized weights are spread over; None for one device."""
    by_head: GroupedMatmul = GroupedMatmul()
    """The op for weights that each head has its own of; plain XLA's is one matmul with a batch of heads."""
    lora: Lora = Lora()
    """The op for adapters beside weights."""

    @property
    def has_cpu_norms(self) -> bool:
        """Say whether norms are the CPU's own kernels, as matmuls are."""
        return self.linear.platform == "cpu"


class LayerOf:
    """One layer's array in a stack of several layers' arrays, and the ops to apply it with; only indexing copies it.

    It is to be applied to the first `num_rows` rows of a step; the results of other rows are never used.
    """

    def __init__(self, stack: Array, layer: Array | int, num_rows: Array | int, ops: Ops) -> None:
        self.stack, self.layer, self.num_rows, self.ops = stack, layer, num_rows, ops
        self.shape, self.ndim = stack.shape[1:], stack.ndim - 1

    def __getitem__(self, index: Any) -> Array:
        """Index a copy of the array."""
        return jax.lax.dynamic_index_in_dim(self.stack, self.layer, keepdims=False)[index]


def held_by(param: nnx.Param[Array]) -> Any:
    """Return what a parameter of a layer in use holds: a `LayerOf`, or a `Quantized` of them."""
    return param.get_raw_value()


class Stacked(NamedTuple):
    """An array in a stack, before it is known what applies it."""

    stack: Array
    layer: Array | int


def bind(weights: Any, num_rows: Array | int, ops: Ops, adapter_rows: Rows | None = None) -> Any:
    """Return weights, each an array or `Stacked`, as layers take them; those with adapters also get rows' slots."""

    def one(held: Any) -> LayerOf:
        stack, layer = held if isinstance(held, Stacked) else (held[None], 0)
        return LayerOf(stack, layer, num_rows, ops)

    def with_rows(held: Any) -> Any:
        return replace(held, rows=adapter_rows) if isinstance(held, Adapted) else held

    bound = jax.tree.map(one, weights, is_leaf=lambda held: isinstance(held, Stacked))
    return jax.tree.map(with_rows, bound, is_leaf=lambda held: isinstance(held, Adapted))
