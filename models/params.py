"""Parameters: the array that holds each one, and the tensors of a checkpoint that it is made of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from .family import TensorName
from .quantization import Quantized

KV_HEADS = "kv_heads"
"""The logical axis along which heads may be repeated."""
HEAD_DIM = "head_dim"
"""The logical axis of a head's dimensions, which RoPE may need in another order."""


class Segment(NamedTuple):
    """The place of a parameter in a merged array: it begins at row `start` in each of `num_shards` shards."""

    array: str
    num_shards: int
    start: int


LEAD_AXES = ("layers", "experts")
"""The logical axes that come first, if an array has them; each index on them is read from the checkpoint by itself."""


class _Axes:
    """What `ParamSpec` and `ArraySpec` share."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    num_inputs: int
    is_quantized: bool

    @property
    def stacked(self) -> bool:
        """Say whether the first dimension counts layers."""
        return self.axes[0] == "layers"

    @property
    def num_lead(self) -> int:
        """Return the number of leading axes, which index layers and experts."""
        return sum(axis in LEAD_AXES for axis in self.axes)

    @property
    def num_experts(self) -> int | None:
        """Return the number of experts, None if the array is not one of experts."""
        return dict(zip(self.axes, self.shape, strict=True)).get("experts")

    @property
    def quantized_inputs(self) -> int:
        """Return the number of last axes that are summed over, if the array is quantized; else 0."""
        return self.num_inputs if self.is_quantized else 0


@dataclass(frozen=True)
class ParamSpec(_Axes):
    """One parameter, and the HF tensors it is made of: one for each layer if it is stacked, or for each expert of each.

    `layout` takes one HF tensor of `hf_shape`, or the part of it at `hf_index`, to one layer's or one expert's part of
    ours; `axes` names a logical axis per dimension.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    sources: tuple[str, ...]
    layout: str
    hf_shape: tuple[int, ...]
    hf_index: tuple[slice, ...] = ()
    """The part of the HF tensor that is this parameter, if it holds several; empty for all of it."""
    repeats: int = 1
    """How many consecutive copies ours has of each kv head of the HF tensor."""
    head_order: tuple[int, ...] | None = None
    """The HF tensor's index of each dimension of a head of ours, if the orders differ."""
    segment: Segment | None = None
    """The place in a merged array; None for a parameter that has an array of its own."""
    num_inputs: int = 0
    """The number of last axes that a matmul sums over; 0 for a parameter that is added, or multiplies elementwise."""
    is_quantized: bool = False

    @property
    def rows(self) -> int:
        """Return the parameter's rows in each shard, if it is in a merged array."""
        return self.shape[self.num_lead] // (self.segment.num_shards if self.segment else 1)


@dataclass(frozen=True)
class ArraySpec(_Axes):
    """An array that the model takes, and the parameters it holds."""

    shape: tuple[int, ...]
    dtype: Any
    """The dtype that it is loaded in."""
    axes: tuple[str | None, ...]
    params: Mapping[str, ParamSpec]
    num_inputs: int = 0
    is_quantized: bool = False


def stored[Spec: (ParamSpec, ArraySpec)](spec: Spec) -> Spec | Quantized:
    """Return what is stored for a spec: itself, or if it is quantized the specs of its integers and scales."""
    if not (count := spec.quantized_inputs):
        return spec
    values = replace(spec, dtype=jnp.dtype(jnp.int8), is_quantized=False)
    scales = replace(values, shape=spec.shape[:-count], axes=spec.axes[:-count], dtype=jnp.dtype(jnp.float32))
    return Quantized(values, scales)


def array_specs(specs: Mapping[str, ParamSpec]) -> dict[str, ArraySpec]:
    """Return the arrays that hold these parameters, by path."""
    members: dict[str, dict[str, ParamSpec]] = {}
    for path, spec in specs.items():
        members.setdefault(spec.segment.array if spec.segment else path, {})[path] = spec
    return {path: _array(params) for path, params in members.items()}


def _array(params: Mapping[str, ParamSpec]) -> ArraySpec:
    first = next(iter(params.values()))
    shape, axes = first.shape, first.axes
    if first.segment:
        lead = first.num_lead
        rows = sum(spec.rows for spec in params.values())
        shape = (*shape[:lead], first.segment.num_shards, rows, *shape[lead + 1 :])
        axes = (*axes[:lead], "shards", "rows", *axes[lead + 1 :])
    return ArraySpec(shape, first.dtype, axes, params, first.num_inputs, first.is_quantized)


def unflatten[T](flat: Mapping[str, T]) -> dict[str, Any]:
    """Turn "layers.attn.q"-style paths into the nested dict that `forward` takes; numbers make a tuple of layers."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    layers = nested.get("layers", {})
    if layers and all(name.isdigit() for name in layers):
        nested["layers"] = tuple(layers[str(index)] for index in range(len(layers)))
    return nested


class Declared(NamedTuple):
    """A parameter as a layer declares it."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...]
    segment: Segment | None
    num_inputs: int
    rotates: bool

    @property
    def has_experts(self) -> bool:
        """Say whether it has an axis of experts, which is its first."""
        return self.axes[0] == "experts"

    def hf_shape(self, layout: str, kv_repeats: int) -> tuple[int, ...]:
        """Return the shape that `layout` = "(n h) d -> d n h" comes from, of one expert if it has some."""
        theirs, ours = layout.split("->")
        once = [
            size // kv_repeats if axis == KV_HEADS else size
            for axis, size in zip(self.axes[self.has_experts :], self.shape[self.has_experts :], strict=True)
        ]
        sizes = dict(zip(ours.split(), once, strict=True))
        groups = re.findall(r"\(([^)]*)\)|(\S+)", theirs)
        return tuple(prod(sizes[axis] for axis in (group or single).split()) for group, single in groups)


def declared(state: nnx.State) -> dict[str, Declared]:
    """Return each parameter of a module by path; those of a merged array one by one."""
    found: dict[str, Declared] = {}
    for names, variable in nnx.to_flat_state(state):
        path, metadata = ".".join(map(str, names)), variable.get_metadata()
        shape, axes, num_inputs = tuple(variable.shape), tuple(metadata["out_sharding"]), metadata["num_inputs"]
        if "parts" not in metadata:
            found[path] = Declared(shape, variable.dtype, axes, None, num_inputs, metadata["rotates"])
            continue
        start, num_shards, lead = 0, metadata["num_shards"], sum(axis in LEAD_AXES for axis in axes)
        for part in metadata["parts"]:
            segment = Segment(path, num_shards, start)
            own_shape = (*shape[:lead], part.size, *shape[lead + 2 :])
            own_axes = (*axes[:lead], part.axis, *axes[lead + 2 :])
            owner = path.rpartition(".")[0]
            found[f"{owner}.{part.name}"] = Declared(
                own_shape, variable.dtype, own_axes, segment, num_inputs, part.rotates
            )
            start += part.size // num_shards
    return found


class Reading(NamedTuple):
    """How the parameters of a module are read, besides their names."""

    quantizes: bool
    kv_repeats: int = 1
    head_order: tuple[int, ...] | None = None


def make_spec(
    path: str, params: Mapping[str, Declared], names: Mapping[str, TensorName], source: str, reading: Reading
) -> ParamSpec:
    """Return the spec of one parameter of a module, whose tensors are called `source`, with `{e}` for the expert."""
    param, tensor = params[path], names[path]
    hf_shape, hf_index = param.hf_shape(tensor.layout, reading.kv_repeats), ()
    if tensor.fused:
        hf_shape, hf_index = _taken_of_fused(path, params, names, reading.kv_repeats)
    num_experts = param.shape[0] if param.has_experts else 1
    of_experts = "{e}" in source
    return ParamSpec(
        shape=param.shape,
        dtype=param.dtype,
        axes=param.axes,
        sources=tuple(source.format(e=expert) for expert in range(num_experts if of_experts else 1)),
        layout=tensor.layout,
        hf_shape=(num_experts, *hf_shape) if param.has_experts and not of_experts else hf_shape,
        hf_index=hf_index,
        repeats=reading.kv_repeats if KV_HEADS in param.axes else 1,
        head_order=reading.head_order if param.rotates else None,
        segment=param.segment,
        num_inputs=param.num_inputs,
        is_quantized=reading.quantizes and param.num_inputs > 0,
    )


def _taken_of_fused(
    path: str, params: Mapping[str, Declared], names: Mapping[str, TensorName], kv_repeats: int
) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """Return the shape of a tensor that holds several parameters, and the part of it that is this one."""
    owner, _, name = path.rpartition(".")
    fused = names[path].fused
    assert fused is not None
    shapes = {}
    for member in fused.members:
        other = f"{owner}.{member}"
        shapes[member] = params[other].hf_shape(names[other].layout, kv_repeats)
    sizes = {member: shape[fused.axis] for member, shape in shapes.items()}
    whole, place = sum(sizes.values()), fused.members.index(name)
    if fused.alternates:
        part = slice(place, None, len(fused.members))
    else:
        start = sum(sizes[member] for member in fused.members[:place])
        part = slice(start, start + sizes[name])
    shape = list(shapes[name])
    shape[fused.axis] = whole
    return tuple(shape), (*[slice(None)] * fused.axis, part)


def under(owner: str, spec: ParamSpec) -> ParamSpec:
    """Return the spec with its merged array's path put under `owner`."""
    return replace(spec, segment=spec.segment._replace(array=f"{owner}.{spec.segment.array}")) if spec.segment else spec


def stack(specs: Sequence[ParamSpec]) -> ParamSpec:
    """Return the spec of one parameter of several layers, stacked in order."""
    first = specs[0]
    return replace(
        first,
        shape=(len(specs), *first.shape),
        axes=("layers", *first.axes),
        sources=tuple(source for spec in specs for source in spec.sources),
    )
