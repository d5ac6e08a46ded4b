"""The kernel that rotates q and k and writes k and v is right in its interpreter, which detects races."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import AttentionShape, FusedPool, Rope
from pallas_kernels.paged_attention.gpu.common import decode_queries
from pallas_kernels.paged_attention.gpu.write import rotate_and_write
from pallas_kernels.paged_attention.layout import to_pool_dtype
from pallas_kernels.paged_attention.rope import rotate
from tests.pallas_kernels.gpu import assert_pools_equal, interpreted
from tests.pallas_kernels.steps import LAYER, NUM_LAYERS, Step, fused, make_step, reference

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]
# Decodes, and chunks that begin and end within blocks; rows of padding are between and after them.
RAGGED = [(1, 1), (17, 1), (64, 1), (20, 4), (39, 23)]
FLOAT8 = [jnp.float8_e4m3fn, jnp.float8_e5m2]


def shape_of(n: int, k: int, h: int = 64, block_size: int = 16, kv_dtype: Any = jnp.bfloat16) -> AttentionShape:
    return AttentionShape(n, k, h, block_size, jnp.dtype(jnp.bfloat16), jnp.dtype(kv_dtype))


def make(shape: AttentionShape, chunks: list[tuple[int, int]] = RAGGED) -> Step:
    return make_step(np.random.default_rng(0), chunks, shape, query_tile=128, row_alignment=16)


def run(step: Step, rope: Rope | None) -> tuple[np.ndarray, FusedPool]:
    num_rows = len(step.batch.context_lens_s)
    write = jax.jit(partial(rotate_and_write, num_rows=num_rows, num_layers=NUM_LAYERS, interpret=True))
    arguments = (step.q, step.k, step.v, fused(step.pool), step.batch.slots_t, rope)
    queries, pool = interpreted(lambda: write(*arguments, layer=LAYER))
    assert queries.all_tc.dtype == step.q.dtype
    q, decode_rkgh = queries.all_tc.reshape(step.q.shape), queries.decode_rkgh
    k = step.k.shape[1]
    g = q.shape[1] // k
    assert decode_rkgh.shape[0] >= num_rows
    assert decode_rkgh.shape[2] % 8 == 0
    decodes = decode_rkgh[:num_rows, :, :g].reshape(num_rows, *q.shape[1:])
    expected = decode_queries(q[:num_rows], step.pool.k.dtype)
    assert decodes.dtype == expected.dtype
    np.testing.assert_array_equal(decodes.astype(np.float32), expected.astype(np.float32))
    return np.asarray(q, np.float32), pool


@pytest.mark.parametrize(
    "shape",
    [
        shape_of(1, 1),
        shape_of(9, 3, block_size=64),
        shape_of(8, 1, 128),  # the query heads are divided among two thread blocks
        shape_of(5, 1, kv_dtype=jnp.float8_e4m3fn),  # to five
        shape_of(4, 2, 128, 64, jnp.float8_e5m2),
        shape_of(2, 2, 256),
        shape_of(4, 1, 256, kv_dtype=jnp.float8_e4m3fn),
    ],
    ids=str,
)
def test_rotates_and_writes_what_the_reference_does(shape: AttentionShape) -> None:
    step = make(shape)
    _, expected = reference(step, rope=step.rope)
    q, pool = run(step, step.rope)
    assert_pools_equal(pool, expected)
    null_block, before = LAYER * (pool.kv.shape[0] // NUM_LAYERS), fused(step.pool)
    assert np.isnan(before.kv[null_block].astype(np.float32)).all()
    assert np.isnan(pool.kv[null_block].astype(np.float32)).all(), "padding is not written"
    turned = np.asarray(step.q, np.complex64)
    half = shape.head_dim // 2
    turned = (turned[..., :half] + 1j * turned[..., half:]) * (step.rope.cos_th + 1j * step.rope.sin_th)[:, None]
    np.testing.assert_array_equal(q, np.concatenate([turned.real, turned.imag], -1).astype(jnp.bfloat16))


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, *FLOAT8])
def test_has_the_bits_of_rotating_and_casting_first(kv_dtype: Any) -> None:
    step = make(shape_of(6, 2, 128, kv_dtype=kv_dtype))
    angles = np.arange(len(step.q), dtype=np.float32)[:, None] * 1e4 ** (-np.arange(64, dtype=np.float32) / 64)
    rope = Rope(jnp.cos(angles), jnp.sin(angles))
    q, pool = run(step, rope)
    before = [rotate(step.q, rope), *(to_pool_dtype(x, step.pool.k.dtype) for x in (rotate(step.k, rope), step.v))]
    rotated = step._replace(q=before[0], k=before[1], v=before[2])
    same_q, same_pool = run(rotated, None)
    np.testing.assert_array_equal(q, same_q)
    np.testing.assert_array_equal(np.asarray(pool.kv, np.float32), np.asarray(same_pool.kv, np.float32))


@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_values_beyond_8_bits_are_clipped(kv_dtype: Any) -> None:
    step = make(shape_of(1, 1, kv_dtype=kv_dtype), [(3, 3)])
    most = float(jnp.finfo(kv_dtype).max)
    step = step._replace(v=step.v.at[0, 0, :2].set(jnp.asarray([1e6, -1e6], step.v.dtype)))
    _, pool = run(step, step.rope)
    block, offset = divmod(int(step.batch.slots_t[0]), 16)
    row = pool.kv[LAYER * (pool.kv.shape[0] // NUM_LAYERS) + block, 0, offset]
    np.testing.assert_array_equal(row[64:66].astype(np.float32), [most, -most])


def test_queries_of_8_bit_pools_are_exact_in_float16_or_clipped() -> None:
    q = np.array([1.0, -3.140625, 2.0**-10, 2.0**20, -1e30, 0.0], np.float32)
    decoded = decode_queries(jnp.asarray(q, jnp.bfloat16), jnp.dtype(jnp.float8_e4m3fn))
    assert decoded.dtype == jnp.float16
    most = float(jnp.finfo(jnp.float16).max)
    np.testing.assert_array_equal(np.asarray(decoded, np.float32), np.clip(q / 16, -most, most))


def test_refuses_tokens_that_are_no_multiple_of_8() -> None:
    step = make(shape_of(1, 1))
    with pytest.raises(ValueError, match="8 tokens at a time, which 12 is no multiple of"):
        run(step._replace(q=step.q[:12], k=step.k[:12], v=step.v[:12]), None)
