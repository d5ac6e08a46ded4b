"""A model as pure functions over a plain nested dict of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from pallas_kernels.chosen import num_words
from pallas_kernels.linear import Linear
from pallas_kernels.lora import sort_rows
from pallas_kernels.paged_attention import AttentionBatch

from .adapters import Adapters, AdapterShape, adapted_layers, adapter_specs, embedding_specs, embedding_terms
from .config import FeatureSpec, LayerSpec
from .family import EMBEDDING
from .inputs import (
    Distances,
    MediaTokens,
    SharedInputs,
    Steering,
    TokenBatch,
    attention_inputs,
    distances_of,
    embed_media,
    last_positions,
    position_tables,
    with_blind_rows,
    with_ends,
)
from .layers.embedding import soft_cap
from .layers.head import PoolingHead, pooled_states
from .loop import Beside, Cached, IndexerHeads, LayerBody, LayerLoop, Lent, RelativeHeads, pick, run_layers
from .params import array_specs
from .plan import indexer_group_of, state_group_of
from .specs import ModelSpecs
from .towers.tower import Tower
from .towers.whisper import ClipEncoder
from .weights import Ops, bind

_Params = Mapping[str, Any]
_OTHER_PARTS = ("layers", "head", "adapters", "media", "encoder", "audio", "steering")
"""The parts of a model's parameters besides those of its frame."""


class _Forward(NamedTuple):
    """The result of `Model.forward`."""

    hidden_td: Array
    """The hidden states, [t, d], from which logits are computed: normed, except in an EAGLE-3 head."""
    pools: tuple[Any, ...]
    features_tf: Array
    """The features that a draft head reads, [t, f], from the layers in `Model.features`, or `hidden_td`."""


class Model:
    """The functions of one model; it holds no arrays. `features` are what a draft head reads, or steps return.

    `towers` encode images, videos and sounds, by the part of the parameters that holds theirs, and `encoder` the clips
    of an encoder-decoder.
    """

    def __init__(
        self,
        specs: ModelSpecs,
        *,
        ops: Ops | None = None,
        adapter_shape: AdapterShape | None = None,
        features: FeatureSpec | None = None,
        towers: Mapping[str, Tower] = MappingProxyType({}),
        encoder: ClipEncoder | None = None,
    ) -> None:
        self.specs, self.config, self.dtype, self.plan = specs, specs.config, specs.dtype, specs.plan
        self.ops = ops or Ops(Linear("cpu" if specs.loop is LayerLoop.IN_PLACE else "xla"))
        self.adapter_shape, self.features, self.towers, self.encoder = adapter_shape, features, towers, encoder

    @property
    def facts(self) -> tuple[Any, ...]:
        """Return all that the functions of the model depend on."""
        encoders = [fact for encoder in self.encoders for fact in encoder.facts]
        return *self.specs.facts, self.ops, self.adapter_shape, self.features, *encoders

    def find_tower(self, modality: str) -> tuple[str, Tower] | None:
        """Return the tower of "image", "video" or "audio", after the part of the parameters that holds its; or None."""
        hears = modality == "audio"
        towers = self.towers.items()
        return next(((part, tower) for part, tower in towers if (tower.settings.sound is not None) == hears), None)

    @property
    def returns_features(self) -> bool:
        """Return whether steps return features."""
        return self.features is not None and self.features.is_returned

    @property
    def encoders(self) -> list[Tower | ClipEncoder]:
        """Return all towers, and the encoder of an encoder-decoder."""
        return [*self.towers.values(), *([] if self.encoder is None else [self.encoder])]

    def adapter_specs(self, shape: AdapterShape | None = None) -> dict[str, Adapters]:
        """Return the specs of adapters by the path of the weight that they adapt, for the model's slots or `shape`."""
        shape = shape or self.adapter_shape
        if shape is None:
            return {}
        arrays = array_specs(self.specs.param_specs())
        if self.plan.kinds[0].relative is not None:
            # The queries and keys of distances come from the same weights, and all sequences share them.
            arrays = {path: array for path, array in arrays.items() if not path.endswith("attn.qkv")}
        specs = adapter_specs(arrays, shape, self.dtype)
        if self.config.task_adapters is not None:
            specs[EMBEDDING] = embedding_specs(self.config, shape, self.dtype)
        return specs

    def forward(
        self,
        params: _Params,
        kv_pools: tuple[Any, ...],
        tokens: TokenBatch,
        batches: Sequence[Any],
        *,
        attention: Sequence[Callable[..., tuple[Array, Any]]],
        features_td: Array | None = None,
        media: MediaTokens | None = None,
        steering: Steering | None = None,
    ) -> _Forward:
        """Run the step's tokens through all layers.

        `media`, in a model with towers, says which tokens take rows of the feature cache, `params["media"]`.
        `steering` has vectors that are added to the stream after each layer.

        A draft head takes `features_td`: in each row the result of `read_features`, or, if the row's token is a guess,
        the head's own hidden state.
        Pools, batches and `attention`, called as `PagedAttention` or `LatentAttention`, are those of the plan's cache
        groups. For groups with recurrent state they are `StatePools`, a `StateBatch`, and functions called as
        `StateOps.run`.
        """
        cfg, plan = self.config, self.plan
        num_tokens = jnp.max(batches[0].query_ends_s)
        frame = self._frame_of(params, num_tokens)
        if features_td is not None:
            x_td = frame.join(tokens, features_td)
        elif cfg.task_adapters is None or self.adapter_shape is None:
            x_td = frame.start(tokens)
        else:
            slots_t, shape = tokens.adapter_slots_t, self.adapter_shape
            x_td = frame.start(tokens, embedding_terms(params["adapters"], shape, tokens.token_ids_t, slots_t))
        slices_ktd = None
        if media is not None:
            x_td, slices_ktd = embed_media(x_td, params["media"], media.media_rows_t)
            ids_t = jnp.where(media.media_rows_t < 0, tokens.token_ids_t, cfg.media_token_id)
            tokens = tokens._replace(token_ids_t=ids_t)
        has_inputs = any(spec.input_size for spec in plan.kinds)
        inputs_ltp = frame.layer_inputs(tokens, x_td) if has_inputs else None
        exponents_h = frame.rope_exponents[...] if any(rope.learned for rope in cfg.ropes) else None
        tables = position_tables(cfg, plan.kinds, tokens, media, exponents_h)
        filler_id = None if cfg.pooling is None else cfg.pooling.filler_id
        batches = with_ends(plan, batches, tokens, media, filler_id)
        if filler_id is not None:
            batches, attention = with_blind_rows(plan, batches, attention, tokens.positions_t)
        rows, far = sort_rows(tokens.adapter_slots_t), self._distances(params, batches)
        step = SharedInputs(num_tokens, rows, tables, inputs_ltp, batches, attention, slices_ktd, steering, far)
        bodies = [self._body(kind, step) for kind in range(len(plan.kinds))]
        stream = (
            x_td,
            Cached(kv_pools, self._nothing_lent(len(x_td)), self._nothing_chosen(len(x_td), kv_pools, batches)),
        )
        layers, tapped = adapted_layers(params, self.adapter_shape), self.features.layers if self.features else ()
        (x_td, cached), taps = run_layers(self.specs.loop, plan, layers, bodies, stream, tapped)
        hidden_td = frame.end(x_td)
        return _Forward(hidden_td, cached.pools, hidden_td if taps is None else jnp.concatenate(taps, axis=-1))

    def write_frames(
        self,
        params: _Params,
        kv_pools: tuple[Any, ...],
        frames_fd: Array,
        batch: AttentionBatch,
        *,
        attention: Sequence[Callable[..., tuple[Array, Any]]],
    ) -> tuple[Any, ...]:
        """Return the pools with the keys and values that cross-attention reads of an encoder's frames.

        `batch` has the frames as one sequence's chunk, at the slots that they take; `attention` is as in `forward`.
        """
        plan, num_frames = self.plan, jnp.max(batch.query_ends_s)
        rows = sort_rows(jnp.zeros(len(frames_fd), jnp.int32))

        def body(kind: int) -> LayerBody:
            spec = plan.kinds[kind]

            def project(weights: _Params, x_fd: Array) -> tuple[Array, Array] | None:
                if not spec.is_cross:
                    return None
                bound = bind(dict(weights), num_frames, self.ops, rows)
                return nnx.merge(self.specs.kinds[kind].definition, bound).keys_values(x_fd)

            def attend(keys_values: Any, cached: Cached, index: Array | int) -> tuple[None, Cached]:
                if keys_values is None:
                    return None, cached
                group, places = plan.cache_layers(kind)
                pools, num_layers = cached.pools, plan.depth(list(plan.groups)[group])
                # A window of one token: nothing reads the result, and the op writes what it attends to.
                where: Any = {"layer": pick(places, index), "num_layers": num_layers, "window": 1, "scale": spec.scale}
                q_fnh = jnp.zeros((len(frames_fd), spec.num_heads, spec.head_dim), self.dtype)
                _, pool = attention[group](q_fnh, *keys_values, pools[group], batch, **where)
                return None, Cached((*pools[:group], pool, *pools[group + 1 :]), cached.lent)

            def finish(weights: _Params, x_fd: Array, attended: None, index: Array | int) -> Array:
                del weights, attended, index
                return x_fd

            return LayerBody(project, attend, finish)

        layers = adapted_layers(params, self.adapter_shape)
        bodies = [body(kind) for kind in range(len(plan.kinds))]
        (_, cached), _ = run_layers(self.specs.loop, plan, layers, bodies, (frames_fd, Cached(kv_pools, {})))
        return cached.pools

    @jax.named_scope("features")
    def read_features(self, params: _Params, features_tf: Array, num_rows: Array | int) -> Array:
        """Return a draft head's projection of the other model's features of tokens, [t, d]."""
        return self._frame_of(params, num_rows).read_features(features_tf)

    def _body(self, kind: int, step: SharedInputs) -> LayerBody:
        """Return the computation of a kind's layers in a step."""
        plan = self.plan
        spec = plan.kinds[kind]

        def layer(weights: _Params, num_rows: Array = step.num_tokens) -> Any:
            return nnx.merge(
                self.specs.kinds[kind].definition, bind(dict(weights), num_rows, self.ops, step.adapter_rows)
            )

        @jax.named_scope("project")
        def project(weights: _Params, x_td: Array) -> Any:
            heads = layer(weights).project(x_td)
            if (distances := step.distances) is None:
                return heads
            far, places_r = layer(weights, distances.num_rows).project(distances.states_rd), distances.places_r
            return RelativeHeads(heads.q_tnh, heads.k_tkh, heads.v_tkh, far.q_tnh[places_r], far.k_tkh[places_r])

        # Profiles show the parts of a step under these names.
        @jax.named_scope("attend")
        def attend(inputs: Any, cached: Cached, index: Array | int) -> tuple[Any, Cached]:
            if not spec.has_mixer:
                return None, cached
            if spec.state is None:
                return self._attend(kind, step, inputs, cached, index)
            if not spec.attends_too:
                return self._recur(kind, step, inputs, cached, index)
            attended_tnh, cached = self._attend(kind, step, inputs.attention, cached, index)
            out, cached = self._recur(kind, step, inputs.state, cached, index)
            return Beside(attended_tnh, out), cached

        @jax.named_scope("finish")
        def finish(weights: _Params, x_td: Array, attended_tnh: Array, index: Array | int) -> Array:
            arrays = [] if step.inputs_ltp is None else [step.inputs_ltp[pick(plan.layers_of[kind], index)]]
            x_td = layer(weights).finish(x_td, attended_tnh, *arrays)
            if spec.adds_media and step.slices_ktd is not None:
                x_td = x_td + step.slices_ktd[pick(plan.layers_of[kind], index)]
            return x_td if step.steering is None else step.steering.added(x_td, pick(plan.layers_of[kind], index))

        return LayerBody(project, attend, finish)

    def _attend(
        self, kind: int, step: SharedInputs, heads: Any, cached: Cached, index: Array | int
    ) -> tuple[Array, Cached]:
        """Attend in the layer at an index of a kind."""
        plan, spec = self.plan, self.plan.kinds[kind]
        if spec.has_indexer:
            cached = self._choose(kind, step, heads.indexer, cached, index)
        pools, lent, chosen_tw = cached
        group, places = plan.cache_layers(kind)
        if spec.relative is not None:
            return self._attend_by_distance(spec, heads, step.batches[group]), cached
        where = {"layer": pick(places, index), "num_layers": plan.depth(list(plan.groups)[group])}
        # The cache has borrowed keys and values already, and those of an encoder's frames, whose last ones stand in
        # for the step's tokens; writing them again changes nothing.
        if spec.is_cross:
            slots_t = step.batches[group].slots_t
            attention: Any = step.attention[group]
            held = attention.read(pools[group], slots_t, **where)
            heads = heads._replace(k_tkh=held[0], v_tkh=held[1])
        arrays, settings = attention_inputs(heads, lent[group] if spec.borrows_kv else None, spec, step)
        settings = {"scale": spec.scale, **where, **settings}
        if spec.indexer is not None:
            settings["chosen_tw"] = chosen_tw
        elif spec.latent is not None and spec.window is not None:
            size = pools[group].latents.shape[1]
            settings["chosen_tw"] = last_positions(step.batches[group], spec.window, len(arrays[0]), size)
        attended_tnh, pool = step.attention[group](*arrays, pools[group], step.batches[group], **settings)
        if spec.output_gate:
            attended_tnh = attended_tnh * jax.nn.sigmoid(heads.gate_tnh.astype(jnp.float32)).astype(self.dtype)
        if group in lent and not spec.borrows_kv:
            lent = {**lent, group: arrays[1:] if spec.latent else (heads.k_tkh, heads.v_tkh)}
        return attended_tnh, Cached((*pools[:group], pool, *pools[group + 1 :]), lent, chosen_tw)

    def _choose(self, kind: int, step: SharedInputs, heads: IndexerHeads, cached: Cached, index: Array | int) -> Cached:
        """Choose the tokens that the layer at an index of a kind attends to."""
        plan, spec, pools = self.plan, self.plan.kinds[kind], cached.pools
        group, places = plan.cache_layers(kind, indexer_group_of)
        where = {"layer": pick(places, index), "num_layers": plan.depth(list(plan.groups)[group])}
        inputs = heads.joined(step.positions.rope_of(spec), step.positions.logs_t)
        chosen_tw, pool = step.attention[group](*inputs, pools[group], step.batches[group], **where)
        return cached._replace(pools=(*pools[:group], pool, *pools[group + 1 :]), chosen_tw=chosen_tw)

    def _attend_by_distance(self, spec: LayerSpec, inputs: RelativeHeads, batch: AttentionBatch) -> Array:
        """Attend in a layer whose scores depend on distances; prompts go whole through it, so that it has no cache."""
        assert spec.relative is not None
        return self.ops.relative(
            *inputs,
            batch.query_starts_s,
            batch.query_ends_s,
            scale=spec.scale,
            max_distance=spec.relative.max_distance,
            longest=self.config.max_position_embeddings,
        )

    def _distances(self, params: _Params, batches: Sequence[Any]) -> Distances | None:
        """Return what layers make keys and queries of distances of, if scores depend on these."""
        spec = self.plan.kinds[0].relative
        if spec is None:
            return None
        states_rd = self._frame_of(params, 2 * spec.num_buckets).distance_states()
        return distances_of(states_rd, spec, batches[0], self.config.max_position_embeddings)

    def _recur(
        self, kind: int, step: SharedInputs, inputs: Any, cached: Cached, index: Array | int
    ) -> tuple[Array, Cached]:
        """Run tokens through the recurrent state of the layer at an index of a kind."""
        plan, pools = self.plan, cached.pools
        group, places = plan.cache_layers(kind, state_group_of)
        where = {"layer": pick(places, index), "num_layers": plan.depth(list(plan.groups)[group])}
        layer_of = {"spec": plan.kinds[kind], "cfg": self.config, **where}
        out, pool = step.attention[group](inputs, pools[group], step.batches[group], **layer_of)
        return out, cached._replace(pools=(*pools[:group], pool, *pools[group + 1 :]))

    @jax.named_scope("logits")
    def logits(self, params: _Params, hidden_sd: Array, num_rows: Array | int) -> Array:
        """Return float32 logits [s, v] of hidden states from `forward`, the final soft cap applied.

        Rows from `num_rows` on are padding.
        """
        logits_sv, divisor = self._frame_of(params, num_rows).logits(hidden_sd), self.config.logits_divisor
        return soft_cap(logits_sv if divisor == 1.0 else logits_sv / divisor, self.config.final_soft_cap)

    @jax.named_scope("pool")
    def pool(self, params: _Params, hidden_td: Array, batch: AttentionBatch) -> Array:
        """Return the float32 outputs [s, o] of the sequences of a step, from the hidden states of `forward`.

        A chunk without the token that represents its sequence (`Pooling.kind`) gives a row of no use. The mean is over
        the step's tokens.
        """
        assert self.config.pooling is not None
        return self._head(params, len(batch.query_ends_s))(pooled_states(hidden_td, batch, self.config.pooling.kind))

    @jax.named_scope("pool")
    def pool_tokens(self, params: _Params, hidden_td: Array) -> Array:
        """Return the float32 outputs [t, o] of all tokens of a step; see `Pooling.token_heads`."""
        return self._head(params, len(hidden_td)).of_tokens(hidden_td)

    def _head(self, params: _Params, num_rows: int) -> PoolingHead:
        return nnx.merge(self.specs.head.definition, bind(params.get("head", {}), num_rows, self.ops))

    def _frame_of(self, params: _Params, num_rows: Array | int) -> Any:
        """Return the frame for a call whose rows from `num_rows` on are padding."""
        weights = {name: value for name, value in params.items() if name not in _OTHER_PARTS}
        return nnx.merge(self.specs.frame.definition, bind(weights, num_rows, self.ops))

    def _nothing_chosen(self, num_tokens: int, kv_pools: Sequence[Any], batches: Sequence[Any]) -> Array | None:
        """Return no choice of tokens; None in a model without indexers."""
        for group, pool, batch in zip(self.plan.groups, kv_pools, batches, strict=True):
            if group.is_indexer:
                return jnp.zeros((num_tokens, num_words(batch, pool.keys.shape[1])), jnp.int32)
        return None

    def _nothing_lent(self, num_tokens: int) -> Lent:
        """Return zeros for the keys and values to borrow, which no layer has computed yet."""
        lent: Lent = {}
        for number, group in enumerate(self.plan.groups):
            if group in self.plan.lending_groups:
                shape = (group.head_dim,) if group.latent_dim else (group.num_kv_heads, group.head_dim)
                lent[number] = (jnp.zeros((num_tokens, *shape), self.dtype),) * (1 if group.latent_dim else 2)
        return lent
