"""Size the KV pool, the slots of recurrent states and the features that are kept for a draft head."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.mesh import whole_spec
from jaxllm.models.params import MESH_AXES
from jaxllm.models.recurrence import StateOps
from jaxllm.scheduling.config import GroupConfig
from pallas_kernels.paged_attention import PoolAttention

CPU_POOL_BYTES = 2**30  # a small part of the host's memory; recurrent states, which are required, come on top
_COARSE_BLOCKS = 16  # the count is an argument shape: a few blocks more or less must not miss the compile cache


SPARE_PART = 0.25
"""The share of blocks for cached prefixes, on top of what the windows or chunks of all sequences take, and of slots for
snapshots of recurrent states, on top of one for each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """A cache group on one device."""

    attention: PoolAttention
    """The attention op of the device's heads."""
    num_layers: int
    window: int | None
    """The number of tokens whose keys a token reads, itself included; None for all before it, or in its chunk."""
    attention_chunk: int | None = None
    """The size of the chunks of positions within which tokens attend; None where there are none."""
    causal: bool = True
    """False if a sequence's keys and values are only read in the step that writes them."""

    @property
    def is_bounded(self) -> bool:
        """Return whether a request gives blocks back while it runs."""
        return self.config(1).is_bounded

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block, over all layers."""
        spec = self.attention.pool_spec(self.num_layers, 1)
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in spec)

    def config(self, num_blocks: int) -> GroupConfig:
        """Return the scheduler's settings of the group."""
        block_size = self.attention.shape.block_size
        tile_blocks = -(-self.attention.tiles.kv // block_size)
        return GroupConfig(
            num_blocks=num_blocks,
            window=self.window,
            attention_chunk=self.attention_chunk,
            tile_blocks=tile_blocks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGroup:
    """A group of layers with recurrent state on one device."""

    ops: StateOps
    """The ops of the device's channels and heads."""
    num_layers: int

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of a slot, over all layers."""
        spec = self.ops.pool_spec(self.num_layers, 1)
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in spec if x is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The KV cache of one device: its groups, and the limits that decide the number of blocks of each."""

    groups: tuple[KVGroup, ...]
    cross_groups: tuple[KVGroup, ...] = ()
    """The groups of an encoder's frames, which share block tables of their own."""
    num_frames: int = 0
    """The frames of a clip; 0 without such groups."""
    states: tuple[StateGroup, ...] = ()
    """The groups of layers with recurrent state, which all have the same number of slots."""
    max_drafts: int = 0
    """The most drafts of a sequence in a step."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    draft_groups: tuple[KVGroup, ...] = ()
    """The groups of a draft model, each with as many blocks as the largest group has."""
    features: FeatureGroup | None = None
    """The features that a draft head reads, in as many blocks too."""

    @property
    def block_size(self) -> int:
        return self.groups[0].attention.shape.block_size

    @property
    def draft_block_bytes(self) -> int:
        """Return the bytes of a block of the draft model, over all its layers, and of the features that it reads."""
        features = 0 if self.features is None else self.features.block_bytes
        return features + sum(group.block_bytes for group in self.draft_groups)

    @property
    def most_wanted(self) -> int:
        """Return the most blocks that the largest group can use, the null block included."""
        per_request = -(-self.max_model_len // self.block_size)
        if any(group.causal for group in self.groups):
            return 1 + self.max_num_seqs * per_request
        # Two steps, one of them in flight, with a part-filled block for each sequence.
        in_steps = 2 * -(-self.max_num_batched_tokens // self.block_size) + self.max_num_seqs
        return 1 + max(per_request, min(self.max_num_seqs * per_request, in_steps))

    @property
    def num_slots(self) -> int:
        """Return the number of slots of recurrent states with the null slot: one per sequence, and some for snapshots.

        A sequence that starts reads a snapshot's slot besides its own, so a single sequence needs two. If there are
        drafts, whose states take a slot each, all sequences can have one, or one sequence all of its drafts.
        """
        if not self.states:
            return 0
        snapshots = math.ceil(SPARE_PART * self.max_num_seqs) + 1
        drafts = self.max_num_seqs + self.max_drafts - 1 if self.max_drafts else 0
        return 1 + self.max_num_seqs + snapshots + drafts

    @property
    def state_bytes(self) -> int:
        """Return the bytes of all recurrent states."""
        return self.num_slots * sum(group.slot_bytes for group in self.states)

    @property
    def clip_blocks(self) -> int:
        """Return the blocks of a clip's frames."""
        return -(-self.num_frames // self.block_size)

    def num_cross_blocks(self, most: int) -> int:
        """Return the blocks of clips, the null block included, where the largest group has `most`.

        There are as many clips as requests of `max_model_len` tokens that fit there, and some more for cached ones.
        """
        if not self.cross_groups:
            return 0
        num_requests = max(1, min(self.max_num_seqs, (most - 1) // -(-self.max_model_len // self.block_size)))
        return 1 + self.clip_blocks * math.ceil((1 + SPARE_PART) * num_requests)

    def num_blocks(self, most: int) -> tuple[int, ...]:
        """Return the number of blocks of each group, null blocks included, if the largest has `most`.

        A group with a window or chunks gets what all sequences read and the tokens of a step take. It gets no more
        memory than groups without, until these have all that they can use, but always enough for one request.
        """
        unbounded = sum(group.block_bytes for group in self.groups if not group.is_bounded) + self.draft_block_bytes
        bounded = sum(group.block_bytes for group in self.groups if group.is_bounded)
        if not unbounded or not bounded:
            return (most,) * len(self.groups)
        share = most if most >= self.most_wanted else most * unbounded // bounded
        return tuple(min(most, self._num_bounded(group, share)) if group.is_bounded else most for group in self.groups)

    def _num_bounded(self, group: KVGroup, share: int) -> int:
        config = group.config(1)
        one = config.most_blocks(self.max_model_len, self.max_num_batched_tokens, self.block_size)
        decode = config.most_blocks(self.max_model_len, 1, self.block_size)
        step = -(-self.max_num_batched_tokens // self.block_size)
        everyone = math.ceil((1 + SPARE_PART) * (self.max_num_seqs * decode + step))
        return 1 + max(one, min(everyone, share))

    def bytes(self, most: int) -> int:
        """Return the bytes of all groups and of recurrent states, where the largest group has `most` blocks."""
        sizes, fixed = self.num_blocks(most), self.state_bytes + most * self.draft_block_bytes
        fixed += self.num_cross_blocks(most) * sum(group.block_bytes for group in self.cross_groups)
        return fixed + sum(size * group.block_bytes for size, group in zip(sizes, self.groups, strict=True))

    def most_blocks(self, num_bytes: int) -> int:
        """Return the most blocks that the largest group can have if all groups take at most `num_bytes`."""
        largest = [group for group in self.groups if not group.is_bounded] or self.groups
        block_bytes = self.draft_block_bytes + sum(group.block_bytes for group in largest)
        if not block_bytes:  # nothing attends: any number fits where the recurrent states do
            return self.most_wanted if self.bytes(1) <= num_bytes else 0
        least, beyond = 0, 1 + num_bytes // block_bytes
        while least + 1 < beyond:
            middle = (least + beyond) // 2
            least, beyond = (middle, beyond) if self.bytes(middle) <= num_bytes else (least, middle)
        return least


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """The inputs that decide the size of the pool."""

    layout: KVLayout
    num_devices: int = 1
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | None
    """The size of the KV cache on one device, if the user set it."""
    memory_limit: int | None
    """The bytes of one device that the engine may use; None for the CPU's own rule."""

    @property
    def max_model_len(self) -> int:
        return self.layout.max_model_len

    @property
    def block_size(self) -> int:
        return self.layout.block_size


def count_blocks(request: PoolRequest, *, used_bytes: int) -> int:
    """Return the number of blocks, the null block included; `used_bytes` is what parameters and scratch take.

    Raises VLLMValidationError when the pool would not hold one request of `max_model_len` tokens.
    """
    _check_states(request)
    blocks, parameter = _available(request, used_bytes)
    _check_room(request, blocks, used_bytes)
    needed = _blocks_per_request(request) + 1
    if blocks >= needed:
        return blocks
    fits, layout = most_tokens(request, used_bytes=used_bytes), request.layout
    ways = [f"raise {parameter} (one request needs {needed} blocks, {layout.bytes(needed) / 2**20:.0f} MiB)"]
    if fits:
        ways.append(f"set max_model_len to {fits} or less")
    if layout.states:
        states = f"{layout.state_bytes / 2**20:.0f} MiB"
        ways.append(f"lower max_num_seqs={layout.max_num_seqs}, whose recurrent states take {states}")
    raise VLLMValidationError(
        f"The KV cache has room for {fits} tokens, less than max_model_len={request.max_model_len}: "
        f"{' or '.join(ways)}.",
        parameter=parameter,
        value=getattr(request, parameter, None),
    )


def _check_states(request: PoolRequest) -> None:
    """Refuse more recurrent states than a CPU's memory holds; on other platforms they come out of the pool."""
    layout, room = request.layout, host_bytes() // 2
    asked = layout.state_bytes * request.num_devices
    if request.memory_limit is None and asked > room:
        raise VLLMValidationError(
            f"max_num_seqs={layout.max_num_seqs}: the recurrent states of these sequences and their snapshots take "
            f"{asked / 2**30:.1f} GiB, more than half of the memory: lower it.",
            parameter="max_num_seqs",
            value=layout.max_num_seqs,
        )


def host_bytes() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_room(request: PoolRequest, blocks: int, used_bytes: int) -> None:
    """Refuse a user's number of blocks that memory cannot hold; no other setting can give one."""
    asked = request.layout.bytes(blocks)
    room = request.memory_limit
    room = host_bytes() if room is None else room - used_bytes
    if request.num_gpu_blocks_override is None or asked <= room:
        return
    raise VLLMValidationError(
        f"num_gpu_blocks_override={blocks} blocks take {asked / 2**30:.1f} GiB, more than the {room / 2**30:.1f} GiB "
        f"there are: lower it to {request.layout.most_blocks(max(0, room))} or less.",
        parameter="num_gpu_blocks_override",
        value=blocks,
    )


def most_tokens(request: PoolRequest, *, used_bytes: int) -> int:
    """Return the length of the longest request that the pool can hold."""
    blocks, _ = _available(request, used_bytes)
    return max(0, blocks - 1) * request.block_size


def _blocks_per_request(request: PoolRequest) -> int:
    """Return the blocks of a request of `max_model_len` tokens."""
    return -(-request.max_model_len // request.block_size)


def _available(request: PoolRequest, used_bytes: int) -> tuple[int, str]:
    """Return the number of blocks that there is room for, and the setting that decides it."""
    if request.num_gpu_blocks_override is not None:
        return request.num_gpu_blocks_override, "num_gpu_blocks_override"
    most = request.layout.most_wanted
    if request.kv_cache_memory_bytes is not None:
        return min(request.layout.most_blocks(request.kv_cache_memory_bytes), most), "kv_cache_memory_bytes"
    if request.memory_limit is None:
        # Virtual devices share the host's memory.
        room = CPU_POOL_BYTES // request.num_devices + request.layout.state_bytes
        return _coarse(request.layout.most_blocks(room), most), "kv_cache_memory_bytes"
    free = max(0, request.memory_limit - used_bytes)
    return _coarse(request.layout.most_blocks(free), most), "gpu_memory_utilization"


def _coarse(blocks: int, most: int) -> int:
    """Return `most` if there is room for as many blocks, else a round number."""
    if blocks >= most:
        return most
    return blocks // _COARSE_BLOCKS * _COARSE_BLOCKS if blocks >= 4 * _COARSE_BLOCKS else blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureGroup:
    """The form of a pool of features [blocks, block size, f], the last axis shared among the devices."""

    size: int
    """The number of features of a token."""
    dtype: Any
    block_size: int
    group: int
    """The cache group that has the same block tables and the same number of blocks."""
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
