"""A model as pure functions over a plain nested dict of parameters, and the specs that loading works from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul import MatmulShape
from pallas_kernels.linear import ACTIVATIONS as FUSED_ACTIVATIONS
from pallas_kernels.linear import Linear, LinearShape
from pallas_kernels.lora import sort_rows
from pallas_kernels.paged_attention import AttentionBatch, Rope
from pallas_kernels.weights import WeightFormat

from .adapters import Adapters, AdapterShape, adapted_layers, adapter_specs
from .config import FeatureSpec, LayerSpec, ModelConfig
from .inputs import SharedInputs, TokenBatch, attention_inputs, with_row_ends
from .layers.embedding import soft_cap
from .layers.head import PoolingHead, head_names, pooled_states, taken_rows
from .layers.latent_attention import head_matmuls
from .layers.moe import matmul_shapes
from .loop import Cached, LayerBody, LayerLoop, Lent, pick, run_layers
from .names import Prefixes, TensorName
from .ops import Ops
from .params import Cut, ParamSpec, array_specs, cut_of, held_apart
from .plan import LayerPlan
from .quantization import METHODS
from .registry import get_family
from .rope import query_scale, rope_table
from .specs import Reading, declared, make_spec, stack, under
from .weights import bind

Params = Mapping[str, Any]


class Forward(NamedTuple):
    """What `Model.forward` gives."""

    hidden_td: Array
    """The hidden states, [t, d], which logits are read off: after the final norm, but in an EAGLE-3 head before it."""
    pools: tuple[Any, ...]
    features_tf: Array
    """What a draft head reads, [t, f], as `Model.features` says; `hidden_td` if that names no layers."""


class Model:
    """The functions of one model; it holds no arrays. The loop says whether weights have a leading layer axis.

    `formats` has those of the checkpoint's tensors that are held as they are, by HF name. The embedding and all other
    matmuls' weights but routers' are rounded when they are loaded if `quantization` is one of `METHODS`. `features` are
    what a draft head reads of the model. `tensor_names` are the checkpoint's, if it is known: they settle which of a
    family's name prefixes it uses.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: DTypeLike,
        loop: LayerLoop = LayerLoop.SCAN,
        *,
        quantization: str | None = None,
        formats: Mapping[str, WeightFormat] | None = None,
        ops: Ops | None = None,
        adapter_shape: AdapterShape | None = None,
        features: FeatureSpec | None = None,
        tensor_names: Collection[str] = (),
    ) -> None:
        if quantization not in (None, *METHODS):
            raise ValueError(f"quantization={quantization!r} is not one of {', '.join(METHODS)}")
        self.config, self.dtype, self.loop, self.quantization = config, jnp.dtype(dtype), loop, quantization
        self.ops = ops or Ops(Linear("cpu" if loop is LayerLoop.IN_PLACE else "xla"))
        self.adapter_shape, self.features = adapter_shape, features
        self.lent: Mapping[str, ParamSpec] = {}
        """The specs of a draft head's parameters that are those of the model whose tokens it guesses."""
        self.family = get_family(config.architecture)
        self._frame_def, self._frame_state = _abstract(partial(self.family.frame, config, self.dtype))
        self._head_def, self._head_state = _abstract(partial(PoolingHead, config, self.dtype))
        self.formats = formats or {}
        self._tensor_names = tensor_names or self.formats
        build = partial(partial, self.family.layer)
        states = {kind: _abstract(build(kind, config, self.dtype)) for kind in dict.fromkeys(config.layers)}
        self.plan = LayerPlan(config.layers, self._marks({kind: state for kind, (_, state) in states.items()}))
        self._kinds = [states[kind] for kind in self.plan.kinds]

    def _marks(self, states: Mapping[LayerSpec, nnx.State]) -> tuple[tuple[WeightFormat | None, ...], ...]:
        """Return the formats of each layer's weights, as layers that differ in them are not stacked; () if none has
        any.
        """
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
    def facts(self) -> tuple[Any, ...]:
        """Return all that the functions of the model depend on."""
        formats, lent = sorted(self.formats.items()), sorted(self.lent.items())
        own = self.config, self.dtype, self.loop, self.quantization, formats, self.ops
        prefixes = self.family.find_prefixes(self._tensor_names)
        return *own, prefixes, self.adapter_shape, self.features, lent

    @property
    def activations(self) -> tuple[tuple[str, bool], ...]:
        """Return the activations of dense layers, each with whether it is a gate's."""
        names = (declared(state) for _, state in self._kinds)
        each = zip(self.plan.kinds, names, strict=True)
        return tuple(dict.fromkeys((kind.hidden_act, "mlp.gate" in own) for kind, own in each if "mlp.up" in own))

    def linear_shapes(self) -> list[LinearShape]:
        """Return one device's matmuls, those of experts aside; sizes are those of the last axes as they are held.

        Where a model is spread over devices, those by quantized weights are the shares that `linear` multiplies by.
        """
        shapes: dict[LinearShape, None] = {}
        for path, array in array_specs(self.param_specs()).items():
            if not array.num_inputs or array.num_experts is not None:
                continue
            count = array.num_inputs
            rows, num_inputs = prod(array.shape[array.stacked : -count]), prod(array.shape[-count:])
            num_shards = self.config.num_shards if array.format else 1
            cut = cut_of(array.axes, array.shape, count, num_shards)
            rows //= num_shards if cut is Cut.OUTPUTS else 1
            num_inputs //= num_shards if cut is Cut.INPUTS else 1
            shape = LinearShape(rows, num_inputs, self.dtype, self.dtype, array.format)
            for activation, is_gated in self.activations:
                if activation in FUSED_ACTIVATIONS and path.endswith("mlp.gate_up" if is_gated else "mlp.up"):
                    shapes[shape._replace(activation=activation, is_gated=is_gated)] = None
            shapes[shape] = None
            shapes[shape._replace(out_dtype=jnp.dtype(jnp.float32))] = None
        return list(shapes)

    def grouped_shapes(self) -> list[MatmulShape]:
        """Return one device's matmuls by the weights of experts."""
        if not any(kind.moe for kind in self.plan.kinds):
            return []
        arrays = array_specs(self.param_specs())
        shapes: dict[MatmulShape, None] = {}
        for number, (kind, layers) in enumerate(zip(self.plan.kinds, self.plan.layers_of, strict=True)):
            if kind.moe is not None:
                place = number if self.loop.stacked else layers[0]
                own = {path: array for path, array in arrays.items() if path.startswith(f"layers.{place}.")}
                gate_up, down = (
                    next(array for path, array in own.items() if path.endswith(f"experts.{name}"))
                    for name in ("gate_up", "down")
                )
                formats = gate_up.format, down.format
                shapes |= dict.fromkeys(matmul_shapes(kind, self.config, self.dtype, formats))
        return list(shapes)

    def head_shapes(self) -> list[MatmulShape]:
        """Return one device's matmuls by weights that each head has its own of."""
        found = (head_matmuls(kind, self.config, self.dtype) for kind in self.plan.kinds)
        return list(dict.fromkeys(shape for shapes in found for shape in shapes))

    def with_ops(self, ops: Ops) -> Model:
        """Return the model computing with other ops."""
        other = copy.copy(self)
        other.ops = ops
        return other

    def with_lent(self, specs: Mapping[str, ParamSpec]) -> Model:
        """Return the draft head with parameters of the model whose tokens it guesses in place of its own."""
        other = copy.copy(self)
        other.lent = specs
        return other

    @property
    def ignored_tensors(self) -> tuple[str, ...]:
        """Return glob patterns of checkpoint tensors that this model knowingly leaves out.

        Layers that borrow keys and values may have projections that nothing uses.
        """
        borrowers = [number for number, layer in enumerate(self.config.layers) if layer.borrows_kv]
        unused = [
            name
            for path, (name, *_) in self.family.names.items()
            if path.startswith(("layers.attn.k", "layers.attn.v"))
        ]
        projections = tuple(name.format(body="*", head="*", l=number) for number in borrowers for name in unused)
        ignored = tuple(pattern.format(after=self.config.num_layers) for pattern in self.family.ignored)
        return ignored + projections + (() if self.config.pooling is None else ("*lm_head.weight",))

    def param_specs(self, tensor_names: Collection[str] = ()) -> dict[str, ParamSpec]:
        """Return a spec per parameter path: "layers.0.attn.q" is that of all layers of the first kind, if they are
        stacked, and else that of the first layer.

        `tensor_names` are the checkpoint's; they settle which of a family's name prefixes it uses.
        """
        reading = Reading(
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
        in_frame = declared(self._frame_state) | {f"head.{path}": p for path, p in declared(self._head_state).items()}
        specs = {
            path: make_spec(path, in_frame, names, self._source(path, names, prefixes), reading) for path in in_frame
        }
        specs |= taken_rows(self.config, specs)
        of_layers = {name.removeprefix("layers."): tensor for name, tensor in names.items()}
        of_kinds = zip(self._kinds, self.plan.kinds, self.plan.layers_of, strict=True)
        for number, ((_, state), kind, layers) in enumerate(of_kinds):
            order = None if kind.rope is None else self.config.ropes[kind.rope].head_order(kind.rope_dim)
            of_kind = reading._replace(kv_repeats=kind.kv_repeats, head_order=order)
            in_layer = declared(state)
            for path in in_layer:
                sources = {layer: self._source(f"layers.{path}", names, prefixes, layer) for layer in layers}
                singles = {
                    layer: make_spec(path, in_layer, of_layers, source, of_kind) for layer, source in sources.items()
                }
                stacks = {number: stack(list(singles.values()))} if self.loop.stacked else singles
                specs |= {f"layers.{i}.{path}": under(f"layers.{i}", spec) for i, spec in stacks.items()}
        return held_apart({**specs, **self.lent})

    def adapter_specs(self, shape: AdapterShape | None = None) -> dict[str, Adapters]:
        """Return the specs of adapters by the path of the weight beside, for the model's slots or others, if any."""
        shape = shape or self.adapter_shape
        return {} if shape is None else adapter_specs(array_specs(self.param_specs()), shape, self.dtype)

    def forward(
        self,
        params: Params,
        kv_pools: tuple[Any, ...],
        tokens: TokenBatch,
        batches: Sequence[Any],
        *,
        attention: Sequence[Callable[..., tuple[Array, Any]]],
        features_td: Array | None = None,
    ) -> Forward:
        """Run the step's tokens through all layers. A draft head takes `features_td`, those of `read_features`, or in
        the rows of guesses its own hidden states.

        Pools, batches and `attention`, called as `PagedAttention` or `LatentAttention`, are those of the plan's cache
        groups. For groups with recurrent state they are `StatePools`, a `StateBatch`, and functions called as
        `StateOps.run`.
        """
        cfg, plan = self.config, self.plan
        num_tokens = jnp.max(batches[0].query_ends_s)
        frame = self._frame_of(params, num_tokens)
        x_td = frame.start(tokens) if features_td is None else frame.join(tokens, features_td)
        has_inputs = any(spec.input_size for spec in plan.kinds)
        inputs_ltp = frame.layer_inputs(tokens, x_td) if has_inputs else None
        where = tokens.positions_t, tokens.rope_lengths_t
        ropes = {
            (spec.rope, spec.rope_dim): Rope(*rope_table(cfg.ropes[spec.rope], spec.rope_dim, *where))
            for spec in plan.kinds
            if spec.rope is not None
        }
        query_scales = {
            each: query_scale(each, tokens.positions_t) for each in {spec.query_scaling for spec in plan.kinds}
        }
        batches = [
            batch if group.causal else with_row_ends(batch, group.window, tokens.positions_t)
            for group, batch in zip(plan.groups, batches, strict=True)
        ]
        step = SharedInputs(
            num_tokens, sort_rows(tokens.adapter_slots_t), ropes, query_scales, inputs_ltp, batches, attention
        )
        bodies = [self._body(kind, step) for kind in range(len(plan.kinds))]
        stream = x_td, Cached(kv_pools, self._nothing_lent(len(x_td)))
        layers, tapped = adapted_layers(params, self.adapter_shape), self.features.layers if self.features else ()
        (x_td, cached), taps = run_layers(self.loop, plan, layers, bodies, stream, tapped)
        hidden_td = frame.end(x_td)
        return Forward(hidden_td, cached.pools, hidden_td if taps is None else jnp.concatenate(taps, axis=-1))

    @jax.named_scope("features")
    def read_features(self, params: Params, features_tf: Array, num_rows: Array | int) -> Array:
        """Return what a draft head makes of the other model's features of tokens, [t, d]."""
        return self._frame_of(params, num_rows).read_features(features_tf)

    def _body(self, kind: int, step: SharedInputs) -> LayerBody:
        """Return the computation of a kind's layers in a step."""
        plan = self.plan
        spec = plan.kinds[kind]
        group, places = plan.cache_layers(kind) if spec.has_mixer else (0, ())
        num_layers = plan.depth(list(plan.groups)[group])

        def layer(weights: Params) -> Any:
            return nnx.merge(self._kinds[kind][0], bind(dict(weights), step.num_tokens, self.ops, step.adapter_rows))

        # Profiles tell the parts of a step by these names.
        @jax.named_scope("attend")
        def attend(heads: Any, cached: Cached, place: Array | int) -> tuple[Array | None, Cached]:
            if not spec.has_mixer:
                return None, cached
            pools, lent = cached
            where = {"layer": pick(places, place), "num_layers": num_layers}
            if spec.state is not None:
                layer_of = {"spec": spec, "cfg": self.config, **where}
                out, pool = step.attention[group](heads, pools[group], step.batches[group], **layer_of)
                return out, Cached((*pools[:group], pool, *pools[group + 1 :]), lent)
            # Borrowed keys and values are in the cache already; writing them again changes nothing.
            keys_values: Any = lent[group] if spec.borrows_kv else None if spec.latent else (heads.k_tkh, heads.v_tkh)
            own, settings = attention_inputs(heads, keys_values, spec, step)
            attended_tnh, pool = step.attention[group](
                *own,
                pools[group],
                step.batches[group],
                scale=spec.scale,
                **where,
                **settings,
            )
            if spec.output_gate:
                attended_tnh = attended_tnh * jax.nn.sigmoid(heads.gate_tnh.astype(jnp.float32)).astype(self.dtype)
            lent = {each: keys_values if each == group else held for each, held in lent.items()}
            return attended_tnh, Cached((*pools[:group], pool, *pools[group + 1 :]), lent)

        @jax.named_scope("finish")
        def finish(weights: Params, x_td: Array, attended_tnh: Array, place: Array | int) -> Array:
            own = [] if step.inputs_ltp is None else [step.inputs_ltp[pick(plan.layers_of[kind], place)]]
            return layer(weights).finish(x_td, attended_tnh, *own)

        return LayerBody(jax.named_scope("project")(lambda weights, x_td: layer(weights).project(x_td)), attend, finish)

    @jax.named_scope("logits")
    def logits(self, params: Params, hidden_sd: Array, num_rows: Array | int) -> Array:
        """Return float32 logits [s, v] of hidden states from `forward`, the final soft cap applied.

        Rows from `num_rows` on are padding.
        """
        logits_sv, divisor = self._frame_of(params, num_rows).logits(hidden_sd), self.config.logits_divisor
        return soft_cap(logits_sv if divisor == 1.0 else logits_sv / divisor, self.config.final_soft_cap)

    @jax.named_scope("pool")
    def pool(self, params: Params, hidden_td: Array, batch: AttentionBatch) -> Array:
        """Return the float32 outputs [s, o] of the sequences of a step, whose hidden states are those from `forward`.

        A chunk that does not hold what stands for its sequence (`Pooling.kind`) gives a row of no use, and the mean is
        that of the step's tokens.
        """
        assert self.config.pooling is not None
        return self._head(params, len(batch.query_ends_s))(pooled_states(hidden_td, batch, self.config.pooling.kind))

    @jax.named_scope("pool")
    def pool_tokens(self, params: Params, hidden_td: Array) -> Array:
        """Return the float32 outputs [t, o] of all tokens of a step."""
        return self._head(params, len(hidden_td))(hidden_td)

    def _head(self, params: Params, num_rows: int) -> PoolingHead:
        return nnx.merge(self._head_def, bind(params.get("head", {}), num_rows, self.ops))

    def _frame_of(self, params: Params, num_rows: Array | int) -> Any:
        """Return the frame for a call whose rows from `num_rows` on are padding."""
        weights = {name: value for name, value in params.items() if name not in ("layers", "head", "adapters")}
        return nnx.merge(self._frame_def, bind(weights, num_rows, self.ops))

    def _nothing_lent(self, num_tokens: int) -> Lent:
        """Return zeros in place of keys and values to borrow, which no layer has computed yet."""
        lent: Lent = {}
        for number, group in enumerate(self.plan.groups):
            if group in self.plan.lending_groups:
                zeros = jnp.zeros((num_tokens, group.num_kv_heads, group.head_dim), self.dtype)
                lent[number] = zeros, zeros
        return lent

    def _source(self, path: str, names: Mapping[str, TensorName], prefixes: Prefixes, layer: int = 0) -> str:
        if path not in names:
            raise ValueError(f"{self.config.architecture}: no HF tensor name for parameter {path!r}")
        name = names[path].name
        head = self.config.draft_head
        number = layer if head is None else head.first_layer + layer
        return name.format(**prefixes._asdict(), l=number, e="{e}")


def _abstract(build: Callable[[], nnx.Module]) -> tuple[Any, nnx.State]:
    # Flax would shard at construction; there is nothing to shard yet.
    with nnx.use_eager_sharding(False):
        return nnx.split(nnx.eval_shape(build))
