"""The caches of a model: keys and values, latents and recurrent states, with the ops that read and write them.

There is one array, or a few, for each cache group. Layers that attend come first, as in `LayerPlan.groups`, then those
with recurrent state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.paged_attention import copy_blocks

from .kv_pool import KVLayout
from .mesh import pool_spec, state_pool_specs
from .packing import PackedInputs
from .sharded_attention import shard
from .sharded_recurrence import ShardedRecurrence

type Pools = tuple[Any, ...]
"""The pool of each cache group: a KVPool, a LatentPool or StatePools."""


class Caches:
    """The caches of a model on the devices of a mesh, of which `layout` says how each has its own."""

    def __init__(self, layout: KVLayout, mesh: Mesh) -> None:
        self._layout, self._mesh = layout, mesh
        self._attention = [group.attention for group in layout.groups]
        self._states = [group.ops for group in layout.states]
        self._depths = [group.num_layers for group in (*layout.groups, *layout.states)]

    @property
    def _ops(self) -> list[Any]:
        return [*self._attention, *self._states]

    def arguments(self, inputs: PackedInputs, *, decodes_only: bool) -> dict[str, Any]:
        """Return what `Model.forward` takes in a step besides weights, pools and tokens."""
        attend = [shard(op, self._mesh) for op in self._attention]
        recur = [ShardedRecurrence(ops, self._mesh) for ops in self._states]
        batches = [
            *inputs.batches(decodes_only=decodes_only),
            *[inputs.state_batch(decodes_only=decodes_only)] * len(recur),
        ]
        return {"batches": batches, "attention": [*attend, *recur]}

    def specs(self, num_blocks: int) -> Pools:
        """Return shape, dtype and sharding of each pool, of which each device holds what its own heads read.

        The largest has `num_blocks` blocks.
        """
        local = self._local_specs(num_blocks)
        return tuple(jax.tree.map(self._whole, pool, cuts) for pool, cuts in zip(local, self._cuts(local), strict=True))

    def _whole(self, x: jax.ShapeDtypeStruct, cut: PartitionSpec) -> jax.ShapeDtypeStruct:
        axes = [*cut, *[None] * (len(x.shape) - len(cut))]
        shape = tuple(size * (1 if axis is None else self._mesh.size) for size, axis in zip(x.shape, axes, strict=True))
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(self._mesh, cut))

    def _local_specs(self, num_blocks: int) -> Pools:
        sizes = [*self._layout.num_blocks(num_blocks), *[self._layout.num_slots] * len(self._states)]
        each = zip(self._ops, self._depths, sizes, strict=True)
        return tuple(op.pool_spec(depth, size) for op, depth, size in each)

    def _cuts(self, pools: Pools) -> Pools:
        """Return the spec of each array's sharding."""
        attention = zip(self._attention, pools, strict=False)
        of_keys = (jax.tree.map(lambda _, op=op: pool_spec(is_cut=op.cuts_pool), pool) for op, pool in attention)
        return (*of_keys, *map(state_pool_specs, pools[len(self._attention) :]))

    def make(self, num_blocks: int) -> Pools:
        """Make the pools of `specs`; traced."""
        specs = self._local_specs(num_blocks)
        make_pools = jax.shard_map(
            lambda: tuple(op.make_pool(spec) for op, spec in zip(self._ops, specs, strict=True)),
            mesh=self._mesh,
            in_specs=(),
            out_specs=self._cuts(specs),
            check_vma=False,
        )
        return make_pools()

    def settle(self, pools: Pools) -> None:
        """Do what the memory of new pools needs before it is used; not traced."""
        for op, pool, depth in zip(self._ops, pools, self._depths, strict=True):
            op.settle_pool(pool, depth)

    def copy(self, pools: Pools, pairs: Sequence[tuple[Array, Array]]) -> Pools:
        """Copy blocks of each group of keys and values, from the first of a pair to the second; traced."""
        num_groups = len(self._attention)
        each = zip(pools[:num_groups], pairs, self._depths, strict=False)
        return (*(copy_blocks(pool, *pair, num_layers=depth) for pool, pair, depth in each), *pools[num_groups:])

    def prepare(self, folder: Path | None) -> None:
        """Do what must be done in a process before it loads a program that another one compiled."""
        for op in self._ops:
            op.prepare(folder)
