"""LoRA adapters: each adds the product of two thin matrices, B A, to a layer's weight.

An engine holds several adapters in slots. The matrices of all slots lie side by side for each weight, and `Lora` adds
to a row the product of its own adapter. What a row gets does not depend on which adapters other rows have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.lora import LoraShape, Rows

from .config import ModelConfig
from .params import ArraySpec, Axes, Joined


class AdapterShape(NamedTuple):
    """The number and size of an engine's slots for adapters. Slots count from 1; 0 stands for no adapter."""

    num_slots: int
    rank: int
    """The largest rank; an adapter of a smaller one is filled up with zeros."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapters:
    """The matrices of all slots beside one weight [*lead, *out, in], or their specs.

    A slot has `rank` rows of `down` for each parameter in the weight, in order, and as many of `up`, where the outputs
    of other parameters are zero.
    """

    down: Any
    """A, [*lead, slots x parts x rank, in]."""
    up: Any
    """B, scaled and transposed, [*lead, slots x parts x rank, *out]."""
    parts: tuple[int, ...] = field(metadata={"static": True})
    """The number of outputs of each parameter, in a shard of the weight."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """A weight of a layer with the adapters beside it, and the tokens' rows by the slots of their adapters."""

    weight: Any
    adapters: Adapters
    rows: Rows | None = None
    num_slots: int = field(default=1, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the weight's shape."""
        return self.weight.shape

    @property
    def can_gate(self) -> bool:
        """True if the matmul by the weight can add the adapters' products before it gates."""
        return self.adapters.down.ops.linear.platform == "cpu"

    def multiply(self, x_ti: Array, axes: Axes, *, plus_to: Array | None = None, **options: Any) -> Array:
        """Return the product, as `weights.Weight.multiply` does.

        Adapters add to the product, before its activation if it has one.
        """
        out_dtype = options.get("out_dtype") or x_ti.dtype

        def multiply(plus_to: Array | None) -> Array:
            return self.weight.multiply(x_ti, axes, plus_to=plus_to, **options)

        if options.get("activation") is None:
            return self.add_to(multiply(plus_to), x_ti, out_dtype)
        return self.if_any(lambda: multiply(self.add_to(plus_to, x_ti, out_dtype)), lambda: multiply(plus_to))

    def add_to(self, plus_to: Array | None, x_ti: Array, out_dtype: DTypeLike) -> Array:
        """Return `plus_to` plus the products of the rows' adapters, [t, o]."""
        down, up, rows = self.adapters.down, self.adapters.up, self.rows
        assert rows is not None
        num_outputs = prod(up.shape[1:])
        # Each shard of a weight has some of all parts' outputs: several shards are taken as one part.
        parts = self.adapters.parts if sum(self.adapters.parts) == num_outputs else (num_outputs,)
        up_lco = up.stack.reshape(*down.stack.shape[:2], num_outputs)
        options: dict[str, Any] = {"plus_to": plus_to, "out_dtype": out_dtype}
        return down.ops.lora(x_ti, down.stack, up_lco, down.layer, rows, parts, self.num_slots, **options)

    def if_any(self, adapted: Callable[[], Array], plain: Callable[[], Array]) -> Array:
        """Call the first function if any row has an adapter, else the second, and return its result."""
        if not self.can_gate:  # a branch on a GPU waits for the host, and a step with one is not a single CUDA graph
            return adapted()
        assert self.rows is not None
        return jax.lax.cond(self.rows.num_adapted > 0, adapted, plain)


def adapter_specs(arrays: Mapping[str, ArraySpec], shape: AdapterShape, dtype: DTypeLike) -> dict[str, Adapters]:
    """Return the specs of adapters by the path of the weight beside, for all layers' matmuls except experts'."""
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
    outputs, names = array.shape[lead:-count], array.axes[lead:-count]
    up = ArraySpec((*sizes, num_columns, *outputs), dtype, (*axes, None, *names), {})
    return Adapters(down, up, _parts_of(array))


def _parts_of(array: ArraySpec) -> tuple[int, ...]:
    """Return the number of outputs of each of an array's parameters, in a shard of the array."""
    return tuple(
        prod(param.shape[param.num_lead : -param.num_inputs]) // (param.segment.num_shards if param.segment else 1)
        for param in array.params.values()
    )


def embedding_specs(cfg: ModelConfig, shape: AdapterShape, dtype: DTypeLike) -> Adapters:
    """Return the specs of adapters of the embedding: in each slot A [rank, v], B [rank, d].

    There is a row more than `AdapterShape.rank` says, for what is added to all tokens, that of their type.
    """
    rows = shape.num_slots * (shape.rank + 1)
    down = ArraySpec((rows, cfg.vocab_size), dtype, (None, None), {})
    return Adapters(down, ArraySpec((rows, cfg.hidden_size), dtype, (None, None), {}), (cfg.hidden_size,))


def embedding_terms(adapters: Mapping[str, Any], shape: AdapterShape, token_ids_t: Array, slots_t: Array) -> Array:
    """Return what the adapters in tokens' slots add to their embeddings, [t, d]; zeros for slot 0."""
    held: Adapters = adapters["embed"]["table"]
    slots_r = 1 + jnp.arange(held.down.shape[0], dtype=jnp.int32) // (held.down.shape[0] // shape.num_slots)
    chosen_rt = jnp.where(slots_r[:, None] == slots_t[None], held.down[:, token_ids_t], 0)
    return jnp.einsum("rt,rd->td", chosen_rt, held.up, preferred_element_type=jnp.float32).astype(held.up.dtype)


def lora_shapes(specs: Mapping[str, Adapters], num_slots: int) -> list[LoraShape]:
    """Return the shapes of layers' adapters on one device, for kernels; `specs` are those of `num_slots` slots."""
    shapes = []
    for adapters in (each for path, each in specs.items() if path.startswith("layers.")):
        rank, dtype = adapters.down.shape[-2] // num_slots // len(adapters.parts), adapters.down.dtype
        shapes.append(LoraShape(rank, adapters.down.shape[-1], adapters.parts, dtype, dtype))
    return list(dict.fromkeys(shapes))


def adapted_layers(params: Mapping[str, Any], shape: AdapterShape | None) -> Any:
    """Return the weights of all layers, with the adapters beside them if there are slots for any."""
    if shape is None:
        return params["layers"]
    layers = zip(params["layers"], params["adapters"]["layers"], strict=True)
    return tuple(_adapt(weights, adapters, shape.num_slots) for weights, adapters in layers)


def _adapt(weights: Any, adapters: Mapping[str, Any], num_slots: int) -> Any:
    """Return a layer's nested dict of weights with the adapters, nested alike, beside them."""
    adapted = dict(weights)
    for name, held in adapters.items():
        weight = weights[name]
        if isinstance(held, Adapters):
            adapted[name] = Adapted(weight, held, num_slots=num_slots)
        elif isinstance(held, Joined):
            members = zip(weight.members, held.members, strict=True)
            adapted[name] = Joined(tuple(Adapted(*member, num_slots=num_slots) for member in members))
        else:
            adapted[name] = _adapt(weight, held, num_slots)
    return adapted


def set_adapter(adapters: Any, slot: Array, one: Any) -> Any:
    """Return the nested adapters of all slots with one slot replaced; `one` has the arrays of a single slot."""

    def put(held: Array, new: Array, axis: int) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(held, new, (slot - 1) * new.shape[axis], axis)

    def replaced(held: Adapters, new: Adapters) -> Adapters:
        axis = held.down.ndim - 2
        return Adapters(put(held.down, new.down, axis), put(held.up, new.up, axis), held.parts)

    return jax.tree.map(replaced, adapters, one, is_leaf=lambda held: isinstance(held, Adapters))
