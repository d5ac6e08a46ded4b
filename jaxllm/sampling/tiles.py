"""Search a vocabulary in tiles: each tile's maximum tells where to look, so that most passes read a tile, not a row.

On XLA:CPU at 64 x 49k this finds the most likely id in a sixth of the time of a max and a search for its index, which
takes 5 ms, and the 20 most likely ones in a fifth of the time of `lax.top_k`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax

TILE = 256


class Rows(Protocol):
    """Rows of logits [s, v], on one device or several, read tile by tile."""

    @property
    def vocab_size(self) -> int: ...

    def each_tile(self, function: Callable[..., Array], *of_rows: Any) -> Array:
        """Return [s, tiles], the result of `function` for all tiles [s, tiles, TILE] and pytrees of arrays [s, ...].

        Logits beyond the vocabulary are -inf.
        """
        ...

    def take(self, tile_s: Array) -> Array:
        """Return [s, TILE], one tile of each row."""
        ...


@dataclass(frozen=True, slots=True)
class WholeRows:
    """Rows of logits in one array."""

    logits_sv: Array
    num_rows: Array | None = None
    """The number of rows in use; a single one is read without the others. None if all are."""

    @property
    def vocab_size(self) -> int:
        return self.logits_sv.shape[1]

    def each_tile(self, function: Callable[..., Array], *of_rows: Any) -> Array:
        def of_first(count: int) -> Array:
            logits_sv, *others = jax.tree.map(lambda x: x[:count], (self.logits_sv, *of_rows))
            own_si = function(split_tiles(logits_sv, -jnp.inf), *others)
            return jnp.pad(own_si, ((0, total - count), (0, 0)))

        total = self.logits_sv.shape[0]
        if self.num_rows is None:
            return of_first(total)
        return lax.cond(self.num_rows == 1, lambda: of_first(1), lambda: of_first(total))

    def take(self, tile_s: Array) -> Array:
        return take_tiles(self.logits_sv, tile_s[:, None], -jnp.inf)[:, 0]


def split_tiles(values_sv: Array, padding: float) -> Array:
    """Return [s, tiles, TILE]; the last tile is filled up with `padding`."""
    s, v = values_sv.shape
    return jnp.pad(values_sv, ((0, 0), (0, -v % TILE)), constant_values=padding).reshape(s, -1, TILE)


def take_tiles(values_sv: Array, tiles_si: Array, padding: float) -> Array:
    """Return [s, i, TILE], some tiles of each row."""
    ids_sij = _tile_ids(tiles_si)
    v = values_sv.shape[1]
    rows_s11 = jnp.arange(values_sv.shape[0])[:, None, None]
    return jnp.where(ids_sij < v, values_sv[rows_s11, jnp.minimum(ids_sij, v - 1)], padding)


def _tile_ids(tiles_si: Array) -> Array:
    """Return [s, i, TILE], the ids in some tiles; in the last tile they may exceed the vocabulary."""
    return tiles_si[:, :, None] * TILE + jnp.arange(TILE, dtype=jnp.int32)


def tile_maxima(logits_sv: Array) -> Array:
    """Return [s, tiles], the largest value of each tile."""
    return largest(split_tiles(logits_sv, -jnp.inf))


def largest(values_sij: Array) -> Array:
    """Return [s, i], the largest value of each tile."""
    return values_sij.max(axis=2)


def most_likely(rows: Rows, maxima_si: Array) -> Array:
    """Return each row's most likely id, the least of equal ones. A row with NaN gives some id below v."""
    best_s1 = maxima_si.max(axis=1, keepdims=True)
    tile_s = _first_where(maxima_si == best_s1)
    ids_s = tile_s * TILE + _first_where(rows.take(tile_s) == best_s1)
    return jnp.minimum(ids_s, rows.vocab_size - 1)


def top_ids(logits_sv: Array, maxima_si: Array, count: int) -> tuple[Array, Array]:
    """Return the `count` largest values of each row in falling order, with their ids, the least of equal ones first."""
    tiles = maxima_si.shape[1]
    if count >= tiles:
        return lax.top_k(logits_sv, count)
    # No other tile can hold one of them: the maximum of each of these tiles is as large as all other logits.
    chosen_si = jnp.sort(lax.top_k(maxima_si, count)[1], axis=1)
    candidates_sc = take_tiles(logits_sv, chosen_si, -jnp.inf).reshape(logits_sv.shape[0], -1)
    top_sk, places_sk = lax.top_k(candidates_sc, count)
    return top_sk, jnp.take_along_axis(_tile_ids(chosen_si).reshape(candidates_sc.shape), places_sk, axis=1)


def _first_where(is_it_si: Array) -> Array:
    """Return the first index at which each row is true, or its last index."""
    width = is_it_si.shape[1]
    return jnp.where(is_it_si, jnp.arange(width, dtype=jnp.int32), width - 1).min(axis=1)
