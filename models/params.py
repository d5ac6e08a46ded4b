"""Parameters: the array that holds each one, and the checkpoint's tensors that it comes from."""

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
"""The axes of a mesh of devices; everything except experts is spread over both."""
_APART = "#"
"""The character before the number in the name of an array that `held_apart` splits off."""
PART_AXIS = "part"
"""The name in layouts of a quantized part's axis along the inputs."""


HFIndex = tuple[slice | tuple[int, ...], ...]
"""The part of an HF tensor along its first axes: a range, or single indices."""


class Segment(NamedTuple):
    """The rows of a parameter in a merged array: they begin at row `start` in each of `num_shards` shards."""

    array: str
    num_shards: int
    start: int


LEAD_AXES = ("layers", "experts")
"""The logical axes that come first, if an array has them; each index on them is read from the checkpoint separately."""


class Cut(Enum):
    """Which side of a matrix [out, in] is cut where a model is spread over devices."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"


def cut_of(axes: Sequence[str | None], shape: Sequence[int], num_inputs: int, num_shards: int) -> Cut | None:
    """Return the side of a matrix that is cut into shares for the devices; None if each device has the whole matrix.

    The last `num_inputs` of `axes` are the inputs. Their size divides, as other models are refused. `shape` has an axis
    for each name, or no lead axes and all inputs as one.
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
    """The fields and properties that `ParamSpec` and `ArraySpec` share."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    num_inputs: int
    format: WeightFormat | None
    is_packed: bool
    part: str | None

    @property
    def stacked(self) -> bool:
        """Return whether the first dimension counts layers."""
        return self.axes[:1] == ("layers",)

    @property
    def num_lead(self) -> int:
        """Return the number of leading axes, which index layers and experts."""
        return sum(axis in LEAD_AXES for axis in self.axes)

    @property
    def num_experts(self) -> int | None:
        """Return the number of experts, or None if the array has no axis of experts."""
        return dict(zip(self.axes, self.shape, strict=True)).get("experts")

    @property
    def is_rounded(self) -> bool:
        """Return whether the array is made from numbers that are rounded to its format."""
        return self.format is not None and self.part is None


@dataclass(frozen=True)
class ParamSpec(_Axes):
    """One parameter and its HF tensors: one for each layer if it is stacked, or for each expert of each layer.

    `layout` maps one HF tensor of `hf_shape`, or its part at `hf_index`, to one layer's or one expert's part of the
    parameter; `axes` names a logical axis per dimension.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    sources: tuple[str, ...]
    layout: str
    hf_shape: tuple[int, ...]
    hf_index: HFIndex = ()
    """The part of the HF tensor that is this parameter, if the tensor holds several; empty for all of it."""
    repeats: int = 1
    """The number of consecutive copies of each of the HF tensor's kv heads."""
    head_order: tuple[int, ...] | None = None
    """The HF tensor's index of each dimension of a head, if the orders differ."""
    segment: Segment | None = None
    """The segment of a merged array; None for a parameter with its own array."""
    num_inputs: int = 0
    """The number of last axes that a matmul sums over; 0 for a parameter that is added, or multiplies elementwise."""
    format: WeightFormat | None = None
    """The format in which the parameter is held; None if it is not quantized."""
    is_packed: bool = False
    """Codes of fewer than 8 bits share bytes, for the CPU's own kernels."""
    part: str | None = None
    """The name of this part of a quantized parameter, one of its format's parts; None for a whole parameter."""

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
    """Return the spec itself, or if it is quantized the specs of its parts."""
    if spec.format is None or spec.part is not None:
        return spec
    return Quantized({part: _part_of(spec, part) for part in spec.format.parts}, spec.format, spec.is_packed)


class _Outputs(NamedTuple):
    """The output axis of an HF matrix, as in the layout, and the part of it that is a parameter."""

    axes: str
    hf_index: HFIndex


def outputs_of(spec: ParamSpec) -> _Outputs | None:
    """Return the outputs of an HF matrix, transposed or not; None if a parameter does not have all of the inputs."""
    theirs, ours = spec.layout.split("->")
    axes, inputs = split_axes(theirs), ours.split()[-spec.num_inputs :]
    index = [*spec.hf_index, *[slice(None)] * (2 - len(spec.hf_index))]
    if len(axes) != 2:
        return None
    for side, other in ((0, 1), (1, 0)):
        if axes[other].strip("()").split() == inputs and index[other] == slice(None):
            return _Outputs(axes[side], (index[side],) if spec.hf_index else ())
    return None


def _part_of[Spec: (ParamSpec, ArraySpec)](spec: Spec, part: str) -> Spec:
    """Return the spec of one part of a quantized array, [*out, width]."""
    form, count = spec.format, spec.num_inputs
    assert form is not None
    width = form.width(part, prod(spec.shape[-count:]), packed=spec.is_packed)
    if part == "order":
        return _order_of(spec, width)
    changes: dict[str, Any]
    if isinstance(spec, ArraySpec):
        changes = {"params": {path: _part_of(param, part) for path, param in spec.params.items()}}
    else:
        outputs, changes = outputs_of(spec), {}
        if outputs is not None:  # otherwise its numbers are rounded, and no part is read
            ours = " ".join(spec.layout.partition("->")[2].split()[:-count])
            layout = f"{outputs.axes} {PART_AXIS} -> {ours} {PART_AXIS}"
            changes = {"layout": layout, "hf_shape": (*spec.hf_shape[:-1], width), "hf_index": outputs.hf_index}
    return replace(
        spec,
        shape=(*spec.shape[:-count], width),
        # A single number for each row stays whole where its row is cut.
        axes=(*spec.axes[:-count], spec.axes[-count] if width > 1 else None),
        dtype=form.device_dtype(part, packed=spec.is_packed),
        part=part,
        **changes,
    )


def _order_of[Spec: (ParamSpec, ArraySpec)](spec: Spec, width: int) -> Spec:
    """Return the spec of the order of a quantized array's inputs, [*lead, in], the same for all outputs."""
    changes: dict[str, Any]
    if isinstance(spec, ArraySpec):
        changes = {"params": {path: _order_of(param, width) for path, param in spec.params.items()}}
    else:
        changes = {"layout": f"{PART_AXIS} -> {PART_AXIS}", "hf_shape": (width,), "hf_index": (), "segment": None}
    lead = spec.num_lead
    shape, axes = (*spec.shape[:lead], width), (*spec.axes[:lead], None)
    return replace(spec, shape=shape, axes=axes, dtype=jnp.dtype(jnp.int32), part="order", **changes)


class Axes(NamedTuple):
    """The logical axes of a weight; the last `num_inputs` are its inputs."""

    names: tuple[str | None, ...]
    num_inputs: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Joined:
    """Arrays [num_shards, rows, ...] that act as one array with the rows of all, shard by shard."""

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
    """Return specs in which parameters of a merged array with different formats are in several arrays.

    The arrays are named "qkv#0", "qkv#1" and so on, in order; `unflatten` joins them. Experts' parameters are widened
    instead, as they are one matmul for all experts.
    """
    apart = dict(specs)
    members: dict[str, list[str]] = {}
    for path, spec in specs.items():
        if spec.segment is not None:
            members.setdefault(spec.segment.array, []).append(path)
    for array, paths in members.items():
        forms = [specs[path].format for path in paths]
        is_ordered = any(form is not None and form.is_ordered for form in forms)
        if len(set(forms)) == 1 and not is_ordered:
            continue
        # Each of them has its own order.
        runs = [[path] for path in paths] if is_ordered else _runs(paths, forms)
        for number, run in enumerate(runs):
            start, form = 0, specs[run[0]].format
            for path in run:
                spec = specs[path]
                assert spec.segment is not None
                segment = Segment(f"{array}{_APART}{number}", spec.segment.num_shards, start)
                is_apart = spec.num_experts is None
                apart[path] = replace(spec, segment=segment, format=form) if is_apart else replace(spec, format=None)
                start += spec.rows
    return apart


def _runs(paths: Sequence[str], forms: Sequence[WeightFormat | None]) -> list[list[str]]:
    """Return runs of consecutive paths with one format."""
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
    """Turn paths like "layers.attn.q" into the nested dict that `forward` takes; numbers make a tuple of layers."""
    nested: dict[str, Any] = {}
    for path, value in _joined(flat).items():
        *parents, leaf = path.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    for part in (nested, nested.get("encoder", {}), nested.get("audio", {})):
        layers = part.get("layers", {})
        if layers and all(name.isdigit() for name in layers):
            part["layers"] = tuple(layers[str(index)] for index in range(len(layers)))
    return nested


def _joined(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays, with those of one merged array as a `Joined`."""
    groups: dict[str, list[Any]] = {}
    for path, value in flat.items():
        groups.setdefault(path.partition(_APART)[0], []).append(value)
    return {path: Joined(tuple(values)) if len(values) > 1 else values[0] for path, values in groups.items()}


def split_axes(theirs: str) -> list[str]:
    """Return the dimensions of "(n h) d ", each a letter or a group of them."""
    return re.findall(r"\([^)]*\)|\S+", theirs)
