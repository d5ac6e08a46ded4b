"""Attention is spread over devices: each runs the op on its own heads, and its own part of the pool if that is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jaxllm.execution.mesh import pool_spec
from jaxllm.models.params import MESH_AXES
from pallas_kernels.latent_attention import LatentAttention, LatentPool
from pallas_kernels.paged_attention import AttentionBatch, KVPool, PagedAttention, PoolAttention, Rope

_HEADS = PartitionSpec(None, MESH_AXES)
_EVERYWHERE = PartitionSpec()


@dataclass(frozen=True)
class ShardedAttention:
    """`PagedAttention` for all heads of a model, of which `attention` takes one device's."""

    attention: PagedAttention
    mesh: Mesh

    def __call__(
        self,
        q_tnh: Array,
        k_tkh: Array,
        v_tkh: Array,
        kv_pool: KVPool,
        batch: AttentionBatch,
        *,
        layer: Array | int,
        window: Array | int,
        rope: Rope | None = None,
        sinks_n: Array | None = None,
        **settings: Any,
    ) -> tuple[Array, KVPool]:
        """Attend as `PagedAttention` does; everything is sharded over heads but the batch and `rope`."""

        def attend(
            heads: tuple[Array, Array, Array], sinks_n: Any, kv_pool: KVPool, batch: AttentionBatch, shared: Any
        ) -> Any:
            layer, window, rope = shared
            return self.attention(
                *heads, kv_pool, batch, layer=layer, window=window, rope=rope, sinks_n=sinks_n, **settings
            )

        pool = pool_spec(is_cut=True)
        # The kernels' outputs do not say along which axes they differ between devices.
        sharded = jax.shard_map(
            attend,
            mesh=self.mesh,
            in_specs=(_HEADS, PartitionSpec(MESH_AXES), pool, _EVERYWHERE, _EVERYWHERE),
            out_specs=(_HEADS, pool),
            check_vma=False,
        )
        return sharded((q_tnh, k_tkh, v_tkh), sinks_n, kv_pool, batch, (layer, window, rope))


@dataclass(frozen=True)
class ShardedLatentAttention:
    """`LatentAttention` for all heads of a model, of which `attention` takes one device's."""

    attention: LatentAttention
    mesh: Mesh

    def __call__(
        self,
        q_tnh: Array,
        latents_th: Array,
        kv_pool: LatentPool,
        batch: AttentionBatch,
        *,
        layer: Array | int,
        **settings: Any,
    ) -> tuple[Array, LatentPool]:
        """Attend as `LatentAttention` does; queries are sharded over heads, and all else is everywhere."""

        def attend(q_tnh: Array, *rest: Any) -> Any:
            *inputs, layer = rest
            return self.attention(q_tnh, *inputs, layer=layer, **settings)

        # The kernels' outputs do not say along which axes they differ between devices.
        sharded = jax.shard_map(
            attend,
            mesh=self.mesh,
            in_specs=(_HEADS, *[_EVERYWHERE] * 4),
            out_specs=(_HEADS, _EVERYWHERE),
            check_vma=False,
        )
        return sharded(q_tnh, latents_th, kv_pool, batch, layer)


def shard(attention: PoolAttention, mesh: Mesh) -> ShardedAttention | ShardedLatentAttention:
    """Return an op for all heads of a model, of which `attention` takes one device's."""
    if isinstance(attention, LatentAttention):
        return ShardedLatentAttention(attention, mesh)
    assert isinstance(attention, PagedAttention)
    return ShardedAttention(attention, mesh)
