"""A model as pure functions over a plain nested dict of parameters, and the specs that loading works from."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.paged_attention import AttentionBatch, KVPool, Rope

from .config import ModelConfig
from .family import Prefixes, TensorName
from .layers import Embedding, RMSNorm, soft_cap
from .loop import Heads, LayerBody, LayerLoop, LayerOf, run_layers
from .plan import LayerPlan
from .quantization import METHODS, Quantized
from .registry import get_family
from .rope import rope_table

NO_WINDOW = 2**30
KV_HEADS = "kv_heads"
"""The logical axis along which heads may be repeated."""

Params = Mapping[str, Any]


class TokenBatch(NamedTuple):
    """The tokens of a step, int32 [t] each.

    `rope_lengths_t` is max(prompt length, position + 1): the sequence length that dynamic RoPE scales by.
    """

    token_ids_t: Array
    positions_t: Array
    rope_lengths_t: Array


class Segment(NamedTuple):
    """The segment of a parameter in an array with others: it begins at row `start` in each of `num_shards` shards."""

    array: str
    num_shards: int
    start: int


@dataclass(frozen=True)
class ParamSpec:
    """One parameter, and the HF tensors it is made of (one per layer, in order, if it is stacked).

    `layout` takes one HF tensor of `hf_shape` to one layer of ours; `axes` names a logical axis per dimension.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    sources: tuple[str, ...]
    layout: str
    hf_shape: tuple[int, ...]
    repeats: int = 1
    """Each kv head of the HF tensor stands in ours so often in a row."""
    segment: Segment | None = None
    """The segment in an array with others, or None for a parameter that has an array of its own."""
    quantized_inputs: int = 0
    """The number of last axes that are summed over, if the parameter is quantized; else 0."""

    @property
    def stacked(self) -> bool:
        """Say whether the first dimension counts layers."""
        return self.axes[0] == "layers"

    @property
    def rows(self) -> int:
        """Return the rows of each shard, if the parameter is in an array with others."""
        return self.shape[self.stacked] // (self.segment.num_shards if self.segment else 1)


@dataclass(frozen=True)
class ArraySpec:
    """An array that the model takes, and the parameters it holds."""

    shape: tuple[int, ...]
    dtype: Any
    """The dtype that it is loaded in."""
    axes: tuple[str | None, ...]
    params: Mapping[str, ParamSpec]
    quantized_inputs: int = 0


def stored[Spec: (ParamSpec, ArraySpec)](spec: Spec) -> Spec | Quantized:
    """Return what is stored for a spec: itself, or the specs of the integers and of the scales."""
    if not (count := spec.quantized_inputs):
        return spec
    values = replace(spec, dtype=jnp.dtype(jnp.int8), quantized_inputs=0)
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
        lead = int(first.stacked)
        rows = sum(spec.rows for spec in params.values())
        shape = (*shape[:lead], first.segment.num_shards, rows, *shape[lead + 1 :])
        axes = (*axes[:lead], "shards", "rows", *axes[lead + 1 :])
    return ArraySpec(shape, first.dtype, axes, params, first.quantized_inputs)


class Frame(nnx.Module):
    """The parts around the layers: embedding, last norm, output head."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        self.embed = Embedding(cfg, dtype)
        self.final_norm = RMSNorm(cfg.hidden_size, "embed", cfg, dtype)
        self.tied = cfg.tie_word_embeddings
        if not cfg.tie_word_embeddings:
            self.lm_head = Embedding(cfg, dtype)

    def logits(self, hidden_sd: Array) -> Array:
        """Return float32 logits [s, v]."""
        return (self.embed if self.tied else self.lm_head).logits(hidden_sd)


class Model:
    """The functions of one model; it holds no arrays. The loop says whether weights have a leading layer axis.

    `quantization` is None or one of `METHODS`, for all weights that are multiplied with, and the embedding.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: DTypeLike,
        loop: LayerLoop = LayerLoop.SCAN,
        *,
        quantization: str | None = None,
    ) -> None:
        if quantization not in (None, *METHODS):
            raise ValueError(f"quantization={quantization!r} is not one of {', '.join(METHODS)}")
        self.config, self.dtype, self.loop, self.quantization = config, jnp.dtype(dtype), loop, quantization
        self.family = get_family(config.architecture)
        self._frame_def, self._frame_state = _abstract(partial(Frame, config, self.dtype))
        self.plan = LayerPlan(config.layers)
        self._kinds = [_abstract(partial(self.family.layer, kind, config, self.dtype)) for kind in self.plan.kinds]

    @property
    def weight_dtype(self) -> Any:
        """Return the dtype of the weights that are multiplied with."""
        return self.dtype if self.quantization is None else jnp.dtype(jnp.int8)

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        """Return glob patterns of checkpoint tensors that this model knowingly leaves out."""
        return self.family.ignored + (("*lm_head.weight",) if self.config.tie_word_embeddings else ())

    def param_specs(self, tensor_names: Collection[str] = ()) -> dict[str, ParamSpec]:
        """Return a spec per parameter path: "layers.0.attn.q" is that of all layers of the first kind, if they are
        stacked, and else that of the first layer.

        `tensor_names` are the checkpoint's; they settle which of a family's name prefixes it uses.
        """
        prefixes, quantizes = self.family.find_prefixes(tensor_names), self.quantization is not None
        specs = {
            path: _spec(param, *self._source(path, prefixes, None), kv_repeats=1, quantizes=quantizes)
            for path, param in _params(self._frame_state)
        }
        of_kinds = zip(self._kinds, self.plan.kinds, self.plan.layers_of, strict=True)
        for number, ((_, state), kind, layers) in enumerate(of_kinds):
            spec_of = partial(_spec, kv_repeats=kind.kv_repeats, quantizes=quantizes)
            for path, param in _params(state):
                singles = {layer: spec_of(param, *self._source(f"layers.{path}", prefixes, layer)) for layer in layers}
                stacks = {number: _stack(list(singles.values()))} if self.loop.stacked else singles
                specs |= {f"layers.{i}.{path}": _within(f"layers.{i}", spec) for i, spec in stacks.items()}
        return specs

    def forward(
        self,
        params: Params,
        kv_pools: tuple[KVPool, ...],
        tokens: TokenBatch,
        batches: Sequence[AttentionBatch],
        *,
        attention: Sequence[Callable[..., tuple[Array, KVPool]]],
    ) -> tuple[Array, tuple[KVPool, ...]]:
        """Run the step's tokens through all layers; return normed hidden states [t, d] and the pools.

        Pools, batches and `attention`, which is called as a `PagedAttention` is, are those of the plan's cache groups.
        """
        cfg = self.config
        frame = nnx.merge(self._frame_def, {name: value for name, value in params.items() if name != "layers"})
        where = tokens.positions_t, tokens.rope_lengths_t
        ropes = {
            (spec.rope, spec.head_dim): Rope(*rope_table(cfg.ropes[spec.rope], spec.head_dim, *where))
            for spec in self.plan.kinds
            if spec.rope is not None
        }

        def body(kind: int) -> LayerBody:
            spec, (group, places) = self.plan.kinds[kind], self.plan.cache_layers(kind)
            num_layers = len(list(self.plan.groups.values())[group])

            def layer(weights: Params) -> Any:
                return nnx.merge(self._kinds[kind][0], dict(weights))

            # Profiles tell the parts of a step by these names.
            @jax.named_scope("attend")
            def attend(
                heads: Heads, kv_pools: tuple[KVPool, ...], place: Array | int
            ) -> tuple[Array, tuple[KVPool, ...]]:
                attended_tnh, kv_pool = attention[group](
                    *heads,
                    kv_pools[group],
                    batches[group],
                    layer=_pick(places, place),
                    num_layers=num_layers,
                    window=NO_WINDOW if spec.window is None else spec.window,
                    scale=spec.scale,
                    rope=None if spec.rope is None else ropes[spec.rope, spec.head_dim],
                    soft_cap=spec.soft_cap,
                )
                return attended_tnh, (*kv_pools[:group], kv_pool, *kv_pools[group + 1 :])

            return LayerBody(
                jax.named_scope("project")(lambda weights, x_td: layer(weights).project(x_td)),
                attend,
                jax.named_scope("finish")(lambda weights, x_td, attended: layer(weights).finish(x_td, attended)),
            )

        x_td, kv_pools = run_layers(
            self.loop,
            self.plan,
            params["layers"],
            [body(kind) for kind in range(len(self.plan.kinds))],
            (frame.embed.embed(tokens.token_ids_t, cfg.embed_scale), kv_pools),
            jnp.max(batches[0].query_ends_s),
        )
        return frame.final_norm(x_td), kv_pools

    @jax.named_scope("logits")
    def logits(self, params: Params, hidden_sd: Array, num_rows: Array | int) -> Array:
        """Return float32 logits [s, v] of hidden states from `forward`, the final soft cap applied.

        Rows from `num_rows` on are padding.
        """
        weights = {name: value for name, value in params.items() if name != "layers"}
        if self.loop is LayerLoop.IN_PLACE:
            weights = jax.tree.map(lambda array: LayerOf(array[None], 0, num_rows), weights)
        frame = nnx.merge(self._frame_def, weights)
        return soft_cap(frame.logits(hidden_sd), self.config.final_soft_cap)

    def _source(self, path: str, prefixes: Prefixes, layer: int | None) -> tuple[str, str]:
        if path not in self.family.names:
            raise ValueError(f"{self.config.architecture}: no HF tensor name for parameter {path!r}")
        source: TensorName = self.family.names[path]
        return source.name.format(body=prefixes.body, head=prefixes.head, l=layer), source.layout


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


def _abstract(build: Callable[[], nnx.Module]) -> tuple[Any, nnx.State]:
    # Flax would shard at construction; there is nothing to shard yet.
    with nnx.use_eager_sharding(False):
        return nnx.split(nnx.eval_shape(build))


class _Param(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...]
    segment: Segment | None
    num_inputs: int


def _params(state: nnx.State) -> Iterator[tuple[str, _Param]]:
    """Yield each parameter by path, and those of an array that holds several one by one."""
    for names, variable in nnx.to_flat_state(state):
        path, metadata = ".".join(map(str, names)), variable.get_metadata()
        shape, axes, num_inputs = tuple(variable.shape), tuple(metadata["out_sharding"]), metadata["num_inputs"]
        if "parts" not in metadata:
            yield path, _Param(shape, variable.dtype, axes, None, num_inputs)
            continue
        start, num_shards = 0, metadata["num_shards"]
        for part in metadata["parts"]:
            segment = Segment(path, num_shards, start)
            owner = path.rpartition(".")[0]
            own_shape, own_axes = (part.size, *shape[2:]), (part.axis, *axes[2:])
            yield f"{owner}.{part.name}", _Param(own_shape, variable.dtype, own_axes, segment, num_inputs)
            start += part.size // num_shards


def _spec(param: _Param, source: str, layout: str, kv_repeats: int, *, quantizes: bool) -> ParamSpec:
    repeats = kv_repeats if KV_HEADS in param.axes else 1
    once = tuple(
        size // repeats if axis == KV_HEADS else size for axis, size in zip(param.axes, param.shape, strict=True)
    )
    return ParamSpec(
        shape=param.shape,
        dtype=param.dtype,
        axes=param.axes,
        sources=(source,),
        layout=layout,
        hf_shape=_hf_shape(layout, once),
        repeats=repeats,
        segment=param.segment,
        quantized_inputs=param.num_inputs if quantizes else 0,
    )


def _within(owner: str, spec: ParamSpec) -> ParamSpec:
    """Return the spec with its array's path continued upwards."""
    return replace(spec, segment=spec.segment._replace(array=f"{owner}.{spec.segment.array}")) if spec.segment else spec


def _stack(specs: list[ParamSpec]) -> ParamSpec:
    first = specs[0]
    return replace(
        first,
        shape=(len(specs), *first.shape),
        axes=("layers", *first.axes),
        sources=tuple(spec.sources[0] for spec in specs),
    )


def _hf_shape(layout: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the HF tensor's shape for `layout` = "(n h) d -> d n h" and our shape."""
    theirs, ours = layout.split("->")
    sizes = dict(zip(ours.split(), shape, strict=True))
    groups = re.findall(r"\(([^)]*)\)|(\S+)", theirs)
    return tuple(prod(sizes[axis] for axis in (group or single).split()) for group, single in groups)


def _pick(numbers: Sequence[int], place: Array | int) -> Array | int:
    """Return the number at a place, which may be traced."""
    if isinstance(place, int):
        return numbers[place]
    if list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return numbers[0] + place
    return jnp.asarray(numbers, jnp.int32)[place]
