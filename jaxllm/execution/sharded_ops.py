"""Run attention and recurrent-state ops on several devices: each takes its own heads and its share of the pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jaxllm.execution.mesh import pool_spec, state_pool_specs
from jaxllm.models.layers.recurrent import StateInputs
from jaxllm.models.params import MESH_AXES
from jaxllm.models.recurrence import StateOps, StatePools
from pallas_kernels.indexer import Indexer, IndexerPool
from pallas_kernels.latent_attention import LatentAttention, LatentPool
from pallas_kernels.paged_attention import AttentionBatch, KVPool, NoAttention, PagedAttention, PoolAttention, Rope
from pallas_kernels.recurrent_state import StateBatch

_HEADS = PartitionSpec(None, MESH_AXES)
_EVERYWHERE = PartitionSpec()


@dataclass(frozen=True)
class _ShardedAttention:
    """`PagedAttention` for all heads of a model; `attention` takes the heads of one device."""

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
        """Attend as `PagedAttention` does; everything but the batch and `rope` is sharded over heads."""

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

    def read(self, kv_pool: KVPool, slots_t: Array, *, layer: Array | int, num_layers: int) -> tuple[Array, Array]:
        """Return the keys and values of all heads that slots hold, as `PagedAttention.read` does."""

        def read(kv_pool: KVPool, slots_t: Array, layer: Array) -> tuple[Array, Array]:
            return self.attention.read(kv_pool, slots_t, layer=layer, num_layers=num_layers)

        specs = pool_spec(is_cut=True), _EVERYWHERE, _EVERYWHERE
        sharded = jax.shard_map(read, mesh=self.mesh, in_specs=specs, out_specs=(_HEADS, _HEADS), check_vma=False)
        return sharded(kv_pool, slots_t, jnp.asarray(layer, jnp.int32))


@dataclass(frozen=True)
class _ShardedLatentAttention:
    """`LatentAttention` for all heads of a model; `attention` takes the heads of one device."""

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
        chosen_tw: Array | None = None,
        **settings: Any,
    ) -> tuple[Array, LatentPool]:
        """Attend as `LatentAttention` does; queries are sharded over heads, and everything else is replicated."""

        def attend(q_tnh: Array, *rest: Any) -> Any:
            *inputs, layer, chosen_tw = rest
            return self.attention(q_tnh, *inputs, layer=layer, chosen_tw=chosen_tw, **settings)

        # The kernels' outputs do not say along which axes they differ between devices.
        sharded = jax.shard_map(
            attend,
            mesh=self.mesh,
            in_specs=(_HEADS, *[_EVERYWHERE] * 5),
            out_specs=(_HEADS, _EVERYWHERE),
            check_vma=False,
        )
        return sharded(q_tnh, latents_th, kv_pool, batch, layer, chosen_tw)


@dataclass(frozen=True)
class _ReplicatedIndexer:
    """`Indexer` on each device, which all have its pool and do the same."""

    indexer: Indexer
    mesh: Mesh

    def __call__(self, *arrays: Any, layer: Array | int, num_layers: int) -> tuple[Array, IndexerPool]:
        """Choose tokens as `Indexer` does."""

        def choose(*inputs: Any) -> Any:
            *arrays, layer = inputs
            return self.indexer(*arrays, layer=layer, num_layers=num_layers)

        specs = {"in_specs": _EVERYWHERE, "out_specs": _EVERYWHERE, "check_vma": False}
        return jax.shard_map(choose, mesh=self.mesh, **specs)(*arrays, layer)


def shard(
    attention: PoolAttention, mesh: Mesh
) -> _ShardedAttention | _ShardedLatentAttention | _ReplicatedIndexer | NoAttention:
    """Return an op for all heads of a model; `attention` takes the heads of one device."""
    if isinstance(attention, NoAttention):
        return attention
    if isinstance(attention, Indexer):
        return _ReplicatedIndexer(attention, mesh)
    if isinstance(attention, LatentAttention):
        return _ShardedLatentAttention(attention, mesh)
    assert isinstance(attention, PagedAttention)
    return _ShardedAttention(attention, mesh)


@dataclass(frozen=True)
class ShardedRecurrence:
    """The ops of a group of layers with recurrent state; `ops` take the share of one device."""

    ops: StateOps
    mesh: Mesh

    def __call__(
        self, inputs: StateInputs, pools: StatePools, batch: StateBatch, *, layer: Array | int, **settings: Any
    ) -> tuple[Array, StatePools]:
        """Do as `StateOps.run` does, on every device with its share of inputs and pools; outputs share axis 1."""

        def run(inputs: StateInputs, pools: StatePools, batch: StateBatch, layer: Array | int) -> Any:
            return self.ops.run(inputs, pools, batch, layer=layer, **settings)

        def spec_of(axis: int | None) -> PartitionSpec:
            return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, MESH_AXES)

        # None stands for an input that a layer lacks.
        pairs, make = zip(inputs, inputs.sharded_axes, strict=True), cast(Any, type(inputs))
        shares = make(*(None if x is None else spec_of(axis) for x, axis in pairs))
        places = state_pool_specs(pools)
        sharded = jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=(shares, places, PartitionSpec(), PartitionSpec()),
            out_specs=(PartitionSpec(None, MESH_AXES), places),
            check_vma=False,
        )
        return sharded(inputs, pools, batch, layer)
