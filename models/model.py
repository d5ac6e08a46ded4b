"""A model as pure functions over a plain nested dict of parameters, and the specs that loading works from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.paged_attention import AttentionBatch, KVPool, Rope

from .config import ModelConfig
from .family import Prefixes
from .layers.embedding import soft_cap
from .loop import Heads, LayerBody, LayerLoop, LayerOf, map_experts, run_layers
from .params import ParamSpec, Reading, declared, make_spec, stack, within
from .plan import LayerPlan
from .quantization import METHODS
from .registry import get_family
from .rope import query_scale, rope_table
from .tokens import TokenBatch

NO_WINDOW = 2**30

Params = Mapping[str, Any]


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
        self._frame_def, self._frame_state = _abstract(partial(self.family.frame, config, self.dtype))
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
        reading = Reading(quantizes=self.quantization is not None)
        prefixes, names = self.family.find_prefixes(tensor_names), self.family.names
        in_frame = declared(self._frame_state)
        specs = {
            path: make_spec(path, in_frame, names, self._source(path, prefixes, None), reading) for path in in_frame
        }
        of_layers = {name.removeprefix("layers."): tensor for name, tensor in names.items()}
        of_kinds = zip(self._kinds, self.plan.kinds, self.plan.layers_of, strict=True)
        for number, ((_, state), kind, layers) in enumerate(of_kinds):
            order = None if kind.rope is None else self.config.ropes[kind.rope].head_order(kind.head_dim)
            of_kind = reading._replace(kv_repeats=kind.kv_repeats, head_order=order)
            in_layer = declared(state)
            for path in in_layer:
                sources = {layer: self._source(f"layers.{path}", prefixes, layer) for layer in layers}
                singles = {
                    layer: make_spec(path, in_layer, of_layers, source, of_kind) for layer, source in sources.items()
                }
                stacks = {number: stack(list(singles.values()))} if self.loop.stacked else singles
                specs |= {f"layers.{i}.{path}": within(f"layers.{i}", spec) for i, spec in stacks.items()}
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
        num_tokens = jnp.max(batches[0].query_ends_s)
        where = tokens.positions_t, tokens.rope_lengths_t
        ropes = {
            (spec.rope, spec.head_dim): Rope(*rope_table(cfg.ropes[spec.rope], spec.head_dim, *where))
            for spec in self.plan.kinds
            if spec.rope is not None
        }
        query_scales = {
            each: query_scale(each, tokens.positions_t) for each in {spec.query_scaling for spec in self.plan.kinds}
        }

        def body(kind: int) -> LayerBody:
            spec, (group, places) = self.plan.kinds[kind], self.plan.cache_layers(kind)
            num_layers = len(list(self.plan.groups.values())[group])

            def layer(weights: Params) -> Any:
                # In a loop that cuts nothing out of stacks, experts are a stack of one layer.
                if not self.loop.stacked:
                    weights = map_experts(lambda x: LayerOf(x[None], 0, num_tokens), weights)
                return nnx.merge(self._kinds[kind][0], dict(weights))

            # Profiles tell the parts of a step by these names.
            @jax.named_scope("attend")
            def attend(
                heads: Heads, kv_pools: tuple[KVPool, ...], place: Array | int
            ) -> tuple[Array, tuple[KVPool, ...]]:
                heads = _scale_queries(heads, query_scales[spec.query_scaling])
                attended_tnh, kv_pool = attention[group](
                    heads.q_tnh,
                    heads.k_tkh,
                    heads.v_tkh,
                    kv_pools[group],
                    batches[group],
                    layer=_pick(places, place),
                    num_layers=num_layers,
                    window=NO_WINDOW if spec.window is None else spec.window,
                    scale=spec.scale,
                    rope=None if spec.rope is None else ropes[spec.rope, spec.head_dim],
                    soft_cap=spec.soft_cap,
                    sinks_n=heads.sinks_n,
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
            (frame.start(tokens), kv_pools),
            num_tokens,
        )
        return frame.end(x_td), kv_pools

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

    def _source(self, path: str, prefixes: Prefixes, layer: int | None) -> str:
        if path not in self.family.names:
            raise ValueError(f"{self.config.architecture}: no HF tensor name for parameter {path!r}")
        name = self.family.names[path].name
        return name.format(body=prefixes.body, head=prefixes.head, l=layer, e="{e}")


def _abstract(build: Callable[[], nnx.Module]) -> tuple[Any, nnx.State]:
    # Flax would shard at construction; there is nothing to shard yet.
    with nnx.use_eager_sharding(False):
        return nnx.split(nnx.eval_shape(build))


def _scale_queries(heads: Heads, scale_t11: Array | None) -> Heads:
    """Return the heads with their queries multiplied, if there is a factor for each token."""
    if scale_t11 is None:
        return heads
    return heads._replace(q_tnh=heads.q_tnh * scale_t11.astype(heads.q_tnh.dtype))


def _pick(numbers: Sequence[int], place: Array | int) -> Array | int:
    """Return the number at a place, which may be traced."""
    if isinstance(place, int):
        return numbers[place]
    if list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))):
        return numbers[0] + place
    return jnp.asarray(numbers, jnp.int32)[place]
