"""The caches of a model: keys and values, latents and recurrent states, with the ops that read and write them.

Each cache group has one array, or a few. Layers that attend to tokens come first, as in `LayerPlan.groups`, then those
that attend to an encoder's frames, then layers with recurrent state. If there is a draft head, the pool of the features
that it reads is the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.execution.kv_pool import KVLayout
from jaxllm.execution.mesh import pool_spec, state_pool_specs, whole_spec
from jaxllm.execution.packing import PackedInputs
from jaxllm.execution.sharded_ops import ShardedRecurrence, shard
from pallas_kernels.paged_attention import copy_blocks

type Pools = tuple[Any, ...]
"""The pool of each cache group: a KVPool, a LatentPool or StatePools. That of features comes last, if it exists."""


class Caches:
    """The caches of a model on the devices of a mesh; `layout` describes one device's."""

    def __init__(self, layout: KVLayout, mesh: Mesh) -> None:
        self._layout, self._mesh = layout, mesh
        self._attention = [group.attention for group in (*layout.groups, *layout.cross_groups)]
        self._states = [group.ops for group in layout.states]
        self._depths = [group.num_layers for group in (*layout.groups, *layout.cross_groups, *layout.states)]

    @property
    def block_size(self) -> int:
        """Return the number of tokens of a block."""
        return self._layout.block_size

    @property
    def _ops(self) -> list[Any]:
        return [*self._attention, *self._states]

    @property
    def attention(self) -> list[Any]:
        """Return the attention op of each group of layers that attend, for all devices."""
        return [shard(op, self._mesh) for op in self._attention]

    def arguments(self, inputs: PackedInputs, *, decodes_only: bool) -> dict[str, Any]:
        """Return what `Model.forward` takes in a step besides weights, pools and tokens."""
        attend = self.attention
        recur = [ShardedRecurrence(ops, self._mesh) for ops in self._states]
        batches = [
            *inputs.batches(decodes_only=decodes_only),
            *[inputs.state_batch(decodes_only=decodes_only)] * len(recur),
        ]
        return {"batches": batches, "attention": [*attend, *recur]}

    def of_layers(self, pools: Pools) -> Pools:
        """Return the pools of the layers: all pools but that of features."""
        return pools[: len(self._ops)]

    def with_features(self, layers: Pools, pools: Pools, features_tf: Array, inputs: PackedInputs) -> Pools:
        """Return the pools of `layers`, and the pool of features, the last of `pools`, with `features_tf` written.

        Without a draft head there are no features.
        """
        group = self._layout.features
        if group is None:
            return layers
        slots_t = inputs.placements[group.group].slots_t
        return *layers, group.write(pools[-1], features_tf, slots_t)

    def specs(self, num_blocks: int) -> Pools:
        """Return shape, dtype and sharding of each pool; each device holds the part that its own heads read.

        The largest has `num_blocks` blocks.
        """
        local = self._local_specs(num_blocks)
        whole = partial(whole_spec, self._mesh)
        return tuple(jax.tree.map(whole, pool, cuts) for pool, cuts in zip(local, self._cuts(local), strict=True))

    def _local_specs(self, num_blocks: int) -> Pools:
        layout = self._layout
        of_clips = [layout.num_cross_blocks(num_blocks)] * len(layout.cross_groups)
        sizes = [*layout.num_blocks(num_blocks), *of_clips, *[layout.num_slots] * len(self._states)]
        groups = zip(self._ops, self._depths, sizes, strict=True)
        of_layers = tuple(op.pool_spec(depth, size) for op, depth, size in groups)
        features = layout.features
        return of_layers if features is None else (*of_layers, features.pool_spec(num_blocks))

    def _cuts(self, pools: Pools) -> Pools:
        """Return the spec of each array's sharding."""
        attention = zip(self._attention, pools, strict=False)
        of_keys = (jax.tree.map(lambda _, op=op: pool_spec(is_cut=op.cuts_pool), pool) for op, pool in attention)
        of_states = map(state_pool_specs, pools[len(self._attention) : len(self._ops)])
        features = self._layout.features
        return (*of_keys, *of_states, *([] if features is None else [features.cut]))

    def make(self, num_blocks: int) -> Pools:
        """Make the pools of `specs`; traced."""
        specs = self._local_specs(num_blocks)

        def make_own() -> Pools:
            of_layers = (op.make_pool(spec) for op, spec in zip(self._ops, specs, strict=False))
            return (*of_layers, *(jnp.zeros(spec.shape, spec.dtype) for spec in specs[len(self._ops) :]))

        make_pools = jax.shard_map(
            make_own,
            mesh=self._mesh,
            in_specs=(),
            out_specs=self._cuts(specs),
            check_vma=False,
        )
        return make_pools()

    def settle(self, pools: Pools) -> None:
        """Prepare the memory of new pools for use; not traced."""
        for op, pool, depth in zip(self._ops, self.of_layers(pools), self._depths, strict=True):
            op.settle_pool(pool, depth)

    def copy(self, pools: Pools, pairs: Sequence[tuple[Array, Array]]) -> Pools:
        """Copy blocks of each group of tokens' keys and values, from the first of a pair to the second; traced."""
        num_groups, features = len(self._layout.groups), self._layout.features
        groups = zip(pools[:num_groups], pairs, self._depths, strict=False)
        copied = (
            *(copy_blocks(pool, *pair, num_layers=depth) if depth else pool for pool, pair, depth in groups),
            *pools[num_groups:],
        )
        return copied if features is None else (*copied[:-1], features.copy(copied[-1], *pairs[features.group]))

    def moved(self, pools: Pools, holder: int) -> list[tuple[Array, int]]:
        """Return the arrays that hold the blocks of a cache group, or the slots of recurrent state after all groups.

        Each comes with its number of layers. Those of an encoder's frames are not among them.
        """
        layout = self._layout
        num_groups, num_attending = len(layout.groups), len(self._attention)
        if holder < num_groups:
            arrays = [(array, self._depths[holder]) for array in pools[holder]] if self._depths[holder] else []
            reads = layout.features is not None and layout.features.group == holder
            return [*arrays, (pools[-1], 1)] if reads else arrays
        states = zip(pools[num_attending : len(self._ops)], self._depths[num_attending:], strict=True)
        return [(array, depth) for pool, depth in states for array in pool if array is not None]

    def read_blocks(self, pools: Pools, ids_m: Array, *, holder: int) -> tuple[Array, ...]:
        """Return the content [m, layers, ...] of blocks, for each array of a holder; traced."""
        return tuple(array[_of_all_layers(array, depth, ids_m)] for array, depth in self.moved(pools, holder))

    def fill_blocks(self, pools: Pools, ids_m: Array, content: tuple[Array, ...], *, holder: int) -> Pools:
        """Write what `read_blocks` returned to blocks; a negative id stands for none. Donate the pools; traced."""
        moved = self.moved(pools, holder)
        filled = {
            id(array): array.at[_of_all_layers(array, depth, ids_m)].set(new, mode="drop")
            for (array, depth), new in zip(moved, content, strict=True)
        }
        return jax.tree.map(lambda array: filled.get(id(array), array), pools)

    def block_specs(self, num_blocks: int, holder: int, num_moved: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return shape, dtype and sharding of what `read_blocks` returns for `num_moved` blocks."""

        def spec(array: Any, depth: int) -> jax.ShapeDtypeStruct:
            assert isinstance(array.sharding, NamedSharding)
            sharding = NamedSharding(self._mesh, PartitionSpec(None, None, *array.sharding.spec[1:]))
            return jax.ShapeDtypeStruct((num_moved, depth, *array.shape[1:]), array.dtype, sharding=sharding)

        return tuple(spec(array, depth) for array, depth in self.moved(self.specs(num_blocks), holder))

    def prepare(self, folder: Path | None) -> None:
        """Prepare this process to load a program that another process compiled."""
        for op in self._ops:
            op.prepare(folder)


def _of_all_layers(array: Array, num_layers: int, ids_m: Array) -> Array:
    """Return the indices [m, layers] of blocks along an array's first axis; negative ids get none."""
    num_blocks = array.shape[0] // num_layers
    rows_ml = ids_m[:, None] + num_blocks * jnp.arange(num_layers, dtype=jnp.int32)
    return jnp.where(ids_m[:, None] < 0, array.shape[0], rows_ml)
