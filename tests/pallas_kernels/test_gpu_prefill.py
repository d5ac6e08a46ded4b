"""The GPU's prefill kernel equals the float32 reference in its interpreter, which also detects races."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import NO_WINDOW, AttentionBatch, AttentionShape, FusedPool
from pallas_kernels.paged_attention.gpu import gpu_tiles, handover
from pallas_kernels.paged_attention.gpu.handover import NEXT, PROVEN, Handover
from pallas_kernels.paged_attention.gpu.prefill import prefill_attention
from pallas_kernels.paged_attention.tiles import Tiles
from tests.pallas_kernels.gpu import H100, filled, traced
from tests.pallas_kernels.steps import (
    LAYER,
    NUM_LAYERS,
    SCALE,
    Step,
    fused,
    make_step,
    with_row_ends,
)

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]
TILES = Tiles(decode=64, query=128, kv=64)
# Two tiles of rows, the second with one row; a chunk at an odd position; chunks that the tile before overlaps.
RAGGED = [(5, 1), (129, 129), (150, 47), (33, 33), (97, 3)]
# The last one goes through more KV tiles than there are stages.
SHORT = [(7, 1), (49, 20), (330, 70)]
# A first row that misses only the last key of a KV tile; with window 65, a last row that misses only the first key.
EDGES = [(65, 3), (130, 3), (192, 64)]


def make(seed: int, chunks: list[tuple[int, int]], shape: AttentionShape) -> Step:
    return make_step(np.random.default_rng(seed), chunks, shape, query_tile=TILES.query, row_alignment=16)


def shape_of(heads: tuple[int, int], h: int = 64, block_size: int = 16, kv_dtype: Any = jnp.bfloat16) -> AttentionShape:
    return AttentionShape(*heads, h, block_size, jnp.dtype(jnp.bfloat16), jnp.dtype(kv_dtype))


@cache
def compiled(has_sinks: bool, soft_cap: float | None, way: Handover, tiles: Tiles) -> Any:
    """Return a function that is traced while `way` is chosen."""
    del way

    def function(q: Any, pool: Any, batch: Any, layer: Any, window: Any, sinks_n: Any) -> Any:
        qo_tc = jax.new_ref(q.reshape(len(q), -1))
        prefill_attention(
            qo_tc,
            pool,
            batch,
            layer=layer,
            num_layers=NUM_LAYERS,
            window=window,
            scale=SCALE,
            soft_cap=soft_cap,
            sinks_n=sinks_n if has_sinks else None,
            tiles=tiles,
            interpret=True,
        )
        return jax.freeze(qo_tc).reshape(q.shape)

    return jax.jit(function)


def run(
    step: Step,
    pool: FusedPool,
    batch: AttentionBatch | None = None,
    *,
    window: int = NO_WINDOW,
    soft_cap: float | None = None,
    sinks_n: np.ndarray | None = None,
    way: Handover = PROVEN,
    tiles: Tiles = TILES,
) -> np.ndarray:
    batch = step.batch if batch is None else batch
    sinks = np.zeros(1, np.float32) if sinks_n is None else sinks_n
    with jax.sharding.use_abstract_mesh(H100), patch.object(handover, "CHOSEN", way):
        function = compiled(sinks_n is not None, soft_cap, way, tiles)
        # A race raises.
        return np.asarray(function(step.q, pool, batch, np.int32(LAYER), np.int32(window), sinks), np.float32)


def tiled_rows(batch: AttentionBatch) -> np.ndarray:
    """Return the rows of the longer chunks, each up to the next multiple of 16."""
    longer = slice(int(batch.num_decodes), None)
    bounds = zip(np.asarray(batch.query_starts_s)[longer], np.asarray(batch.query_ends_s)[longer], strict=True)
    return np.concatenate([np.arange(start, -(-end // 16) * 16) for start, end in bounds if end > start])


E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@pytest.mark.parametrize(
    ("shape", "chunks", "window", "soft_cap", "has_sinks"),
    [
        (shape_of((2, 2)), RAGGED, NO_WINDOW, None, False),
        (shape_of((3, 1), block_size=64), SHORT, NO_WINDOW, None, True),
        (shape_of((4, 1), h=128), SHORT, 37, 4.0, False),
        (shape_of((8, 1), block_size=64), [(129, 66)], 100, 4.0, True),
        (shape_of((1, 1), h=256, block_size=128), SHORT, 65, None, False),
        (shape_of((2, 2), h=128, kv_dtype=E4M3), SHORT, NO_WINDOW, None, False),
        (shape_of((1, 1), h=256, block_size=64, kv_dtype=E5M2), SHORT, NO_WINDOW, None, True),
        # The window's first block is the last one, which has empty slots, and stands for the blocks of its KV tile.
        (shape_of((1, 1)), [(210, 2)], 1, None, False),
        (shape_of((1, 1), kv_dtype=E4M3), [(210, 2)], 1, None, False),
    ],
)
def test_matches_reference(
    shape: AttentionShape, chunks: list[tuple[int, int]], window: int, soft_cap: float | None, has_sinks: bool
) -> None:
    step = make(0, chunks, shape)
    sinks_n = np.random.default_rng(1).standard_normal(shape.num_heads).astype(np.float32) if has_sinks else None
    settings = {"window": window, "soft_cap": soft_cap, "sinks_n": sinks_n}
    pool, expected = filled(step, **settings)
    assert np.isnan(np.asarray(pool.kv, np.float32)).any()
    out = run(step, pool, **settings)
    rows = tiled_rows(step.batch)
    assert np.isfinite(out[rows]).all()
    others = np.setdiff1d(np.arange(len(out)), rows)
    np.testing.assert_array_equal(out[others], np.asarray(step.q, np.float32)[others], "other rows stay as they are")
    rows = np.intersect1d(rows, step.rows)
    # Probabilities and results are rounded to bfloat16.
    np.testing.assert_allclose(out[rows], expected[rows], rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("shape", "chunks", "window", "soft_cap", "has_sinks"),
    [
        (shape_of((2, 2)), RAGGED, NO_WINDOW, None, False),
        (shape_of((4, 1), h=128), SHORT, 37, 4.0, True),
        (shape_of((1, 1), h=128, kv_dtype=E4M3), SHORT, NO_WINDOW, None, False),
    ],
)
def test_overlapped_products_match_the_reference(
    shape: AttentionShape, chunks: list[tuple[int, int]], window: int, soft_cap: float | None, has_sinks: bool
) -> None:
    step = make(7, chunks, shape)
    sinks_n = np.random.default_rng(1).standard_normal(shape.num_heads).astype(np.float32) if has_sinks else None
    settings = {"window": window, "soft_cap": soft_cap, "sinks_n": sinks_n}
    pool, expected = filled(step, **settings)
    out = run(step, pool, **settings, way=NEXT)
    rows = np.intersect1d(tiled_rows(step.batch), step.rows)
    assert len(rows)
    np.testing.assert_allclose(out[rows], expected[rows], rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("shape", "way", "window"),
    [
        (shape_of((1, 1), block_size=64), PROVEN, NO_WINDOW),
        (shape_of((2, 1), h=128), PROVEN, 37),
        (shape_of((1, 1), h=128, block_size=128), NEXT, 65),
        (shape_of((1, 1), h=128, block_size=32, kv_dtype=E4M3), PROVEN, 65),
    ],
    ids=str,
)
def test_the_shapes_own_kv_tiles_match_the_reference(shape: AttentionShape, way: Handover, window: int) -> None:
    """Other tests have tiles of 64 tokens; an engine's have 128 where shared memory holds them."""
    tiles = gpu_tiles(shape)
    assert tiles.kv == 128
    step = make(8, [(140, 20), (33, 3)], shape)
    pool, expected = filled(step, window=window)
    out = run(step, pool, window=window, way=way, tiles=tiles)
    rows = np.intersect1d(tiled_rows(step.batch), step.rows)
    np.testing.assert_allclose(out[rows], expected[rows], rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("shape", "overlaps"), [(shape_of((1, 1), h=128), True), (shape_of((1, 1), h=128, kv_dtype=E4M3), False)], ids=str
)
def test_products_overlap_where_there_are_three_stages(shape: AttentionShape, *, overlaps: bool) -> None:
    """With two, a warpgroup that skips a tile would free the stage of values that the other still multiplies by."""
    step = make(0, SHORT, shape)

    def program(way: Handover) -> str:
        settings: dict[str, Any] = {"layer": LAYER, "num_layers": NUM_LAYERS, "window": NO_WINDOW, "scale": SCALE}

        def function(q: Any, pool: Any, batch: Any) -> None:
            prefill_attention(jax.new_ref(q.reshape(len(q), -1)), pool, batch, tiles=gpu_tiles(shape), **settings)

        with patch.object(handover, "CHOSEN", way):
            return traced(jax.jit(function), step.q, fused(step.pool), step.batch)

    assert (program(NEXT) != program(PROVEN)) is overlaps


@pytest.mark.parametrize(
    ("kind", "shape", "chunks", "window", "soft_cap", "has_sinks"),
    [
        ("bidirectional", shape_of((2, 2)), RAGGED, NO_WINDOW, None, False),
        ("falling", shape_of((2, 2)), RAGGED, 70, None, False),
        ("prefix", shape_of((4, 1), h=128), SHORT, 37, 4.0, True),
        ("images", shape_of((1, 1), h=256, block_size=64, kv_dtype=E4M3), SHORT, NO_WINDOW, None, False),
    ],
)
def test_rows_see_up_to_their_ends(
    kind: str,
    shape: AttentionShape,
    chunks: list[tuple[int, int]],
    window: int,
    soft_cap: float | None,
    has_sinks: bool,
) -> None:
    step = with_row_ends(make(6, chunks, shape), kind)
    sinks_n = np.random.default_rng(1).standard_normal(shape.num_heads).astype(np.float32) if has_sinks else None
    settings = {"window": window, "soft_cap": soft_cap, "sinks_n": sinks_n}
    pool, expected = filled(step, **settings)
    out, rows = run(step, pool, **settings), tiled_rows(step.batch)
    assert np.isfinite(out[rows]).all()
    rows = np.intersect1d(rows, step.rows)
    np.testing.assert_allclose(out[rows], expected[rows], rtol=2**-7, atol=2**-7)


def test_ends_at_the_rows_own_positions_change_no_bit() -> None:
    step = make(6, RAGGED, shape_of((2, 2)))
    pool, _ = filled(step)
    causal, same = run(step, pool, window=70), run(with_row_ends(step, "causal"), pool, window=70)
    np.testing.assert_array_equal(same, causal)


@pytest.mark.parametrize("window", [65, NO_WINDOW])
def test_every_key_counts_and_no_other(window: int) -> None:
    """All keys weigh about the same, so that one key too many or too few shows."""
    step = make(5, EDGES, shape_of((1, 1), block_size=32))
    step = step._replace(q=step.q * 0.05)
    pool, expected = filled(step, window=window)
    rows = np.intersect1d(tiled_rows(step.batch), step.rows)
    np.testing.assert_allclose(run(step, pool, window=window)[rows], expected[rows], atol=2**-8)


def test_chunks_equal_the_whole_bitwise_and_so_does_a_repetition() -> None:
    """The chunks are sequences of one step that share their blocks, each up to its own end."""
    length = 230
    shape = shape_of((1, 1))
    whole = make(2, [(length, length)], shape)
    pool, _ = filled(whole)
    out = run(whole, pool, window=150)
    edges = [0, 2, 20, 39, 101, 229 - 100, length]
    chunks = list(zip(edges, edges[1:]))  # noqa: B905, RUF007
    parts = make(2, [(end, end - start) for start, end in chunks], shape)
    starts = np.asarray(parts.batch.query_starts_s)
    q = np.zeros(parts.q.shape, np.float32)
    tables = np.repeat(np.asarray(whole.batch.block_tables_sm)[:1], len(starts), axis=0)
    for (start, end), row in zip(chunks, starts, strict=False):
        q[row : row + end - start] = whole.q[start:end]
    parts = parts._replace(q=jnp.asarray(q, jnp.bfloat16), batch=parts.batch._replace(block_tables_sm=tables))
    first, again = (run(parts, pool, window=150) for _ in range(2))
    for (start, end), row in zip(chunks, starts, strict=False):
        np.testing.assert_array_equal(first[row : row + end - start], out[start:end])
    rows = tiled_rows(parts.batch)
    np.testing.assert_array_equal(first[rows], again[rows])


def test_a_step_without_tiles_does_nothing() -> None:
    step = make(3, [(5, 5)], shape_of((1, 1)))
    pool, _ = filled(step)
    out = run(step, pool, step.batch._replace(num_tiles=jnp.int32(0)))
    np.testing.assert_array_equal(out, np.asarray(step.q, np.float32))


def test_refuses_other_tiles() -> None:
    step = make(4, [(5, 5)], shape_of((1, 1)))
    with pytest.raises(ValueError, match="128 query rows"):
        prefill_attention(
            step.q.reshape(len(step.q), -1),
            fused(step.pool),
            step.batch,
            layer=0,
            num_layers=NUM_LAYERS,
            window=1,
            scale=1.0,
            tiles=TILES._replace(query=64),
        )
