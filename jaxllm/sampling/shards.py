"""Sample from logits whose vocabulary several devices share: tiles' sums are exchanged, and a tile is chosen.

Tiles are cut as on one device, so all sums and tokens are the same. For code inside `jax.shard_map`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import jax.numpy as jnp
from jax import Array, lax

from jaxllm.sampling.tiles import TILE, split_tiles, take_tiles


@dataclass(frozen=True, slots=True)
class VocabShards:
    """The equal parts of a vocabulary on the devices of a mesh axis, which need not be whole tiles."""

    vocab_size: int
    num_devices: int
    axis: str | tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of ids that a device computes the logits of."""
        return self.vocab_size // self.num_devices

    @property
    def num_tiles(self) -> int:
        """The number of tiles of the vocabulary."""
        return -(-self.vocab_size // TILE)

    @property
    def tiles(self) -> int:
        """The number of tiles that a device reads."""
        return -(-self.num_tiles // self.num_devices)

    @property
    def borrowed(self) -> int:
        """The number of ids of the next device that the last tiles may reach into."""
        return (self.tiles * TILE - self.size) * self.num_devices

    @property
    def can_sample(self) -> bool:
        """Return whether tiles reach no further than that; a smaller vocabulary is gathered instead."""
        return self.vocab_size % self.num_devices == 0 and self.borrowed <= self.size


@dataclass(frozen=True, slots=True)
class ShardedRows:
    """A device's part of the rows, in whole tiles. See `tiles.Rows`."""

    logits_sv: Array
    shards: VocabShards

    @classmethod
    def of(cls, logits_sv: Array, shards: VocabShards) -> Self:
        """Return the device's part from the logits that it computed."""
        width = shards.tiles * TILE
        if shards.borrowed:
            neighbours = [(device + 1, device) for device in range(shards.num_devices - 1)]
            next_sv = lax.ppermute(logits_sv[:, : shards.borrowed], shards.axis, neighbours)
            # The tiles of device i begin i times the difference after its part.
            start = lax.axis_index(shards.axis) * (width - shards.size)
            logits_sv = lax.dynamic_slice_in_dim(jnp.concatenate([logits_sv, next_sv], axis=1), start, width, axis=1)
        ids_v = lax.axis_index(shards.axis) * width + jnp.arange(width, dtype=jnp.int32)
        return cls(jnp.where(ids_v < shards.vocab_size, logits_sv, -jnp.inf), shards)

    @property
    def vocab_size(self) -> int:
        return self.shards.vocab_size

    def each_tile(self, function: Callable[..., Array], *of_rows: Any) -> Array:
        own_si = function(split_tiles(self.logits_sv, -jnp.inf), *of_rows)
        return lax.all_gather(own_si, self.shards.axis, axis=1, tiled=True)[:, : self.shards.num_tiles]

    def take(self, tile_s: Array) -> Array:
        place_s = tile_s - lax.axis_index(self.shards.axis) * self.shards.tiles
        is_own_s = (place_s >= 0) & (place_s < self.shards.tiles)
        values_sj = take_tiles(self.logits_sv, jnp.where(is_own_s, place_s, 0)[:, None], -jnp.inf)[:, 0]
        return lax.psum(jnp.where(is_own_s[:, None], values_sj, 0.0), self.shards.axis)
