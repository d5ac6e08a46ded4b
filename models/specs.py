"""The specs of a model's parameters, from its layers' declarations and the checkpoint's tensor names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels.weights import WeightFormat

from .config import LayerSpec, ModelConfig
from .family import Family
from .layers.head import PoolingHead, head_names, taken_rows
from .loop import LayerLoop
from .names import Prefixes, TensorName
from .params import (
    HEAD_DIM,
    KV_HEADS,
    LEAD_AXES,
    SHARDED,
    Cut,
    HFIndex,
    ParamSpec,
    Segment,
    cut_of,
    held_apart,
    outputs_of,
    split_axes,
)
from .plan import LayerPlan
from .quantization import METHODS, NF4
from .registry import get_family

_MAX_DRAFT_LAYERS = 4
"""The most layers after a model's own, which predict further tokens, in a checkpoint."""


class _Declared(NamedTuple):
    """A parameter as a layer declares it."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...]
    segment: Segment | None
    num_inputs: int
    rotates: bool
    num_heads: int | None = None
    """The number of heads in its first axis; None if that axis is the heads."""

    @property
    def has_experts(self) -> bool:
        """Return whether its first axis is experts."""
        return self.axes[:1] == ("experts",)

    def hf_shape(self, layout: str, kv_repeats: int) -> tuple[int, ...]:
        """Return the shape of the left side of `layout` = "(n h) d -> d n h", for one expert if there are several."""
        theirs, ours = layout.split("->")
        once = [
            size // kv_repeats if axis == KV_HEADS else size
            for axis, size in zip(self.axes[self.has_experts :], self.shape[self.has_experts :], strict=True)
        ]
        sizes = {"1": 1, **dict(zip(ours.split(), once, strict=True))}
        return tuple(prod(sizes[axis] for axis in group.strip("()").split()) for group in split_axes(theirs))


def declared(state: nnx.State) -> dict[str, _Declared]:
    """Return each parameter of a module by path; parameters of a merged array separately."""
    params: dict[str, _Declared] = {}
    for names, variable in nnx.to_flat_state(state):
        path, metadata = ".".join(map(str, names)), variable.get_metadata()
        shape, axes, num_inputs = tuple(variable.shape), tuple(metadata["out_sharding"]), metadata["num_inputs"]
        if "parts" not in metadata:
            params[path] = _Declared(shape, variable.dtype, axes, None, num_inputs, metadata["rotates"])
            continue
        start, num_shards, lead = 0, metadata["num_shards"], sum(axis in LEAD_AXES for axis in axes)
        for part in metadata["parts"]:
            segment = Segment(path, num_shards, start)
            own_shape = (*shape[:lead], part.size, *shape[lead + 2 :])
            own_axes = (*axes[:lead], part.axis, *axes[lead + 2 :])
            owner = path.rpartition(".")[0]
            params[f"{owner}.{part.name}"] = _Declared(
                own_shape, variable.dtype, own_axes, segment, num_inputs, part.rotates, part.num_heads
            )
            start += part.size // num_shards
    return params


class _Reading(NamedTuple):
    """The settings by which the parameters of a module are read, besides their names."""

    formats: Mapping[str, WeightFormat] = {}
    """The formats of the checkpoint's tensors that are held unchanged, by HF name."""
    rounded_to: WeightFormat | None = None
    """The format that all other weights are rounded to, if any."""
    is_packed: bool = False
    num_shards: int = 1
    num_expert_shards: int = 1
    kv_repeats: int = 1
    head_order: tuple[int, ...] | None = None


def _make_spec(
    path: str, params: Mapping[str, _Declared], names: Mapping[str, TensorName], source: str, reading: _Reading
) -> ParamSpec:
    """Return the spec of one parameter of a module; its tensors are named `source`, with `{e}` for the expert."""
    param, tensor = params[path], names[path]
    hf_shape, hf_index = param.hf_shape(tensor.layout, reading.kv_repeats), ()
    if tensor.fused:
        hf_shape, hf_index = _taken_of_fused(path, params, names, reading.kv_repeats)
    num_experts = param.shape[0] if param.has_experts else 1
    of_experts = "{e}" in source
    sources = tuple(source.format(e=expert) for expert in range(num_experts if of_experts else 1))
    forms = {reading.formats.get(each) for each in sources}
    rounded_to = None if reading.rounded_to == NF4 and path.endswith(".table") else reading.rounded_to
    form = (forms.pop() if len(forms) == 1 else None) or rounded_to if param.num_inputs else None
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
    return spec if form is None or _holding_refusal(spec, form, reading) else replace(spec, format=form)


def _head_order(param: _Declared, order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the order of all dimensions of a parameter's heads, where RoPE rotates the last ones or all."""
    if order is None:
        return None
    rest = param.shape[param.axes.index(HEAD_DIM)] - len(order)
    return (*range(rest), *(rest + place for place in order))


def _holding_refusal(spec: ParamSpec, form: WeightFormat, reading: _Reading) -> str | None:
    """Return the reason why a parameter cannot be held in a format and is widened at load instead; None if it can."""
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
    path: str, params: Mapping[str, _Declared], names: Mapping[str, TensorName], kv_repeats: int
) -> tuple[tuple[int, ...], HFIndex]:
    """Return the shape of a tensor that holds several parameters, and the index of this parameter in it."""
    owner, _, name = path.rpartition(".")
    fused = names[path].fused
    assert fused is not None
    shapes = {}
    for member in fused.members:
        other = f"{owner}.{member}"
        shapes[member] = params[other].hf_shape(names[other].layout, kv_repeats)
    sizes = {member: shape[fused.axis] for member, shape in shapes.items()}
    whole, index = sum(sizes.values()), fused.members.index(name)
    start, size, part = sum(sizes[member] for member in fused.members[:index]), sizes[name], ()
    if fused.alternates:
        part = slice(index, None, len(fused.members))
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
    """Return the spec with its merged array's path prefixed by `owner`."""
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


_KEYS_VALUES, _INDEXER = ("layers.attn.k", "layers.attn.v"), "layers.attn.indexer."
"""The first parts of the paths of projections that some layers have no use for."""


class _Abstract(NamedTuple):
    """A module without arrays, as `nnx.split` returns it."""

    definition: Any
    state: nnx.State


class ModelSpecs:
    """The parameters of a model: the arrays that hold them, and the checkpoint's tensors that they come from.

    `formats` has the formats of the checkpoint's tensors that are held unchanged, by HF name. The embedding and all
    other matmuls' weights except routers' are rounded when they are loaded if `quantization` is one of `METHODS`.
    `tensor_names` are the checkpoint's, if known, and decide which of a family's name prefixes it uses. `lent` are the
    specs of the parameters that a draft head shares with the model whose tokens it guesses. `family` is that of the
    config's architecture by default; a vision tower's is in the family of its wrapper. Weights have a leading layer
    axis if the loop is over stacked layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: DTypeLike,
        loop: LayerLoop = LayerLoop.SCAN,
        *,
        quantization: str | None = None,
        formats: Mapping[str, WeightFormat] | None = None,
        tensor_names: Collection[str] = (),
        lent: Mapping[str, ParamSpec] | None = None,
        family: Family | None = None,
    ) -> None:
        if quantization not in (None, *METHODS):
            raise ValueError(f"quantization={quantization!r} is not one of {', '.join(METHODS)}")
        self.config, self.dtype, self.loop, self.quantization = config, jnp.dtype(dtype), loop, quantization
        self.formats, self.lent = formats or {}, lent or {}
        self.family = family or get_family(config.architecture)
        self._tensor_names = tensor_names or self.formats
        self.frame = _abstract(partial(self.family.frame, config, self.dtype))
        self.head = _abstract(partial(PoolingHead, config, self.dtype))
        layers = {
            layer: _abstract(partial(self.family.layer, layer, config, self.dtype))
            for layer in dict.fromkeys(config.layers)
        }
        self.plan = LayerPlan(config.layers, self._marks({layer: state for layer, (_, state) in layers.items()}))
        self.kinds = [layers[kind] for kind in self.plan.kinds]
        of_encoder: dict[str, Any] = {"formats": formats, "tensor_names": tensor_names}
        self.encoders = {
            part: ModelSpecs(encoder, dtype, tower_loop(loop), family=self.family.encoders[part], **of_encoder)
            for part, encoder in config.encoders.items()
        }
        """The parameters of towers, or of an encoder, by the part that holds them. They are not rounded."""

    def borrowing(self, lent: Mapping[str, ParamSpec]) -> ModelSpecs:
        """Return the specs of a draft head to which `lent` are lent."""
        return ModelSpecs(
            self.config,
            self.dtype,
            self.loop,
            quantization=self.quantization,
            formats=self.formats,
            tensor_names=self._tensor_names,
            lent=lent,
            family=self.family,
        )

    @property
    def facts(self) -> tuple[Any, ...]:
        """Return all that the specs depend on."""
        formats, lent = sorted(self.formats.items()), sorted(self.lent.items())
        prefixes = self.family.find_prefixes(self._tensor_names)
        encoders = tuple(encoder.facts for encoder in self.encoders.values())
        return self.config, self.dtype, self.loop, self.quantization, formats, prefixes, lent, encoders

    def _marks(self, states: Mapping[LayerSpec, nnx.State]) -> tuple[tuple[WeightFormat | None, ...], ...]:
        """Return the formats of each layer's weights, by which layers are stacked; () if none has any."""
        if not self.formats:
            return ()
        prefixes = self.family.find_prefixes(self._tensor_names)
        names = self.family.find_names(self._tensor_names)
        paths = {kind: tuple(declared(state)) for kind, state in states.items()}
        return tuple(
            tuple(
                self.formats.get(self._source(f"layers.{path}", names, prefixes, layer).format(e=0))
                for path in paths[kind]
            )
            for layer, kind in enumerate(self.config.layers)
        )

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        """Return glob patterns of checkpoint tensors that this model does not use.

        Layers that borrow keys and values may have projections that nothing uses, as may layers without an indexer, and
        a model that pools has no use for an output head.
        """
        projections = tuple(
            name.format(body="*", head="*", l=number)
            for number, layer in enumerate(self.config.layers)
            for path, (name, *_) in self.family.names.items()
            if (layer.borrows_kv and path.startswith(_KEYS_VALUES))
            or (not layer.has_indexer and path.startswith(_INDEXER))
        )
        after = range(self.config.num_layers, self.config.num_layers + _MAX_DRAFT_LAYERS)
        ignored = tuple(
            dict.fromkeys(pattern.format(after=number) for pattern in self.family.ignored for number in after)
        )
        for encoder in self.encoders.values():
            ignored = tuple(pattern for pattern in ignored if not encoder.family.has_tensors_like(pattern))
            ignored += encoder.ignored_tensors
        return ignored + projections + (() if self.config.pooling is None else self.family.output_heads)

    def param_specs(self, tensor_names: Collection[str] = ()) -> dict[str, ParamSpec]:
        """Return a spec per parameter path.

        "layers.0.attn.q" is for all layers of the first kind if layers are stacked, else for the first layer.

        `tensor_names` are the checkpoint's, and decide which of a family's name prefixes it uses.
        """
        reading = _Reading(
            formats=self.formats,
            rounded_to=METHODS.get(self.quantization or ""),
            is_packed=self.loop is LayerLoop.IN_PLACE,
            num_shards=self.config.num_shards,
            num_expert_shards=self.config.num_expert_shards,
        )
        tensor_names = tensor_names or self._tensor_names
        prefixes = self.family.find_prefixes(tensor_names)
        is_tied = self.config.tie_word_embeddings and self.config.pooling is None
        names = {**self.family.find_names(tensor_names, is_tied=is_tied), **head_names(self.config.pooling)}
        in_frame = declared(self.frame.state) | {f"head.{path}": p for path, p in declared(self.head.state).items()}
        specs = {
            path: _make_spec(path, in_frame, names, self._source(path, names, prefixes), reading) for path in in_frame
        }
        specs |= taken_rows(self.config, specs)
        of_layers = {name.removeprefix("layers."): tensor for name, tensor in names.items()}
        of_kinds = zip(self.kinds, self.plan.kinds, self.plan.layers_of, strict=True)
        for number, ((_, state), kind, layers) in enumerate(of_kinds):
            order = None if kind.rope is None else self.config.ropes[kind.rope].head_order(kind.rope_dim)
            of_kind = reading._replace(kv_repeats=kind.kv_repeats, head_order=order)
            in_layer = declared(state)
            for path in in_layer:
                sources = {layer: self._source(f"layers.{path}", names, prefixes, layer) for layer in layers}
                singles = {
                    layer: _make_spec(path, in_layer, of_layers, source, of_kind) for layer, source in sources.items()
                }
                stacks = {number: stack(list(singles.values()))} if self.loop.stacked else singles
                specs |= {f"layers.{i}.{path}": under(f"layers.{i}", spec) for i, spec in stacks.items()}
        return held_apart({**specs, **self.lent})

    def all_param_specs(self, tensor_names: Collection[str] = ()) -> dict[str, ParamSpec]:
        """Return the specs of all parameters, those of encoders under their parts; each device has all of these."""
        specs = self.param_specs(tensor_names)
        for part, encoder in self.encoders.items():
            for path, spec in encoder.param_specs(tensor_names).items():
                axes = tuple(None if axis in SHARDED else axis for axis in spec.axes)
                specs[f"{part}.{path}"] = replace(under(part, spec), axes=axes)
        return specs

    def is_of_encoder(self, path: str) -> bool:
        """Return whether a path in `all_param_specs` is of a tower's or an encoder's parameter, which no step reads."""
        return path.partition(".")[0] in self.encoders

    def _source(self, path: str, names: Mapping[str, TensorName], prefixes: Prefixes, layer: int = 0) -> str:
        if path not in names:
            raise ValueError(f"{self.config.architecture}: no HF tensor name for parameter {path!r}")
        name = names[path].name
        head = self.config.draft_head
        number = layer // self.config.layer_parts if head is None else head.first_layer + layer
        return name.format(**prefixes._asdict(), l=number, e="{e}")


def tower_loop(loop: LayerLoop) -> LayerLoop:
    """Return how a vision tower goes through its layers beside a model that does so by `loop`.

    A tower is not one CUDA graph anyway, and of layers that are not in a loop XLA:GPU keeps what each adds to the
    stream until the last: gigabytes for a large image.
    """
    return LayerLoop.SCAN if loop is LayerLoop.UNROLL else loop


def _abstract(build: Callable[[], nnx.Module]) -> _Abstract:
    # Flax would shard at construction; there is nothing to shard yet.
    with nnx.use_eager_sharding(False):
        return _Abstract(*nnx.split(nnx.eval_shape(build)))
