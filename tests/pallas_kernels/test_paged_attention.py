"""Every implementation of paged attention against the float32 reference, on ragged batches in a poisoned pool."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import AttentionBatch, KVPool, kv_pool_spec, paged_attention
from pallas_kernels.paged_attention.reference import reference_paged_attention
from pallas_kernels.paged_attention.tiles import DEFAULT_TILES

NUM_LAYERS, LAYER = 3, 1
NO_WINDOW = 2**30


def make_step(
    rng: np.random.Generator,
    chunks: list[tuple[int, int]],
    block_size: int,
    n: int,
    k: int,
    h: int,
    dtype,
    padding: int = 3,
):
    """Build a step of (context length, chunk length) sequences: q, k, v, a pool whose unused slots are NaN, batch."""
    width = max(-(-length // block_size) for length, _ in chunks) + 1
    blocks_each = [-(-length // block_size) for length, _ in chunks]
    num_blocks = sum(blocks_each) + 2
    ids = rng.permutation(np.arange(1, num_blocks)).tolist()
    tables = np.zeros((len(chunks) + padding, width), np.int32)
    slots: list[int] = []
    spec = kv_pool_spec(NUM_LAYERS, num_blocks, block_size, k, h, np.float32)
    keys, values = (np.full(x.shape, np.nan, np.float32) for x in spec)
    for i, (length, chunk) in enumerate(chunks):
        tables[i, : blocks_each[i]] = [ids.pop() for _ in range(blocks_each[i])]
        slot = [int(tables[i, p // block_size]) * block_size + p % block_size for p in range(length)]
        for p in slot[: length - chunk]:
            block, offset = LAYER * num_blocks + p // block_size, p % block_size
            keys[block, :, :, offset], values[block, :, offset] = rng.standard_normal((2, k, h))
        slots += slot[length - chunk :]
    t = len(slots) + padding
    ends = np.cumsum([chunk for _, chunk in chunks])
    num_decodes = sum(chunk == 1 for _, chunk in chunks)
    tiles = [
        (i, row)
        for i, (end, (_, chunk)) in enumerate(zip(ends, chunks, strict=True))
        for row in range(end - chunk, end, DEFAULT_TILES.query)
        if chunk > 1
    ]
    ints = lambda *x: jnp.asarray(np.array(x, np.int32))  # noqa: E731
    batch = AttentionBatch(
        slots_t=ints(*slots, *[0] * padding),
        block_tables_sm=jnp.asarray(tables),
        context_lens_s=ints(*[length for length, _ in chunks], *[0] * padding),
        query_ends_s=ints(*ends, *[t] * padding),
        num_decodes=jnp.int32(num_decodes),
        tile_seqs_i=ints(*[seq for seq, _ in tiles], 0),
        tile_rows_i=ints(*[row for _, row in tiles], 0),
        num_tiles=jnp.int32(len(tiles)),
    )
    q, key, value = (rng.standard_normal((t, heads, h)).astype(np.float32) for heads in (n, k, k))
    to = partial(jnp.asarray, dtype=dtype)
    return to(q), to(key), to(value), KVPool(to(keys), to(values)), batch, len(slots)


RAGGED = [(1, 1), (16, 1), (17, 1), (49, 1), (130, 1), (300, 1), (2, 2), (33, 33), (64, 20), (150, 47), (290, 3)]


def run(step, **kwargs):
    *_arrays, _ = step
    function = partial(paged_attention, num_layers=NUM_LAYERS, scale=0.25, **kwargs)
    options = {"xla_allow_excess_precision": False}
    return jax.jit(lambda *a: function(*a[:-2], layer=a[-2], window=a[-1]), compiler_options=options)


def reference(q, key, value, pool, batch, *, window: int = NO_WINDOW, soft_cap: float | None = None):
    """Run the reference on the same step, in float32."""
    q, key, value, *pool = (np.asarray(x, np.float32) for x in (q, key, value, *pool))
    return reference_paged_attention(
        q,
        key,
        value,
        KVPool(*pool),
        batch,
        layer=LAYER,
        num_layers=NUM_LAYERS,
        window=window,
        scale=0.25,
        soft_cap=soft_cap,
    )


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize(
    ("heads", "window", "soft_cap"),
    [
        ((2, 2), NO_WINDOW, None),
        ((9, 3), NO_WINDOW, None),
        ((4, 1), 24, None),
        ((8, 1), NO_WINDOW, 5.0),
        ((3, 3), 200, 2.0),
    ],
)
def test_matches_reference(block_size: int, heads: tuple[int, int], window: int, soft_cap: float | None) -> None:
    rng = np.random.default_rng(hash((block_size, heads, window)) % 2**32)
    step = make_step(rng, RAGGED, block_size, *heads, 16, jnp.float32)
    q, key, value, pool, batch, num_tokens = step
    expected, expected_pool = reference(q, key, value, pool, batch, window=window, soft_cap=soft_cap)
    out, pool = run(step, soft_cap=soft_cap)(*step[:-1], LAYER, window)
    np.testing.assert_allclose(out[:num_tokens], expected[:num_tokens], rtol=1e-5, atol=1e-5)
    assert np.isfinite(out).all(), "padding rows must stay finite, they flow through the layers"
    np.testing.assert_array_equal(pool.k, expected_pool.k)
    np.testing.assert_array_equal(pool.v, expected_pool.v)


def test_bfloat16_error_is_at_most_twice_that_of_its_inputs() -> None:
    step = make_step(np.random.default_rng(1), RAGGED, 16, 4, 2, 64, jnp.bfloat16)
    q, key, value, pool, batch, num_tokens = step
    exact, _ = reference(q, key, value, pool, batch)
    out, _ = run(step)(*step[:-1], LAYER, NO_WINDOW)
    rounded = exact.astype(jnp.bfloat16).astype(np.float32)
    error = np.abs(np.asarray(out, np.float32) - exact)[:num_tokens].max()
    assert error <= 2 * max(np.abs(rounded - exact)[:num_tokens].max(), 2**-8)


def assert_same(got, expected, dtype) -> None:
    """Bitwise in bfloat16; XLA:CPU's float32 matmuls may differ in the last bit from one row count to another."""
    tolerance = 0 if dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(expected, np.float32), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_does_not_depend_on_its_batch(dtype) -> None:
    """Decoded alone or among others, and as decode or as the last row of a chunk."""
    rng = np.random.default_rng(2)
    lengths = [5, 40, 129, 200, 31, 77]
    whole = make_step(rng, [(length, length) for length in lengths], 16, 6, 3, 16, dtype)
    q, key, value, _pool, batch, _ = whole
    out, filled = run(whole)(*whole[:-1], LAYER, NO_WINDOW)
    ends = np.cumsum(lengths)
    for picked in ([0], [3], [1, 2, 4], list(range(6))):
        rows = [ends[i] - 1 for i in picked]
        alone = AttentionBatch(
            slots_t=batch.slots_t[np.array(rows)],
            block_tables_sm=batch.block_tables_sm[np.array(picked)],
            context_lens_s=batch.context_lens_s[np.array(picked)],
            query_ends_s=jnp.arange(1, len(picked) + 1),
            num_decodes=jnp.int32(len(picked)),
            tile_seqs_i=jnp.zeros(1, jnp.int32),
            tile_rows_i=jnp.zeros(1, jnp.int32),
            num_tiles=jnp.int32(0),
        )
        index = np.array(rows)
        decoded, _ = run(whole)(q[index], key[index], value[index], filled, alone, LAYER, NO_WINDOW)
        assert_same(decoded, out[index], dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_chunks_equal_the_whole(dtype) -> None:
    rng = np.random.default_rng(3)
    whole = make_step(rng, [(150, 150)], 16, 4, 2, 16, dtype, padding=0)
    q, key, value, pool, batch, _ = whole
    out, _ = run(whole)(*whole[:-1], LAYER, 40)
    edges = [0, 7, 8, 60, 64, 149, 150]
    parts = []
    for start, end in pairwise(edges):
        chunk = end - start
        starts = list(range(0, chunk, DEFAULT_TILES.query)) if chunk > 1 else []
        part = batch._replace(
            slots_t=batch.slots_t[start:end],
            context_lens_s=jnp.array([end]),
            query_ends_s=jnp.array([chunk]),
            num_decodes=jnp.int32(chunk == 1),
            tile_seqs_i=jnp.zeros(8, jnp.int32),
            tile_rows_i=jnp.array(starts + [0] * (8 - len(starts)), jnp.int32),
            num_tiles=jnp.int32(len(starts)),
        )
        got, pool = run(whole)(q[start:end], key[start:end], value[start:end], pool, part, LAYER, 40)
        parts.append(np.asarray(got, np.float32))
    assert_same(np.concatenate(parts), out, dtype)


def test_the_same_call_twice_is_bitwise_equal() -> None:
    step = make_step(np.random.default_rng(4), RAGGED, 16, 4, 2, 16, jnp.bfloat16)
    function = run(step)
    first, second = (np.asarray(function(*step[:-1], LAYER, NO_WINDOW)[0], np.float32) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_refuses_what_does_not_fit() -> None:
    q, key, value, pool, batch, _ = make_step(np.random.default_rng(5), [(5, 5)], 16, 4, 2, 16, jnp.float32)
    call = partial(paged_attention, kv_pool=pool, batch=batch, layer=0, num_layers=NUM_LAYERS, window=5, scale=1.0)
    with pytest.raises(ValueError, match="multiple of 2 kv heads"):
        call(q[:, :3], key, value)
    with pytest.raises(ValueError, match="do not fit together"):
        call(q, key[:2], value)
    with pytest.raises(ValueError, match=r"no implementation 'cuda'.*xla"):
        call(q, key, value, implementation="cuda")


def test_pool_spec_has_layers_end_to_end() -> None:
    spec = kv_pool_spec(30, 9, 128, 3, 64, jnp.bfloat16)
    assert (spec.k.shape, spec.v.shape) == ((270, 3, 64, 128), (270, 3, 128, 64))
    assert spec.k.dtype == jnp.bfloat16
