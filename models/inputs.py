"""The inputs of a step: its tokens, and the arrays and settings that all its layers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.chosen import num_words, spans_to_bits
from pallas_kernels.lora import Rows
from pallas_kernels.paged_attention import NO_WINDOW, AttentionBatch, Rope
from pallas_kernels.paged_attention.rope import rotate
from pallas_kernels.relative_attention import bucket_rows

from .config import LayerSpec, ModelConfig, QueryScaling
from .loop import Heads, LatentHeads
from .mixer_specs import RelativeSpec
from .plan import LayerPlan
from .rope import query_scale, rope_table


class TokenBatch(NamedTuple):
    """The tokens of a step, int32 [t] each.

    `rope_lengths_t` is max(prompt length, position + 1): the sequence length that dynamic RoPE scales by. `type_ids_t`
    is 1 in the second text of a pair, else 0. `adapter_slots_t` is the slot of each token's LoRA adapter, 0
    for none.
    """

    token_ids_t: Array
    positions_t: Array
    rope_lengths_t: Array
    type_ids_t: Array
    adapter_slots_t: Array


class MediaTokens(NamedTuple):
    """What a step's tokens take from images and videos, int32.

    `media_rows_t` is the row of the feature cache that replaces a token's embedding, -1 for the embedding itself.
    `media_ends_t` is the position after the last token that a token attends to: that of its image's end in a model that
    sees both sides within an image, else the token's own position plus 1. `rope_positions_t3` has three positions of
    each token for multimodal RoPE, which other tables do not read.
    """

    media_rows_t: Array
    media_ends_t: Array
    rope_positions_t3: Array


class Steering(NamedTuple):
    """The vectors that are added to a step's tokens after the layers, each token's times its scale."""

    vectors_lvd: Array
    """float32, after each layer the vectors by their numbers; number 0 stands for none."""
    vectors_t: Array
    """The number of each token's vector, int32."""
    scales_t: Array
    """float32."""

    def added(self, x_td: Array, layer: Array | int) -> Array:
        """Return a layer's output with the vectors added; rows without one keep their bits."""
        vectors_vd = jax.lax.dynamic_index_in_dim(self.vectors_lvd, layer, keepdims=False)
        steered_td = x_td.astype(jnp.float32) + self.scales_t[:, None] * vectors_vd[self.vectors_t]
        return jnp.where((self.vectors_t > 0)[:, None], steered_td.astype(x_td.dtype), x_td)


class Distances(NamedTuple):
    """The states of distances, which are the same for all sequences, in the order of distances from 0 to both sides."""

    states_rd: Array
    num_rows: Array
    """The number of rows that the step's sequences have distances of."""
    places_r: np.ndarray
    """The place of each of the op's rows in this order."""


def distances_of(states_rd: Array, spec: RelativeSpec, batch: AttentionBatch, longest: int) -> Distances:
    """Return the states of distances [r, d], with those that a step needs first."""
    far = np.abs(np.arange(2 * spec.num_buckets) - spec.num_buckets)
    order_r = np.argsort(far, kind="stable")
    counts = bucket_rows(np.arange(longest), spec.num_buckets, spec.max_distance) - spec.num_buckets
    longest_now = jnp.max(batch.query_ends_s - batch.query_starts_s)
    num_rows = jnp.asarray(np.minimum(2 * counts + 1, len(far)), jnp.int32)[jnp.clip(longest_now - 1, 0, longest - 1)]
    return Distances(states_rd[order_r], num_rows, np.argsort(order_r))


class PositionTables(NamedTuple):
    """What layers take of the tokens' positions."""

    ropes: Mapping[tuple[int, int], Rope]
    """By RoPE table and the size of the rotated part."""
    query_scales: Mapping[QueryScaling | None, Array | None]
    logs_t: Array | None
    """The logarithms of positions, counted from 1; None if no layer takes them."""

    def rope_of(self, spec: LayerSpec) -> Rope | None:
        """Return the rotation of a layer's queries and keys, None if it rotates none."""
        return None if spec.rope is None else self.ropes[spec.rope, spec.rope_dim]


def position_tables(
    config: ModelConfig,
    kinds: Sequence[LayerSpec],
    tokens: TokenBatch,
    media: MediaTokens | None,
    exponents_h: Array | None,
) -> PositionTables:
    """Return what layers of these kinds take of positions; `exponents_h` are those of a learned RoPE table."""
    where = tokens.positions_t, tokens.rope_lengths_t, None if media is None else media.rope_positions_t3, exponents_h
    tables = {(spec.rope, spec.rope_dim) for spec in kinds if spec.rope is not None}
    takes_logs = any(spec.log_scaling for spec in kinds)
    return PositionTables(
        {table: Rope(*rope_table(config.ropes[table[0]], table[1], *where)) for table in sorted(tables)},
        {each: query_scale(each, tokens.positions_t) for each in {spec.query_scaling for spec in kinds}},
        jnp.log((tokens.positions_t + 1).astype(jnp.float32)) if takes_logs else None,
    )


class SharedInputs(NamedTuple):
    """The inputs that all layers of a step share."""

    num_tokens: Array
    adapter_rows: Rows
    positions: PositionTables
    inputs_ltp: Array | None
    """Each layer's own input, if layers have one."""
    batches: Sequence[Any]
    attention: Sequence[Callable[..., tuple[Array, Any]]]
    slices_ktd: Array | None = None
    """The further slices of the tokens' media rows, which layers with `adds_media` add to the stream: the i-th layer
    the i-th slice. None if the model has no such layers."""
    steering: Steering | None = None
    """The vectors that are added after the layers; None in an engine without them."""
    distances: Distances | None = None
    """What layers make keys and queries of distances of, if scores depend on these."""


def attention_inputs(
    heads: Any, borrowed: tuple[Array, ...] | None, spec: LayerSpec, step: SharedInputs
) -> tuple[tuple[Array, ...], Any]:
    """Return attention's arrays for a layer's tokens, and its settings for layers of this spec.

    The arrays are queries, and keys and values or latents, which may be `borrowed`.
    """
    rope, scale_t11 = step.positions.rope_of(spec), step.positions.query_scales[spec.query_scaling]
    if isinstance(heads, LatentHeads):
        latents = (heads.latents(rope),) if borrowed is None else borrowed
        return (_scaled(heads.queries(rope, step.positions.logs_t), scale_t11), *latents), {}
    keys_values: tuple[Any, ...] = (heads.k_tkh, heads.v_tkh) if borrowed is None else borrowed
    if heads.scales_2h is not None:
        q_tnh, keys_values = _normed_later(heads, rope, spec)
        heads, rope = heads._replace(q_tnh=q_tnh), None
    if spec.padded_dim is not None and rope is not None:
        heads = heads._replace(q_tnh=rotate(heads.q_tnh, rope))
        keys_values, rope = (rotate(keys_values[0], rope), keys_values[1]), None
    settings = {
        "window": NO_WINDOW if spec.window is None else spec.window,
        "rope": rope,
        "soft_cap": spec.soft_cap,
        "sinks_n": heads.sinks_n,
    }
    arrays = _scaled(heads.q_tnh, scale_t11), *keys_values
    return tuple(_filled_up(each, spec.cached_dim) for each in arrays), settings


def _normed_later(heads: Heads, rope: Rope | None, spec: LayerSpec) -> tuple[Array, tuple[Array | None, ...]]:
    """Return queries that are rotated and then normed, and such keys with their values."""
    assert heads.scales_2h is not None
    assert heads.k_tkh is not None
    eps = spec.rotated_norm
    assert eps is not None

    def normed(x_tnh: Array, scale_h: Array) -> Array:
        # The rotation may scale heads too.
        x32 = x_tnh.astype(jnp.float32) if rope is None else rotate(x_tnh.astype(jnp.float32), rope)
        mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
        return (x32 * jax.lax.rsqrt(mean_square + eps) * scale_h.astype(jnp.float32)).astype(x_tnh.dtype)

    q_scale_h, k_scale_h = heads.scales_2h
    return normed(heads.q_tnh, q_scale_h), (normed(heads.k_tkh, k_scale_h), heads.v_tkh)


def _filled_up(x_tnh: Array, size: int) -> Array:
    """Return heads with zeros up to a size."""
    missing = size - x_tnh.shape[-1]
    return jnp.pad(x_tnh, ((0, 0), (0, 0), (0, missing))) if missing else x_tnh


def _scaled(q_tnh: Array, scale_t11: Array | None) -> Array:
    """Return the queries times each token's factor, if there is one."""
    return q_tnh if scale_t11 is None else q_tnh * scale_t11.astype(q_tnh.dtype)


def embed_media(x_td: Array, features_rw: Array, rows_t: Array) -> tuple[Array, Array | None]:
    """Return the stream [t, d] with rows of the feature cache for media's tokens, and their further slices [k, t, d].

    A row of the cache is [(1 + k) * d] wide; slices of other tokens are 0, and there are none if k is 0.
    """
    t, d = x_td.shape
    is_media_t1 = (rows_t >= 0)[:, None]
    taken_tw = features_rw[jnp.maximum(rows_t, 0)].astype(x_td.dtype)
    x_td = jnp.where(is_media_t1, taken_tw[:, :d], x_td)
    if taken_tw.shape[1] == d:
        return x_td, None
    return x_td, jnp.where(is_media_t1, taken_tw[:, d:], 0).reshape(t, -1, d).swapaxes(0, 1)


def last_positions(batch: AttentionBatch, window: int, num_tokens: int, block_size: int) -> Array:
    """Return the positions that each token's window has, itself the last, as the bits of `pallas_kernels.chosen`.

    They count from the first token of a sequence's block table. Rows of padding have none or any.
    """
    rows_t, seqs_t = jnp.arange(num_tokens, dtype=jnp.int32), _sequences_of(batch, num_tokens)
    after_s = batch.context_lens_s - batch.query_ends_s
    last_t = rows_t + after_s.at[seqs_t].get(mode="clip")
    return spans_to_bits(last_t - window + 1, last_t, num_words(batch, block_size))


def with_ends(
    plan: LayerPlan, batches: Sequence[Any], tokens: TokenBatch, media: MediaTokens | None, filler_id: int | None
) -> list[Any]:
    """Return the batches of the plan's groups, with the ends of rows that are not their own positions.

    No token attends to those of `filler_id`, if there are any.
    """
    fillers_t = None if filler_id is None else tokens.token_ids_t == filler_id
    ended = []
    for group, batch in zip(plan.groups, batches, strict=True):
        is_causal = group.causal and not group.is_cross
        if media is not None and group.sees_both_sides:
            ended.append(batch._replace(row_ends_t=media.media_ends_t))
        elif group.state is not None or (is_causal and filler_id is None):
            ended.append(batch)
        else:
            ended.append(_with_row_ends(batch, 1 if is_causal else group.window, tokens.positions_t, fillers_t))
    return ended


def with_blind_rows(
    plan: LayerPlan, batches: Sequence[Any], attention: Sequence[Callable[..., Any]], positions_t: Array
) -> tuple[list[Any], list[Callable[..., Any]]]:
    """Return the batches and the attention of the plan's groups, which gives zeros to rows that see no token.

    A row is blind if its window begins where its sequence's fillers do, or later. PyTorch gives zeros too. The ops need
    a position for every row: blind rows see one, and zeros replace the result.
    """
    seeing, attending = [], []
    for group, batch, attend in zip(plan.groups, batches, attention, strict=True):
        if group.window is not None and group.state is None and batch.row_ends_t is not None:
            firsts_t = positions_t - (group.window - 1)
            attend = partial(_attend_blindly, attend, batch.row_ends_t <= firsts_t)
            batch = batch._replace(row_ends_t=jnp.maximum(batch.row_ends_t, firsts_t + 1))
        seeing.append(batch)
        attending.append(attend)
    return seeing, attending


def _attend_blindly(attend: Callable[..., Any], is_blind_t: Array, *args: Any, **options: Any) -> tuple[Array, Any]:
    out_tnh, pool = attend(*args, **options)
    return jnp.where(is_blind_t[:, None, None], 0, out_tnh), pool


def _with_row_ends(
    batch: AttentionBatch, window: int | None, positions_t: Array, fillers_t: Array | None = None
) -> AttentionBatch:
    """Return the batch with each row's end: its sequence's, or at most as far ahead as a window reaches back.

    If `fillers_t` says which tokens are fillers, a sequence ends before those that come last in it, unless it has no
    other tokens. Sequences must be whole.
    """
    seqs_t = _sequences_of(batch, len(positions_t))
    ends_s = batch.context_lens_s
    if fillers_t is not None:
        ends_t = jnp.where(fillers_t, 0, positions_t + 1)
        real_s = jax.ops.segment_max(ends_t, seqs_t, len(ends_s))
        ends_s = jnp.where(real_s > 0, jnp.minimum(real_s, ends_s), ends_s)
    ends_t = ends_s.at[seqs_t].get(mode="clip")
    return batch._replace(row_ends_t=ends_t if window is None else jnp.minimum(ends_t, positions_t + window))


def _sequences_of(batch: AttentionBatch, num_rows: int) -> Array:
    """Return the sequence of each row; rows of padding have that of the row after them, or none."""
    rows_t = jnp.arange(num_rows, dtype=jnp.int32)
    return jnp.searchsorted(batch.query_ends_s, rows_t, side="right", method="compare_all")
