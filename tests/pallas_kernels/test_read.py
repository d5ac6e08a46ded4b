"""What slots hold is read from every layout of a pool, and writing it again changes nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import (
    NO_WINDOW,
    AttentionShape,
    FusedPool,
    KVPool,
    PagedAttention,
    PairedPool,
    SplitPool,
)
from pallas_kernels.paged_attention.batches import ragged_batch
from pallas_kernels.paged_attention.layout import FLOAT8, read_slots
from pallas_kernels.paged_attention.tiles import XLA_TILES
from tests.pallas_kernels.steps import LAYER, NUM_LAYERS

NUM_BLOCKS, BLOCK_SIZE = 6, 16


def random_pool(rng: np.random.Generator, k: int, h: int, dtype: Any) -> SplitPool:
    shapes = (NUM_LAYERS * NUM_BLOCKS, k, h, BLOCK_SIZE), (NUM_LAYERS * NUM_BLOCKS, k, BLOCK_SIZE, h)
    return SplitPool(*(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes))


@pytest.mark.kernels
@pytest.mark.parametrize("layout", [lambda pool: pool, PairedPool.of, FusedPool.of], ids=["split", "paired", "fused"])
def test_tokens_are_read_from_every_layout(layout: Any) -> None:
    rng = np.random.default_rng()
    pool = random_pool(rng, 3, 32, jnp.float32)
    blocks, offsets = rng.integers(0, NUM_LAYERS * NUM_BLOCKS, 20), rng.integers(0, BLOCK_SIZE, 20)
    k_tkh, v_tkh = jax.jit(read_slots)(layout(pool), jnp.asarray(blocks), jnp.asarray(offsets))
    for i, (block, offset) in enumerate(zip(blocks, offsets, strict=True)):
        np.testing.assert_array_equal(k_tkh[i], pool.k[block, :, :, offset])
        np.testing.assert_array_equal(v_tkh[i], pool.v[block, :, offset])


@pytest.mark.parametrize(
    ("implementation", "dtype", "kv_dtype"),
    [
        *[pytest.param("xla", *dtypes, marks=pytest.mark.kernels) for dtypes in [("float32",) * 2, ("bfloat16",) * 2]],
        pytest.param("xla", "float32", FLOAT8[0], marks=pytest.mark.kernels),
        *[
            pytest.param("cpu", *dtypes, marks=pytest.mark.cpu_kernels)
            for dtypes in [("float32",) * 2, ("bfloat16",) * 2]
        ],
        pytest.param("cpu", "float32", FLOAT8[1], marks=pytest.mark.cpu_kernels),
    ],
)
def test_writing_again_what_is_read_changes_nothing(implementation: str, dtype: str, kv_dtype: Any) -> None:
    """As in attention to a clip: two decodes share it, and the tokens of a chunk stand for its last frames."""
    rng = np.random.default_rng()
    shape = AttentionShape(6, 3, 32, BLOCK_SIZE, jnp.dtype(dtype), jnp.dtype(kv_dtype))
    op = PagedAttention(shape, implementation)
    pool: KVPool = random_pool(rng, 3, 32, shape.kv_dtype)
    pool = PairedPool.of(pool) if isinstance(op.pool_spec(1, 1), PairedPool) else pool
    if shape.kv_dtype.itemsize == 1:
        pool = SplitPool(*(jax.lax.bitcast_convert_type(x, jnp.uint8) for x in pool))
    chunks, blocks = [(40, 1), (40, 1), (30, 7)], [[2, 5, 1], [2, 5, 1], [3, 4]]
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "query_tile": XLA_TILES.query, "row_alignment": 1}
    batch = jax.tree.map(jnp.asarray, ragged_batch(chunks, blocks, **sizes))
    ends = [40, 40, *[30] * 7]
    q_tnh = jnp.asarray(rng.standard_normal((9, 6, 32)), dtype)
    where: dict[str, Any] = {"layer": LAYER, "num_layers": NUM_LAYERS}

    @jax.jit
    def attend(q_tnh: Any, pool: Any, batch: Any) -> Any:
        held = op.read(pool, batch.slots_t, **where)
        return held, op(q_tnh, *held, pool, batch, window=NO_WINDOW, scale=0.2, **where)

    (k_tkh, _), (out_tnh, after) = attend(q_tnh, pool, batch._replace(row_ends_t=jnp.asarray(ends)))
    assert k_tkh.dtype == shape.dtype
    for array, before in zip(after, pool, strict=True):
        np.testing.assert_array_equal(np.asarray(array), np.asarray(before))
    # A row sees all that is held, whatever its place: alone it gives the same.
    alone = jax.tree.map(jnp.asarray, ragged_batch([(30, 1)] * 7, [[3, 4]] * 7, **sizes))
    _, (expected_tnh, _) = attend(q_tnh[2:], pool, alone._replace(row_ends_t=jnp.full(7, 30)))
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(out_tnh[2:].astype(np.float32), expected_tnh.astype(np.float32), rtol=0, atol=tolerance)
