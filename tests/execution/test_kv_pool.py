"""The number of blocks is that by hand for a small model."""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.kv_pool import (
    CPU_POOL_BYTES,
    KVGroup,
    KVLayout,
    PoolRequest,
    StateGroup,
    count_blocks,
    most_tokens,
)
from jaxllm.models.mixer_specs import SelectiveSpec
from jaxllm.models.recurrence import pick_state_ops
from pallas_kernels.paged_attention import BlockShape, NoAttention
from tests.execution.support import make_compiler, make_group

LAYOUT = KVLayout(groups=(make_group(),), max_num_seqs=4, max_num_batched_tokens=256, max_model_len=100)
BASE = PoolRequest(layout=LAYOUT, num_gpu_blocks_override=None, kv_cache_memory_bytes=None, memory_limit=None)
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, K and V, kv heads, head dim, block size, bytes


def pick_xla(op: Any, shape: Any) -> Any:
    return op.pick(shape, "cpu", "xla")[0]


def with_layout(request: PoolRequest, **changes: int) -> PoolRequest:
    return replace(request, layout=replace(request.layout, **changes))


def test_bytes_of_a_block() -> None:
    assert make_group().block_bytes == BLOCK_BYTES
    assert make_group(dtype=jnp.bfloat16).block_bytes == BLOCK_BYTES // 2
    [pool] = make_compiler().caches.specs(9)
    assert sum(math.prod(array.shape) * array.dtype.itemsize for array in pool) == 9 * BLOCK_BYTES == LAYOUT.bytes(9)


def test_cpu_takes_what_its_sequences_can_use_up_to_a_gibibyte() -> None:
    assert count_blocks(BASE, used_bytes=0) == 4 * 7 + 1
    many = count_blocks(with_layout(BASE, max_num_seqs=10**6), used_bytes=0)
    assert 0 <= CPU_POOL_BYTES - many * BLOCK_BYTES < 16 * BLOCK_BYTES


def test_overrides_hold() -> None:
    assert count_blocks(replace(BASE, num_gpu_blocks_override=33), used_bytes=0) == 33
    assert count_blocks(replace(BASE, kv_cache_memory_bytes=10 * BLOCK_BYTES + 5), used_bytes=0) == 10


def test_an_accelerator_gives_what_parameters_and_scratch_leave() -> None:
    request = with_layout(replace(BASE, memory_limit=2000 * BLOCK_BYTES), max_num_seqs=1000)
    assert count_blocks(request, used_bytes=500 * BLOCK_BYTES) == 1500 // 16 * 16
    # A little more or less memory in use must not change the programs' shapes.
    assert count_blocks(request, used_bytes=501 * BLOCK_BYTES) == count_blocks(request, used_bytes=503 * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"num_gpu_blocks_override": 7}, "num_gpu_blocks_override"),
        ({"kv_cache_memory_bytes": 3 * BLOCK_BYTES}, "kv_cache_memory_bytes"),
        ({"max_model_len": 10**7, "max_num_seqs": 1}, "kv_cache_memory_bytes"),
        ({"memory_limit": 20 * BLOCK_BYTES}, "gpu_memory_utilization"),
    ],
)
def test_too_little_for_one_request_is_an_error_that_names_the_way_out(changes: dict, parameter: str) -> None:
    of_layout = {name: changes[name] for name in changes if hasattr(LAYOUT, name)}
    others = {name: changes[name] for name in changes if name not in of_layout}
    request = with_layout(replace(BASE, **others), **of_layout)
    with pytest.raises(VLLMValidationError, match=f"raise {parameter} .*or set max_model_len to") as error:
        count_blocks(request, used_bytes=15 * BLOCK_BYTES)
    assert error.value.parameter == parameter
    fits = most_tokens(request, used_bytes=15 * BLOCK_BYTES)
    if fits:
        count_blocks(with_layout(request, max_model_len=fits), used_bytes=15 * BLOCK_BYTES)


def test_where_nothing_attends_blocks_take_no_memory_and_states_all_of_it() -> None:
    nothing = KVGroup(attention=NoAttention(BlockShape(16, jnp.float32)), num_layers=0, window=None)
    scan = pick_state_ops(SelectiveSpec(num_channels=8, state_dim=4, dt_rank=2, conv_size=4), 1, jnp.float32, pick_xla)
    layout = replace(LAYOUT, groups=(nothing,), states=(StateGroup(ops=scan, num_layers=3),))
    state_bytes = (1 + 4 + 1 + 1) * 3 * 8 * (3 + 4) * 4  # slots, layers, channels, numbers of a channel, bytes
    assert (nothing.block_bytes, layout.bytes(2), layout.bytes(10**6)) == (0, state_bytes, state_bytes)
    request = replace(BASE, layout=layout)
    assert count_blocks(request, used_bytes=0) == layout.most_wanted == 4 * 7 + 1
    assert count_blocks(replace(request, memory_limit=state_bytes + 9), used_bytes=9) == layout.most_wanted
    assert count_blocks(replace(request, num_gpu_blocks_override=12, memory_limit=state_bytes), used_bytes=0) == 12
    with pytest.raises(VLLMValidationError, match=r"lower max_num_seqs=4, whose recurrent states") as error:
        count_blocks(replace(request, memory_limit=state_bytes + 8), used_bytes=9)
    assert "set max_model_len" not in str(error.value)


def test_windows_take_no_more_than_all_sequences_do_nor_than_the_others() -> None:
    full, window = replace(make_group(), num_layers=1), replace(make_group(5), window=40)
    layout = replace(LAYOUT, groups=(full, window), max_model_len=10_000, max_num_batched_tokens=64)
    # One request has the blocks of 39 tokens, of a step's, and of a tile of 128 keys; its decodes those without a step.
    one, decode = -(-(39 + 64 + 128) // 16) + 1, -(-(39 + 1 + 128) // 16) + 1
    assert layout.num_blocks(300) == (300, 1 + 300 // 5)
    assert layout.num_blocks(30) == (30, 1 + one)
    assert layout.num_blocks(2) == (2, 2)
    everyone = math.ceil(1.25 * (4 * decode + 4))
    assert layout.num_blocks(10**6) == (10**6, 1 + everyone)
    for num_bytes in (0, 10**5, 10**6, 10**7 + 3):
        most = layout.most_blocks(num_bytes)
        assert most == 0 or layout.bytes(most) <= num_bytes
        assert layout.bytes(most + 1) > num_bytes
    assert replace(layout, groups=(window,)).num_blocks(77) == (77,)


def test_windows_have_room_for_all_sequences_where_the_other_groups_have() -> None:
    full, window = replace(make_group(), num_layers=1), replace(make_group(5), window=40)
    layout = replace(LAYOUT, groups=(full, window), max_num_seqs=16, max_model_len=160, max_num_batched_tokens=64)
    most = layout.most_wanted
    assert most == 1 + 16 * 10
    assert layout.num_blocks(most) == (most, most)
    assert layout.num_blocks(most - 1) == (most - 1, 1 + (most - 1) // 5)
    fits = layout.bytes(most)
    assert (layout.most_blocks(fits), layout.most_blocks(fits - 1)) == (most, most - 1)
    request = replace(BASE, layout=layout, memory_limit=fits)
    # A number that is rounded down would be too few for that.
    assert count_blocks(request, used_bytes=0) == most != most // 16 * 16
    assert count_blocks(request, used_bytes=1) == (most - 1) // 16 * 16


def test_chunks_take_no_more_than_all_sequences_do() -> None:
    full, chunk = replace(make_group(), num_layers=1), replace(make_group(5), attention_chunk=64)
    layout = replace(LAYOUT, groups=(full, chunk), max_model_len=10_000, max_num_batched_tokens=64)
    # One request has the blocks of a chunk at most, whatever a step has.
    assert layout.num_blocks(300) == (300, 1 + math.ceil(1.25 * (4 * 4 + 4)))
    assert layout.num_blocks(60) == (60, 1 + 60 // 5)
    assert layout.num_blocks(10) == (10, 1 + 4)
    assert replace(layout, groups=(chunk,)).num_blocks(77) == (77,)


def test_there_are_clips_for_as_many_requests_as_fit_and_a_quarter_more() -> None:
    frames = replace(make_group(), num_layers=1)
    layout = replace(LAYOUT, cross_groups=(frames,), num_frames=70)
    assert layout.clip_blocks == 5
    # A request of 100 tokens takes 7 blocks.
    clips = {1: 2, 8: 2, 15: 3, 22: 4, 29: 5, 500: 5}
    assert {most: layout.num_cross_blocks(most) for most in clips} == {most: 1 + 5 * clips[most] for most in clips}
    assert layout.bytes(29) == 29 * BLOCK_BYTES + 26 * frames.block_bytes
    fits = layout.bytes(22)
    assert (layout.most_blocks(fits), layout.most_blocks(fits - 1)) == (22, 21)
    assert LAYOUT.num_cross_blocks(29) == LAYOUT.clip_blocks == 0
