"""A layer's weights as its modules take them, and the kernels that multiply by them.

`Weight` is their common interface. `params.Joined` and `adapters.Adapted` are weights that consist of others.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul import GroupedMatmul
from pallas_kernels.linear import Linear
from pallas_kernels.linear.xla import ACTIVATIONS
from pallas_kernels.lora import Lora, Rows
from pallas_kernels.relative_attention import RelativeAttention
from pallas_kernels.weights.held import Quantized

from .adapters import Adapted
from .params import MESH_AXES, Axes, Cut, cut_of

_EVERYWHERE = PartitionSpec()


class Weight(Protocol):
    """A weight [*out, in] of a layer, bound to the kernels that multiply by it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the weight's shape."""
        ...

    @property
    def can_gate(self) -> bool:
        """True if `multiply` can gate: multiply one half of the outputs by the activation of the other."""
        ...

    def multiply(self, x_ti: Array, axes: Axes, **options: Any) -> Array:
        """Return the product with rows [t, in], [t, n], with all outputs in one axis; `options` are `Linear`'s."""
        ...


class Ops(NamedTuple):
    """The kernels that layers compute with, besides attention."""

    linear: Linear = Linear()
    grouped_matmul: GroupedMatmul = GroupedMatmul()
    """The op of one device, for the weights of experts."""
    mesh: Mesh | None = None
    """The devices that experts and quantized weights are spread over; None for one device."""
    by_head: GroupedMatmul = GroupedMatmul()
    """The op for weights with a matrix for each head; plain XLA's is one matmul with a batch of heads."""
    lora: Lora = Lora()
    """The op for adapters beside weights."""
    relative: RelativeAttention = RelativeAttention()
    """The op for attention that depends on distances."""

    @property
    def has_cpu_norms(self) -> bool:
        """Return whether norms use the CPU's own kernels, as matmuls do."""
        return self.linear.platform == "cpu"


class LayerOf:
    """One layer's array in a stack of several layers' arrays, and the ops to apply it with; only indexing copies it.

    It is applied to the first `num_rows` rows of a step; the results of other rows are never used.
    """

    can_gate = True

    def __init__(self, stack: Any, layer: Array | int, num_rows: Array | int, ops: Ops) -> None:
        self.stack, self.layer, self.num_rows, self.ops = stack, layer, num_rows, ops
        self.shape, self.ndim = stack.shape[1:], stack.ndim - 1

    def __getitem__(self, index: Any) -> Array:
        """Index a copy of the array."""
        return self._copy(self.stack)[index]

    def multiply(self, x_ti: Array, axes: Axes, **options: Any) -> Array:
        """Return the product, as `Weight.multiply` does."""
        del axes
        return self.ops.linear(x_ti, self._flat(self.stack), self.layer, num_rows=self.num_rows, **options)

    def _copy(self, stack: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(stack, self.layer, keepdims=False)

    def _flat(self, stack: Array) -> Array:
        """Return a stack of weights [*out, in] as [l, n, in]."""
        return stack.reshape(stack.shape[0], prod(self.shape[:-1]), -1)


class _QuantizedLayer(LayerOf):
    """One layer's quantized matrix in a stack of several layers' matrices."""

    stack: Quantized

    def __getitem__(self, index: Any) -> Array:
        """Return the float32 numbers of some rows."""
        rows = self.stack.map(lambda part: self._copy(part)[index])
        return rows.numbers() * rows.scales if rows.format.scales_rows else rows.numbers()

    def multiply(self, x_ti: Array, axes: Axes, **options: Any) -> Array:
        """Return the product, as `Weight.multiply` does."""
        stack, order = self.stack.unordered()
        if order is not None:
            x_ti = x_ti[:, self._copy(order)]
        stack, mesh = stack.map(self._flat), self.ops.mesh
        if mesh is None or mesh.size == 1:
            return self.ops.linear(x_ti, stack, self.layer, num_rows=self.num_rows, **options)
        if options.pop("is_gated", True) and options.get("activation"):
            raise ValueError("on several devices a matmul cannot gate: gates and ups are in different columns")
        cut = cut_of(axes.names, self.shape, axes.num_inputs, mesh.size)
        return self._multiply_spread(x_ti, stack, cut, **options)

    def _multiply_spread(
        self,
        x_ti: Array,
        weight: Quantized,
        cut: Cut | None,
        *,
        out_dtype: DTypeLike | None = None,
        plus_to: Array | None = None,
        bias_o: Array | None = None,
        activation: str | None = None,
    ) -> Array:
        """Return the product with a weight [l, n, in] that is shared out over the devices of a mesh.

        XLA shares out plain matmuls itself, but no kernels. Devices with shares of the inputs exchange their sums in
        the result's dtype, as XLA does. An activation applies to all columns; no column gates another.
        """
        mesh, op = self.ops.mesh, self.ops.linear
        assert mesh is not None
        out_dtype = jnp.dtype(out_dtype or x_ti.dtype)
        is_finished = plus_to is None and bias_o is None and activation is None
        # Exchanged sums in bfloat16 are half as many bytes; others are rounded once, at the end.
        dtype = out_dtype if is_finished or cut is Cut.INPUTS else jnp.float32

        def multiply(x_ti: Array, weight: Quantized, layer: Array, num_rows: Array) -> Array:
            y_to = op(x_ti, weight, layer, num_rows=num_rows, out_dtype=dtype)
            return jax.lax.psum(y_to, MESH_AXES) if cut is Cut.INPUTS else y_to

        def weights(part: Array) -> PartitionSpec:
            """Cut a part like the weight; one with a single number for all inputs stays whole if inputs are cut."""
            if cut is Cut.INPUTS:
                return PartitionSpec(None, None, MESH_AXES) if part.shape[2] > 1 else _EVERYWHERE
            return _EVERYWHERE if cut is None else PartitionSpec(None, MESH_AXES)

        columns = PartitionSpec(None, MESH_AXES)
        # The kernels' outputs do not declare over which mesh axes they vary, which check_vma would need.
        sharded = jax.shard_map(
            multiply,
            mesh=mesh,
            in_specs=(columns if cut is Cut.INPUTS else _EVERYWHERE, weight.map(weights), _EVERYWHERE, _EVERYWHERE),
            out_specs=columns if cut is Cut.OUTPUTS else _EVERYWHERE,
            check_vma=False,
        )
        y_to = sharded(x_ti, weight, jnp.asarray(self.layer, jnp.int32), jnp.asarray(self.num_rows, jnp.int32))
        if is_finished:
            return y_to
        for term in (plus_to, bias_o):
            y_to = y_to if term is None else y_to.astype(jnp.float32) + term
        return (y_to if activation is None else ACTIVATIONS[activation](y_to)).astype(out_dtype)


def held_by(param: nnx.Param[Array]) -> Any:
    """Return the `Weight` that a bound layer's parameter holds."""
    return param.get_raw_value()


class Stacked(NamedTuple):
    """An array or a quantized matrix in a stack, not yet bound to ops."""

    stack: Any
    layer: Array | int


def bind(weights: Any, num_rows: Array | int, ops: Ops, adapter_rows: Rows | None = None) -> Any:
    """Return weights as layers take them; those with adapters also get the rows by their adapters' slots.

    Each is an array, a `Quantized`, or one of these as `Stacked`.
    """

    def one(held: Any) -> LayerOf:
        stack, layer = held if isinstance(held, Stacked) else (jax.tree.map(lambda x: x[None], held), 0)
        return (_QuantizedLayer if isinstance(stack, Quantized) else LayerOf)(stack, layer, num_rows, ops)

    def with_rows(held: Any) -> Any:
        return replace(held, rows=adapter_rows) if isinstance(held, Adapted) else held

    bound = jax.tree.map(one, weights, is_leaf=lambda held: isinstance(held, Stacked | Quantized))
    return jax.tree.map(with_rows, bound, is_leaf=lambda held: isinstance(held, Adapted))
