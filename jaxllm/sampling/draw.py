"""Draw one id per row: a uniform number from the row's seed and position, and the inverse of the cumulative sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.sampling.distribution import Distribution
from jaxllm.sampling.tiles import TILE, Rows


def uniforms(seeds_s2: Array, positions_s: Array) -> Array:
    """Return one number in [0, 1) per row, of `fold_in(key(seed), position)`; seeds are (high, low) words."""

    def one(seed_2: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed_2.astype(jnp.uint32), impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position))

    return jax.vmap(one)(seeds_s2, positions_s)


def draw(rows: Rows, distribution: Distribution, uniforms_s: Array) -> Array:
    """Return one id per row with probability by mass, in two levels: a tile of ids, then an id within it."""
    sums_si = rows.each_tile(_mass_sums, distribution)
    ends_si = jnp.cumsum(sums_si, axis=1)
    target_s = uniforms_s * ends_si[:, -1]
    tile_s = _first_above(ends_si, sums_si, target_s)
    before_si = jnp.concatenate([jnp.zeros_like(ends_si[:, :1]), ends_si[:, :-1]], axis=1)
    before_s = jnp.take_along_axis(before_si, tile_s[:, None], axis=1)[:, 0]
    mass_sj = distribution.mass(rows.take(tile_s))
    ids_s = tile_s * TILE + _first_above(jnp.cumsum(mass_sj, axis=1), mass_sj, target_s - before_s)
    return jnp.minimum(ids_s, rows.vocab_size - 1)


def _mass_sums(logits_sij: Array, distribution: Distribution) -> Array:
    return distribution.mass(logits_sij).sum(axis=2)


def _first_above(ends_si: Array, mass_si: Array, target_s: Array) -> Array:
    """Return the first index that has mass and whose cumulative sum exceeds the target.

    If rounding leaves no such index, because cumulative sums fall a little, it is the last index that has mass.
    """
    width = ends_si.shape[1]
    indices_i = jnp.arange(width, dtype=jnp.int32)
    has_mass_si = mass_si > 0
    last_s = jnp.where(has_mass_si, indices_i, 0).max(axis=1)
    return jnp.where(has_mass_si & (ends_si > target_s[:, None]), indices_i, last_s[:, None]).min(axis=1)
