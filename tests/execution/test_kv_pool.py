"""The number of blocks is that by hand for a small model."""

import math
from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.kv_pool import CPU_POOL_BYTES, PoolRequest, block_bytes, count_blocks, most_tokens
from tests.execution.support import make_attention, make_compiler, model_config

BASE = PoolRequest(
    model_config=model_config(), attention=make_attention(), max_num_seqs=4, max_model_len=100,
    num_gpu_blocks_override=None, kv_cache_memory_bytes=None, memory_limit=None,
)  # fmt: skip
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, K and V, kv heads, head dim, block size, bytes


def test_bytes_of_a_block() -> None:
    assert block_bytes(BASE) == BLOCK_BYTES
    assert block_bytes(replace(BASE, attention=make_attention(jnp.bfloat16))) == BLOCK_BYTES // 2
    pool = make_compiler().pool_spec(9)
    assert sum(math.prod(array.shape) * array.dtype.itemsize for array in pool) == 9 * BLOCK_BYTES


def test_cpu_takes_what_its_sequences_can_use_up_to_a_gibibyte() -> None:
    assert count_blocks(BASE, used_bytes=0) == 4 * 7 + 1
    many = count_blocks(replace(BASE, max_num_seqs=10**6), used_bytes=0)
    assert 0 <= CPU_POOL_BYTES - many * BLOCK_BYTES < 16 * BLOCK_BYTES


def test_overrides_hold() -> None:
    assert count_blocks(replace(BASE, num_gpu_blocks_override=33), used_bytes=0) == 33
    assert count_blocks(replace(BASE, kv_cache_memory_bytes=10 * BLOCK_BYTES + 5), used_bytes=0) == 10


def test_an_accelerator_gives_what_parameters_and_scratch_leave() -> None:
    request = replace(BASE, memory_limit=2000 * BLOCK_BYTES, max_num_seqs=1000)
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
    request = replace(BASE, **changes)
    with pytest.raises(VLLMValidationError, match=f"raise {parameter} .*or set max_model_len to") as error:
        count_blocks(request, used_bytes=15 * BLOCK_BYTES)
    assert error.value.parameter == parameter
    fits = most_tokens(request, used_bytes=15 * BLOCK_BYTES)
    if fits:
        count_blocks(replace(request, max_model_len=fits), used_bytes=15 * BLOCK_BYTES)
