"""Pick the next token of every row.

Order of operations, as in vLLM: log-probabilities of the raw logits; allowed ids; greedy pick, or temperature, min_p,
top_k, top_p and a draw. A row's randomness is `fold_in(key(seed), position)` and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .truncation import truncate

GREEDY_TEMPERATURE = 1e-5
DRAW_TILE = 256


class SamplingBatch(NamedTuple):
    """Settings of each row."""

    seeds_s2: Array
    """int32 bits of the high and low word of each row's 64-bit seed."""
    positions_s: Array
    """int32 position of the token to be sampled."""
    temperature_s: Array
    top_k_s: Array
    """int32; 0 keeps all."""
    top_p_s: Array
    min_p_s: Array


class Logprobs(NamedTuple):
    """Log-probabilities of the raw logits of each row."""

    sampled_s: Array
    rank_s: Array
    """int32 count of ids at least as likely as the sampled one."""
    top_ids_sk: Array
    top_sk: Array


def sample_plain(logits_sv: Array, batch: SamplingBatch) -> Array:
    """Return one token per row, by its temperature and seed only."""
    weights_sv = _weights(logits_sv, batch.temperature_s)
    drawn_s = _draw(weights_sv, _uniforms(batch))
    return jnp.where(batch.temperature_s < GREEDY_TEMPERATURE, greedy(logits_sv), drawn_s)


def sample_full(
    logits_sv: Array, batch: SamplingBatch, allowed_bits_sw: Array, *, num_logprobs: int
) -> tuple[Array, Logprobs]:
    """Return one token per row with every feature, and the log-probabilities of it and of the most likely ids."""
    allowed_logits_sv = jnp.where(_unpack_bits(allowed_bits_sw, logits_sv.shape[1]), logits_sv, -jnp.inf)
    weights_sv = truncate(_weights(allowed_logits_sv, batch.temperature_s), batch.top_k_s, batch.top_p_s, batch.min_p_s)
    drawn_s = _draw(weights_sv, _uniforms(batch))
    tokens_s = jnp.where(batch.temperature_s < GREEDY_TEMPERATURE, greedy(allowed_logits_sv), drawn_s)
    return tokens_s, _logprobs(logits_sv, tokens_s, num_logprobs)


def greedy(logits_sv: Array) -> Array:
    """Return the least id among the most likely ones; 6 times faster than jnp.argmax on XLA:CPU."""
    ids_v = jnp.arange(logits_sv.shape[1], dtype=jnp.int32)
    best_s1 = logits_sv.max(axis=1, keepdims=True)
    return jnp.where(logits_sv == best_s1, ids_v, logits_sv.shape[1] - 1).min(axis=1)


def _weights(logits_sv: Array, temperature_s: Array) -> Array:
    """Return unnormalised probabilities, the largest of a row being 1."""
    scale_s1 = 1.0 / jnp.maximum(temperature_s, GREEDY_TEMPERATURE)[:, None]
    return jnp.exp((logits_sv - logits_sv.max(axis=1, keepdims=True)) * scale_s1)


def _uniforms(batch: SamplingBatch) -> Array:
    """Return one number in [0, 1) per row."""

    def one(seed_2: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed_2.astype(jnp.uint32), impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position))

    return jax.vmap(one)(batch.seeds_s2, batch.positions_s)


def _draw(weights_sv: Array, uniforms_s: Array) -> Array:
    """Draw by the inverse of the cumulative sum, in two levels: the tile of ids first, then the id within it."""
    s, v = weights_sv.shape
    weights_sij = jnp.pad(weights_sv, ((0, 0), (0, -v % DRAW_TILE))).reshape(s, -1, DRAW_TILE)
    sums_si = jnp.cumsum(weights_sij.sum(axis=2), axis=1)
    target_s = uniforms_s * sums_si[:, -1]
    tile_s = _first_above(sums_si, target_s)
    before_s = jnp.where(
        tile_s > 0, jnp.take_along_axis(sums_si, jnp.maximum(tile_s - 1, 0)[:, None], axis=1)[:, 0], 0.0
    )
    weights_sj = jnp.take_along_axis(weights_sij, tile_s[:, None, None], axis=1)[:, 0]
    # Rounding may leave the target at the tile's very end: stay on an id that has weight.
    sums_sj = jnp.cumsum(weights_sj, axis=1)
    last_s = DRAW_TILE - 1 - jnp.argmax((weights_sj > 0)[:, ::-1], axis=1)
    return tile_s * DRAW_TILE + jnp.minimum(_first_above(sums_sj, target_s - before_s), last_s)


def _first_above(sums_si: Array, target_s: Array) -> Array:
    count_s = (sums_si <= target_s[:, None]).sum(axis=1, dtype=jnp.int32)
    return jnp.minimum(count_s, sums_si.shape[1] - 1)


def _unpack_bits(bits_sw: Array, num_ids: int) -> Array:
    bits_sw32 = (bits_sw[:, :, None] >> jnp.arange(32)) & 1
    return bits_sw32.reshape(bits_sw.shape[0], -1)[:, :num_ids] == 1


def _logprobs(logits_sv: Array, tokens_s: Array, num_logprobs: int) -> Logprobs:
    total_s1 = jax.nn.logsumexp(logits_sv, axis=1, keepdims=True)
    sampled_s1 = jnp.take_along_axis(logits_sv, tokens_s[:, None], axis=1)
    top_sk, top_ids_sk = jax.lax.top_k(logits_sv, num_logprobs)
    return Logprobs(
        sampled_s=(sampled_s1 - total_s1)[:, 0],
        rank_s=(logits_sv >= sampled_s1).sum(axis=1, dtype=jnp.int32),
        top_ids_sk=top_ids_sk,
        top_sk=top_sk - total_s1,
    )
