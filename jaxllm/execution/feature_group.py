"""The features of tokens are kept for a draft head in blocks, as keys and values are, and by the same block tables."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jaxllm.execution.mesh import whole_spec
from jaxllm.models.params import MESH_AXES


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureGroup:
    """The form of a pool of features [blocks, block size, f], of whose numbers each device has a share."""

    size: int
    """How many numbers a token's features are."""
    dtype: Any
    block_size: int
    group: int
    """The cache group whose block tables it shares, with as many blocks."""
    num_shards: int = 1

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block on one device."""
        return math.prod(self.pool_spec(1).shape) * jnp.dtype(self.dtype).itemsize

    @property
    def cut(self) -> PartitionSpec:
        """Return how the pool is spread over devices."""
        return PartitionSpec(None, None, MESH_AXES if self.num_shards > 1 else None)

    def pool_spec(self, num_blocks: int) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of one device's share of the pool."""
        shape = num_blocks, self.block_size, self.size // self.num_shards
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))

    def whole_spec(self, num_blocks: int, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """Return shape, dtype and sharding of the whole pool."""
        return whole_spec(mesh, self.pool_spec(num_blocks), self.cut)

    def write(self, pool: Array, features_tf: Array, slots_t: Array) -> Array:
        """Return the pool, which is donated, with the features of a step's tokens."""
        return pool.at[slots_t // self.block_size, slots_t % self.block_size].set(features_tf.astype(pool.dtype))

    def read(self, pool: Array, slots_t: Array) -> Array:
        """Return the features of tokens, [t, f]."""
        return pool[slots_t // self.block_size, slots_t % self.block_size]

    def copy(self, pool: Array, sources_c: Array, targets_c: Array) -> Array:
        """Return the pool, which is donated, with blocks copied; a pair of null blocks does nothing."""
        return pool.at[targets_c].set(pool[sources_c])
