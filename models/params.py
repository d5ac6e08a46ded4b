"""Parameters: the array that holds each one, and the tensors of a checkpoint that it is made of."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from flax import nnx

from pallas_kernels.weights import WeightFormat, num_bytes
from pallas_kernels.weights.held import Quantized

from .family import TensorName
from .joined import Joined

KV_HEADS = "kv_heads"
"""The logical axis along which heads may be repeated."""
HEAD_DIM = "head_dim"
"""The logical axis of a head's dimensions, which RoPE may need in another order."""


SHARDED_INPUTS = ("heads", "mlp")
"""The logical axes of inputs that are cut where a model is spread over devices."""
APART = "#"
"""It comes before the number of an array, in the name of one that is held apart."""
PART_AXIS = "part"
"""The axis of a part of a quantized matrix along its inputs, in layouts."""


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
    format: WeightFormat | None
    is_packed: bool
    part: str | None
    dtype: Any

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
    def is_rounded(self) -> bool:
        """Say whether the array's numbers are given, to be rounded to its format."""
        return self.format is not None and self.part is None

    @property
    def num_bytes(self) -> int:
        """Return the bytes that a device holds all of it in."""
        return num_bytes(prod(self.shape), self.dtype)


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
    format: WeightFormat | None = None
    """The format in which the parameter is held; None for its numbers themselves."""
    is_packed: bool = False
    """Codes of fewer than 8 bits share bytes, for the CPU's own kernels."""
    part: str | None = None
    """The part of a quantized parameter that this is, of those of its format."""

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
    format: WeightFormat | None = None
    is_packed: bool = False
    part: str | None = None


def stored[Spec: (ParamSpec, ArraySpec)](spec: Spec) -> Spec | Quantized:
    """Return what is stored for a spec: itself, or if it is quantized the specs of its parts."""
    if spec.format is None or spec.part is not None:
        return spec
    return Quantized({part: part_of(spec, part) for part in spec.format.parts}, spec.format, spec.is_packed)


def part_of[Spec: (ParamSpec, ArraySpec)](spec: Spec, part: str) -> Spec:
    """Return the spec of one of the arrays that a quantized array is held as, [*out, width]."""
    form, count = spec.format, spec.num_inputs
    assert form is not None
    width = form.width(part, prod(spec.shape[-count:]), packed=spec.is_packed)
    own: dict[str, Any]
    if isinstance(spec, ArraySpec):
        own = {"params": {path: part_of(param, part) for path, param in spec.params.items()}}
    else:
        theirs, ours = spec.layout.split("->")
        outputs = " ".join(ours.split()[:-count])
        own = {
            "layout": f"{_split_axes(theirs)[0]} {PART_AXIS} -> {outputs} {PART_AXIS}",
            "hf_shape": (*spec.hf_shape[:-1], width),
        }
    return replace(
        spec,
        shape=(*spec.shape[:-count], width),
        # A single number for each row stays whole where its row is cut.
        axes=(*spec.axes[:-count], spec.axes[-count] if width > 1 else None),
        dtype=form.dtype(part, packed=spec.is_packed),
        part=part,
        **own,
    )


def held_apart(specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Return specs with parameters of a merged array in several arrays, if they are held in different formats.

    The arrays are named "qkv#0", "qkv#1" and so on, in order; `unflatten` joins them. Experts' parameters are widened
    instead, as they are one matmul for all experts.
    """
    found = dict(specs)
    members: dict[str, list[str]] = {}
    for path, spec in specs.items():
        if spec.segment is not None:
            members.setdefault(spec.segment.array, []).append(path)
    for array, paths in members.items():
        if len({specs[path].format for path in paths}) == 1:
            continue
        for number, (form, run) in enumerate(itertools.groupby(paths, key=lambda path: specs[path].format)):
            start = 0
            for path in run:
                spec = specs[path]
                assert spec.segment is not None
                own = Segment(f"{array}{APART}{number}", spec.segment.num_shards, start)
                is_apart = spec.num_experts is None
                found[path] = replace(spec, segment=own, format=form) if is_apart else replace(spec, format=None)
                start += spec.rows
    return found


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
    return ArraySpec(shape, first.dtype, axes, params, first.num_inputs, first.format, first.is_packed)


def unflatten[T](flat: Mapping[str, T]) -> dict[str, Any]:
    """Turn "layers.attn.q"-style paths into the nested dict that `forward` takes; numbers make a tuple of layers."""
    nested: dict[str, Any] = {}
    for path, value in _joined(flat).items():
        *parents, leaf = path.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    layers = nested.get("layers", {})
    if layers and all(name.isdigit() for name in layers):
        nested["layers"] = tuple(layers[str(index)] for index in range(len(layers)))
    return nested


def _joined(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays with those that are held apart as one."""
    groups: dict[str, list[Any]] = {}
    for path, value in flat.items():
        groups.setdefault(path.partition(APART)[0], []).append(value)
    return {path: Joined(tuple(values)) if len(values) > 1 else values[0] for path, values in groups.items()}


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
        return tuple(prod(sizes[axis] for axis in group.strip("()").split()) for group in _split_axes(theirs))


def _split_axes(theirs: str) -> list[str]:
    """Return the dimensions of "(n h) d ", each a letter or a group of them."""
    return re.findall(r"\([^)]*\)|\S+", theirs)


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

    formats: Mapping[str, WeightFormat] = {}
    """The formats of the checkpoint's tensors that are to be held as they are."""
    rounded_to: WeightFormat | None = None
    """The format that all other weights are rounded to, if any."""
    is_packed: bool = False
    num_shards: int = 1
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
    sources = tuple(source.format(e=expert) for expert in range(num_experts if of_experts else 1))
    form = (reading.formats.get(sources[0]) or reading.rounded_to) if param.num_inputs else None
    spec = ParamSpec(
        shape=param.shape,
        dtype=param.dtype,
        axes=param.axes,
        sources=sources,
        layout=tensor.layout,
        hf_shape=(num_experts, *hf_shape) if param.has_experts and not of_experts else hf_shape,
        hf_index=hf_index,
        repeats=reading.kv_repeats if KV_HEADS in param.axes else 1,
        head_order=reading.head_order if param.rotates else None,
        segment=param.segment,
        num_inputs=param.num_inputs,
        is_packed=reading.is_packed,
    )
    return spec if form is None or holding_refusal(spec, form, reading) else replace(spec, format=form)


def holding_refusal(spec: ParamSpec, form: WeightFormat, reading: Reading) -> str | None:
    """Say why a parameter cannot be held in a format, so that it is widened when it is loaded; None if it can."""
    inputs, count = spec.shape[-spec.num_inputs :], spec.num_inputs
    if form.group is not None and spec.num_experts is not None:
        return "experts' weights are held in formats with a scale for each output alone"
    if spec.sources[0] in reading.formats:
        theirs, ours = spec.layout.split("->")
        if len(_split_axes(theirs)) != 2 or _split_axes(theirs)[1].strip("()").split() != ours.split()[-count:]:
            return "its inputs do not come last in the checkpoint"
        if any(part != slice(None) for part in spec.hf_index[1:]):
            return "it has only some of the inputs of the checkpoint's tensor"
    is_cut = spec.axes[-count] in SHARDED_INPUTS
    num_inputs = prod(inputs) // (reading.num_shards if is_cut else 1)
    try:
        for part in form.parts:
            form.width(part, num_inputs, packed=reading.is_packed)
    except ValueError as error:
        return str(error)
    return None


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
