"""The specs of a model's parameters, made of what its layers declare and what the checkpoint calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from pallas_kernels.weights import WeightFormat

from .names import TensorName
from .params import HEAD_DIM, KV_HEADS, LEAD_AXES, Cut, HFIndex, ParamSpec, Segment, cut_of, outputs_of, split_axes


class Declared(NamedTuple):
    """A parameter as a layer declares it."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...]
    segment: Segment | None
    num_inputs: int
    rotates: bool
    num_heads: int | None = None
    """How many heads its first axis has; None where they are that axis."""

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
        return tuple(prod(sizes[axis] for axis in group.strip("()").split()) for group in split_axes(theirs))


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
                own_shape, variable.dtype, own_axes, segment, num_inputs, part.rotates, part.num_heads
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
    num_expert_shards: int = 1
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
    forms = {reading.formats.get(each) for each in sources}
    form = (forms.pop() if len(forms) == 1 else None) or reading.rounded_to if param.num_inputs else None
    spec = ParamSpec(
        shape=param.shape,
        dtype=param.dtype,
        axes=param.axes,
        sources=sources,
        layout=tensor.layout,
        hf_shape=(num_experts, *hf_shape) if param.has_experts and not of_experts else hf_shape,
        hf_index=hf_index,
        repeats=reading.kv_repeats if KV_HEADS in param.axes else 1,
        head_order=_head_order(param, reading.head_order) if param.rotates else None,
        segment=param.segment,
        num_inputs=param.num_inputs,
        is_packed=reading.is_packed,
    )
    return spec if form is None or holding_refusal(spec, form, reading) else replace(spec, format=form)


def _head_order(param: Declared, order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the order of all dimensions along a parameter's heads, of which RoPE rotates the last, if not all."""
    if order is None:
        return None
    rest = param.shape[param.axes.index(HEAD_DIM)] - len(order)
    return (*range(rest), *(rest + place for place in order))


def holding_refusal(spec: ParamSpec, form: WeightFormat, reading: Reading) -> str | None:
    """Say why a parameter cannot be held in a format, so that it is widened when it is loaded; None if it can."""
    inputs, count = spec.shape[-spec.num_inputs :], spec.num_inputs
    if spec.sources[0] in reading.formats:
        outputs = outputs_of(spec)
        if outputs is None:
            return "it has only some of the inputs of the checkpoint's tensor"
        if form.is_half and split_axes(spec.layout)[0] != outputs.axes:
            return "its outputs are the columns of the checkpoint's tensor"
    num_shards = reading.num_shards // (1 if spec.num_experts is None else reading.num_expert_shards)
    is_cut = cut_of(spec.axes, spec.shape, count, num_shards) is Cut.INPUTS
    if form.is_ordered and (is_cut or spec.num_experts is not None):
        return "its inputs are in another order, and cut where a model is spread over devices"
    num_inputs = prod(inputs) // (num_shards if is_cut else 1)
    try:
        for part in form.parts:
            form.width(part, num_inputs, packed=reading.is_packed)
    except ValueError as error:
        return str(error)
    return None


def _taken_of_fused(
    path: str, params: Mapping[str, Declared], names: Mapping[str, TensorName], kv_repeats: int
) -> tuple[tuple[int, ...], HFIndex]:
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
    start, size, part = sum(sizes[member] for member in fused.members[:place]), sizes[name], ()
    if fused.alternates:
        part = slice(place, None, len(fused.members))
    elif fused.by_head:
        num_heads = params[path].num_heads or params[path].shape[0]
        part = np.arange(whole).reshape(num_heads, -1)[:, start // num_heads :][:, : size // num_heads]
        part = tuple(part.ravel().tolist())
    else:
        part = slice(start, start + size)
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
