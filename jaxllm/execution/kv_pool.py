"""The KV pool is sized and made here."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from jaxllm.exceptions import VLLMValidationError
from jaxllm.models.config import ModelConfig
from pallas_kernels.paged_attention import PagedAttention

CPU_POOL_BYTES = 2**30  # the host's memory is not ours to fill
COARSE_BLOCKS = 16  # the count is an argument shape: a few blocks more or less must not miss the compile cache


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """Everything that decides the size of the pool."""

    model_config: ModelConfig
    attention: PagedAttention
    """The attention op of one device's heads."""
    num_devices: int = 1
    max_num_seqs: int
    max_model_len: int
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | None
    """The size of the KV cache on one device, if the user named it."""
    memory_limit: int | None
    """The bytes of one device that the engine may use; None for the CPU's own rule."""

    @property
    def block_size(self) -> int:
        return self.attention.shape.block_size


def block_bytes(request: PoolRequest) -> int:
    """Return the bytes of one device's part of a block, over all layers."""
    spec = request.attention.pool_spec(request.model_config.num_layers, 1)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in spec)


def count_blocks(request: PoolRequest, *, used_bytes: int) -> int:
    """Return the number of blocks, the null block counted; `used_bytes` is what parameters and scratch take.

    Raises VLLMValidationError when the pool would not hold one request of `max_model_len` tokens.
    """
    blocks, parameter = _available(request, used_bytes)
    _check_room(request, blocks, used_bytes)
    needed = blocks_per_request(request) + 1
    if blocks >= needed:
        return blocks
    fits = most_tokens(request, used_bytes=used_bytes)
    raise VLLMValidationError(
        f"The KV cache has room for {fits} tokens, less than max_model_len={request.max_model_len}: "
        f"raise {parameter} (one request needs {needed} blocks, {needed * block_bytes(request) / 2**20:.0f} MiB) "
        f"or set max_model_len to {fits} or less.",
        parameter=parameter,
        value=getattr(request, parameter, None),
    )


def _check_room(request: PoolRequest, blocks: int, used_bytes: int) -> None:
    """Refuse a number of blocks that no memory here holds; other settings never give one."""
    asked = blocks * block_bytes(request)
    room = request.memory_limit
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if room is None else room - used_bytes
    if request.num_gpu_blocks_override is None or asked <= room:
        return
    raise VLLMValidationError(
        f"num_gpu_blocks_override={blocks} blocks take {asked / 2**30:.1f} GiB, more than the {room / 2**30:.1f} GiB "
        f"there are: lower it to {max(0, room // block_bytes(request))} or less.",
        parameter="num_gpu_blocks_override",
        value=blocks,
    )


def most_tokens(request: PoolRequest, *, used_bytes: int) -> int:
    """Return the length of the longest request that the pool can hold."""
    blocks, _ = _available(request, used_bytes)
    return max(0, blocks - 1) * request.block_size


def blocks_per_request(request: PoolRequest) -> int:
    """Return the blocks of a request of `max_model_len` tokens."""
    return -(-request.max_model_len // request.block_size)


def _available(request: PoolRequest, used_bytes: int) -> tuple[int, str]:
    """Return how many blocks there is room for, and the setting that decides it."""
    if request.num_gpu_blocks_override is not None:
        return request.num_gpu_blocks_override, "num_gpu_blocks_override"
    most = request.max_num_seqs * blocks_per_request(request) + 1
    if request.kv_cache_memory_bytes is not None:
        return min(request.kv_cache_memory_bytes // block_bytes(request), most), "kv_cache_memory_bytes"
    if request.memory_limit is None:
        # Virtual devices share the host's memory.
        blocks = CPU_POOL_BYTES // (request.num_devices * block_bytes(request))
        return min(_coarse(blocks), most), "kv_cache_memory_bytes"
    free = max(0, request.memory_limit - used_bytes)
    return min(_coarse(free // block_bytes(request)), most), "gpu_memory_utilization"


def _coarse(blocks: int) -> int:
    return blocks // COARSE_BLOCKS * COARSE_BLOCKS if blocks >= 4 * COARSE_BLOCKS else blocks
