"""Parameters: the array that holds each one, and the tensors of a checkpoint that it is made of."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.linear.xla import ACTIVATIONS
from pallas_kernels.weights import WeightFormat
from pallas_kernels.weights.held import Quantized

KV_HEADS = "kv_heads"
"""The logical axis along which heads may be repeated."""
HEAD_DIM = "head_dim"
"""The logical axis of a head's dimensions, which RoPE may need in another order."""
SHARDED = ("vocab", "heads", KV_HEADS, "mlp", "channels", "shards")
"""The logical axes that are cut where a model is spread over devices, if their size divides."""
EXPERT_AXIS, MODEL_AXIS = "expert", "model"
MESH_AXES = (EXPERT_AXIS, MODEL_AXIS)
"""The axes of a mesh of devices, over both of which all is spread but experts."""
APART = "#"
"""It comes before the number of an array, in the name of one that is held apart."""
PART_AXIS = "part"
"""The axis of a part of a quantized matrix along its inputs, in layouts."""


HFIndex = tuple[slice | tuple[int, ...], ...]
"""What is taken of an HF tensor along its first axes: a range, or places one by one."""


class Segment(NamedTuple):
    """The place of a parameter in a merged array: it begins at row `start` in each of `num_shards` shards."""

    array: str
    num_shards: int
    start: int


LEAD_AXES = ("layers", "experts")
"""The logical axes that come first, if an array has them; each index on them is read from the checkpoint by itself."""


class Cut(Enum):
    """Which side of a matrix [out, in] is cut where a model is spread over devices."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"


def cut_of(axes: Sequence[str | None], shape: Sequence[int], num_inputs: int, num_shards: int) -> Cut | None:
    """Return which side of a matrix so many devices have shares of; None for a matrix that each has whole.

    The last `num_inputs` of `axes` are the inputs, whose size divides: models whose does not are refused. `shape` has
    an axis for each name, or no lead axes and all inputs as one.
    """
    if num_shards == 1:
        return None
    if axes[-num_inputs] in SHARDED:
        return Cut.INPUTS
    outputs = [axis for axis in axes[:-num_inputs] if axis not in LEAD_AXES]
    inputs = num_inputs if len(shape) >= len(axes) else 1
    sizes = shape[: len(shape) - inputs][-len(outputs) :]
    is_cut = any(axis in SHARDED and size % num_shards == 0 for axis, size in zip(outputs, sizes, strict=True))
    return Cut.OUTPUTS if is_cut else None


class _Axes:
    """What `ParamSpec` and `ArraySpec` share."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    num_inputs: int
    format: WeightFormat | None
    is_packed: bool
    part: str | None

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
    hf_index: HFIndex = ()
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


class Outputs(NamedTuple):
    """The axis of an HF matrix that is its outputs, as the layout has it, and what of it is a parameter."""

    axes: str
    hf_index: HFIndex


def outputs_of(spec: ParamSpec) -> Outputs | None:
    """Return the outputs of an HF matrix, whichever way round it is; None if a parameter has not all of the inputs."""
    theirs, ours = spec.layout.split("->")
    axes, inputs = split_axes(theirs), ours.split()[-spec.num_inputs :]
    index = [*spec.hf_index, *[slice(None)] * (2 - len(spec.hf_index))]
    if len(axes) != 2:
        return None
    for place, other in ((0, 1), (1, 0)):
        if axes[other].strip("()").split() == inputs and index[other] == slice(None):
            return Outputs(axes[place], (index[place],) if spec.hf_index else ())
    return None


def part_of[Spec: (ParamSpec, ArraySpec)](spec: Spec, part: str) -> Spec:
    """Return the spec of one of the arrays that a quantized array is held as, [*out, width]."""
    form, count = spec.format, spec.num_inputs
    assert form is not None
    width = form.width(part, prod(spec.shape[-count:]), packed=spec.is_packed)
    if part == "order":
        return _order_of(spec, width)
    own: dict[str, Any]
    if isinstance(spec, ArraySpec):
        own = {"params": {path: part_of(param, part) for path, param in spec.params.items()}}
    else:
        found, own = outputs_of(spec), {}
        if found is not None:  # else its numbers are rounded, and no part is read
            ours = " ".join(spec.layout.partition("->")[2].split()[:-count])
            layout = f"{found.axes} {PART_AXIS} -> {ours} {PART_AXIS}"
            own = {"layout": layout, "hf_shape": (*spec.hf_shape[:-1], width), "hf_index": found.hf_index}
    return replace(
        spec,
        shape=(*spec.shape[:-count], width),
        # A single number for each row stays whole where its row is cut.
        axes=(*spec.axes[:-count], spec.axes[-count] if width > 1 else None),
        dtype=form.device_dtype(part, packed=spec.is_packed),
        part=part,
        **own,
    )


def _order_of[Spec: (ParamSpec, ArraySpec)](spec: Spec, width: int) -> Spec:
    """Return the spec of the order of a quantized array's inputs, [*lead, in], the same for all outputs."""
    own: dict[str, Any]
    if isinstance(spec, ArraySpec):
        own = {"params": {path: _order_of(param, width) for path, param in spec.params.items()}}
    else:
        own = {"layout": f"{PART_AXIS} -> {PART_AXIS}", "hf_shape": (width,), "hf_index": (), "segment": None}
    lead = spec.num_lead
    shape, axes = (*spec.shape[:lead], width), (*spec.axes[:lead], None)
    return replace(spec, shape=shape, axes=axes, dtype=jnp.dtype(jnp.int32), part="order", **own)


class Axes(NamedTuple):
    """The logical axes of a weight; the last `num_inputs` are its inputs."""

    names: tuple[str | None, ...]
    num_inputs: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Joined:
    """Arrays [num_shards, rows, ...], which stand for one with all their rows, shard by shard."""

    members: tuple[Any, ...]
    can_gate: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the one array."""
        num_shards, _, *rest = self.members[0].shape
        return num_shards, sum(member.shape[1] for member in self.members), *rest

    def multiply(
        self,
        x_ti: Array,
        axes: Axes,
        *,
        plus_to: Array | None = None,
        bias_o: Array | None = None,
        activation: str | None = None,
        **options: Any,
    ) -> Array:
        """Return the product, as `weights.Weight.multiply` does."""
        t, num_shards = len(x_ti), self.shape[0]
        products = [member.multiply(x_ti, axes, **options).reshape(t, num_shards, -1) for member in self.members]
        out_to = jnp.concatenate(products, axis=2).reshape(t, -1)
        if plus_to is not None:
            out_to = plus_to + out_to
        if bias_o is not None:
            out_to = out_to + bias_o
        return out_to if activation is None else ACTIVATIONS[activation](out_to)


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
        forms = [specs[path].format for path in paths]
        is_ordered = any(form is not None and form.is_ordered for form in forms)
        if len(set(forms)) == 1 and not is_ordered:
            continue
        # Each has an order of its own.
        runs = [[path] for path in paths] if is_ordered else _runs(paths, forms)
        for number, run in enumerate(runs):
            start, form = 0, specs[run[0]].format
            for path in run:
                spec = specs[path]
                assert spec.segment is not None
                own = Segment(f"{array}{APART}{number}", spec.segment.num_shards, start)
                is_apart = spec.num_experts is None
                found[path] = replace(spec, segment=own, format=form) if is_apart else replace(spec, format=None)
                start += spec.rows
    return found


def _runs(paths: Sequence[str], forms: Sequence[WeightFormat | None]) -> list[list[str]]:
    """Return paths with one format side by side."""
    pairs = zip(paths, forms, strict=True)
    return [[path for path, _ in run] for _, run in itertools.groupby(pairs, key=lambda pair: pair[1])]


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


def split_axes(theirs: str) -> list[str]:
    """Return the dimensions of "(n h) d ", each a letter or a group of them."""
    return re.findall(r"\([^)]*\)|\S+", theirs)
