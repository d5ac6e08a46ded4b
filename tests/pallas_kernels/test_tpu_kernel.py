"""The TPU kernels equal the float32 reference in the TPU interpreter, which also detects races."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.implementations import PAGED_ATTENTION
from pallas_kernels.paged_attention import NO_WINDOW, AttentionBatch, AttentionShape, SplitPool, Tiles
from pallas_kernels.paged_attention.cases import CASES
from pallas_kernels.paged_attention.tpu import float8, tpu_paged_attention, tpu_tiles
from pallas_kernels.paged_attention.tpu.prefill import Cut
from tests.pallas_kernels.steps import (
    LAYER,
    NUM_LAYERS,
    SCALE,
    Step,
    fused,
    make_step,
    reference,
    with_row_ends,
)

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]
# A ring shorter than the list of tiles, and tiles shorter than the contexts.
TILES = Tiles(decode=3, query=32, kv=128)
# Decodes of 1 block to 3 and 1 token, chunks at odd positions, of several tiles, of two tokens in one slab.
RAGGED = [(1, 1), (17, 1), (130, 1), (300, 1), (2, 2), (64, 20), (150, 47), (290, 3)]
SHORT = [(49, 1), (193, 1), (33, 33), (197, 70)]
RACES = pltpu.InterpretParams(detect_races=True)


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    with pltpu.force_tpu_interpret_mode(RACES):
        yield
    pltpu.reset_tpu_interpret_mode_state()


def shape_of(n: int, k: int, h: int, block_size: int, dtype: Any = jnp.float32, kv_dtype: Any = None) -> AttentionShape:
    return AttentionShape(n, k, h, block_size, jnp.dtype(dtype), jnp.dtype(kv_dtype or dtype))


def make(chunks: list[tuple[int, int]], shape: AttentionShape, seed: int = 0, tiles: Tiles = TILES) -> Step:
    return make_step(np.random.default_rng(seed), chunks, shape, query_tile=tiles.query, row_alignment=16)


@cache
def compiled(soft_cap: float | None, tiles: Tiles, architecture: str | None) -> Any:
    def function(q: Any, k: Any, v: Any, pool: Any, batch: Any, layer: Any, window: Any, sinks_n: Any) -> Any:
        return tpu_paged_attention(
            q,
            k,
            v,
            pool,
            batch,
            layer=layer,
            num_layers=NUM_LAYERS,
            window=window,
            scale=SCALE,
            soft_cap=soft_cap,
            sinks_n=sinks_n,
            tiles=tiles,
            architecture=architecture,
        )

    # Most of the time goes into compiling the interpreter's program.
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


class Result(NamedTuple):
    out: np.ndarray
    pool: np.ndarray


def run(
    step: Step,
    *,
    window: int = NO_WINDOW,
    soft_cap: float | None = None,
    sinks_n: np.ndarray | None = None,
    tiles: Tiles = TILES,
    architecture: str | None = None,
) -> Result:
    function = compiled(soft_cap, tiles, architecture)
    k, v = (x.astype(step.pool.k.dtype) for x in (step.k, step.v))
    out, pool = function(step.q, k, v, fused(step.pool), step.batch, jnp.int32(LAYER), jnp.int32(window), sinks_n)
    assert out.dtype == step.q.dtype
    assert pool.kv.dtype == step.pool.k.dtype
    return Result(np.asarray(out, np.float32), np.asarray(pool.kv, np.float32))


def check_pool(step: Step, result: Result, **settings: Any) -> None:
    """Check that the pool is the reference's to the bit, except the null blocks, where padding need not be written."""
    _, pool = reference(step, **settings)
    expected, got = np.array(fused(pool).kv), result.pool.copy()
    num_blocks = len(expected) // NUM_LAYERS
    for x in (expected, got):
        x[::num_blocks] = 0
    np.testing.assert_array_equal(got, expected)


def check(step: Step, tolerance: float, tiles: Tiles = TILES, **settings: Any) -> None:
    expected, _ = reference(step, **settings)
    result = run(step, tiles=tiles, **settings)
    np.testing.assert_allclose(result.out[step.rows], expected[step.rows], rtol=tolerance, atol=tolerance)
    assert np.isfinite(result.out).all(), "rows of padding must stay finite, they flow through the layers"
    check_pool(step, result, **settings)


def sinks_of(n: int) -> np.ndarray:
    return 2 * np.random.default_rng(7).standard_normal(n).astype(np.float32)


@pytest.fixture(scope="module")
def ragged() -> Step:
    return make(RAGGED, shape_of(4, 1, 64, 16))


@pytest.mark.parametrize("window", [NO_WINDOW, 24, 1])
def test_matches_reference(ragged: Step, window: int) -> None:
    check(ragged, 1e-5, window=window)


@pytest.mark.parametrize("kind", ["decode", "prefill", "nothing"])
def test_steps_of_one_kind(ragged: Step, kind: str) -> None:
    """Sequences that are not in the step are neither written nor attended."""
    whole = run(ragged)
    num_decodes = int(ragged.batch.num_decodes)
    is_decode = np.isin(np.arange(len(whole.out)), np.arange(num_decodes))
    is_tile = np.isin(np.arange(len(whole.out)), ragged.rows) & ~is_decode
    batch = ragged.batch
    if kind != "decode":
        batch = batch._replace(num_decodes=jnp.int32(0))
    if kind != "prefill":
        batch = batch._replace(num_tiles=jnp.int32(0))
    here = {"decode": is_decode, "prefill": is_tile, "nothing": np.zeros_like(is_tile)}[kind]
    result = run(ragged._replace(batch=batch))
    np.testing.assert_array_equal(result.out[here], whole.out[here])
    slots = jnp.where(jnp.asarray(here), batch.slots_t, 0)
    check_pool(ragged._replace(batch=batch._replace(slots_t=slots)), result)


def test_the_same_call_twice_is_bitwise_equal(ragged: Step) -> None:
    first, second = run(ragged, window=40), run(ragged, window=40)
    np.testing.assert_array_equal(first.out, second.out)


@pytest.mark.parametrize("window", [NO_WINDOW, 100])
def test_a_sequence_alone_is_bitwise_the_same(ragged: Step, window: int) -> None:
    whole, batch = run(ragged, window=window), ragged.batch
    rows = np.arange(len(whole.out))
    starts, ends = np.asarray(batch.query_starts_s), np.asarray(batch.query_ends_s)
    for sequence in (3, 6):
        start, end = starts[sequence], ends[sequence]
        move = np.where(rows < end - start, rows + start, 0)  # the sequence's rows come first
        is_own = jnp.asarray(rows < end - start)
        tile_rows = np.arange(len(batch.tile_rows_i)) * TILES.query
        is_decode = end - start == 1
        alone = AttentionBatch(
            slots_t=jnp.where(is_own, batch.slots_t[move], 0),
            block_tables_sm=batch.block_tables_sm.at[0].set(batch.block_tables_sm[sequence]),
            context_lens_s=jnp.zeros_like(batch.context_lens_s).at[0].set(batch.context_lens_s[sequence]),
            query_starts_s=jnp.zeros_like(batch.query_starts_s),
            query_ends_s=jnp.zeros_like(batch.query_ends_s).at[0].set(end - start),
            num_decodes=jnp.int32(is_decode),
            tile_seqs_i=jnp.zeros_like(batch.tile_seqs_i),
            tile_rows_i=jnp.asarray(tile_rows, jnp.int32),
            num_tiles=jnp.int32(0 if is_decode else -(-(end - start) // TILES.query)),
        )
        moved = ragged._replace(q=ragged.q[move], k=ragged.k[move], v=ragged.v[move], batch=alone)
        np.testing.assert_array_equal(run(moved, window=window).out[: end - start], whole.out[start:end])


@pytest.mark.parametrize(
    ("shape", "window", "soft_cap", "has_sinks"),
    [
        (shape_of(3, 1, 64, 64), NO_WINDOW, 5.0, True),  # a group that is no power of two
        (shape_of(2, 2, 128, 16), 70, None, False),  # several kv heads, attended together
    ],
)
def test_matches_reference_in_other_shapes(
    shape: AttentionShape, window: int, soft_cap: float | None, has_sinks: bool
) -> None:
    sinks_n = sinks_of(shape.num_heads) if has_sinks else None
    check(make(SHORT, shape), 1e-5, window=window, soft_cap=soft_cap, sinks_n=sinks_n)


# Contexts that share a tile by fours and twos, in no order, with lists that fill no group, and long ones between.
DECODES = [(128, 1), (1, 1), (257, 1), (129, 1), (37, 1), (256, 1), (64, 1), (100, 1), (600, 1), (127, 1), (200, 1)]
WIDE_TILES = Tiles(decode=3, query=32, kv=512)


@pytest.mark.parametrize(
    ("shape", "window", "soft_cap", "has_sinks", "architecture"),
    [
        (shape_of(8, 2, 128, 64), NO_WINDOW, None, False, None),
        (shape_of(16, 4, 128, 64), NO_WINDOW, None, False, "TPU7x"),
        (shape_of(6, 2, 64, 16), 70, 5.0, True, "TPU7x"),  # a pair's rows are no whole tile
    ],
)
def test_short_contexts_share_a_tile(
    shape: AttentionShape, window: int, soft_cap: float | None, has_sinks: bool, architecture: str | None
) -> None:
    """Heads are multiplied one by one, and by twos on kinds with wide matrix units."""
    sinks_n = sinks_of(shape.num_heads) if has_sinks else None
    step = make([*DECODES, (90, 20)], shape, tiles=WIDE_TILES)
    settings: dict[str, Any] = {"window": window, "soft_cap": soft_cap, "sinks_n": sinks_n}
    expected, _ = reference(step, **settings)
    result = run(step, tiles=WIDE_TILES, architecture=architecture, **settings)
    np.testing.assert_allclose(result.out[step.rows], expected[step.rows], rtol=1e-5, atol=1e-5)
    assert np.isfinite(result.out).all()
    check_pool(step, result, **settings)


def only(step: Step, sequence: int) -> Step:
    """Return a step that decodes one of the step's sequences, in the first row."""
    batch = step.batch
    move = np.where(np.arange(len(step.q)) == 0, sequence, 1)
    is_first = jnp.arange(len(step.q)) == 0
    alone = batch._replace(
        slots_t=jnp.where(is_first, batch.slots_t[sequence], 0),
        block_tables_sm=batch.block_tables_sm.at[0].set(batch.block_tables_sm[sequence]),
        context_lens_s=batch.context_lens_s.at[0].set(batch.context_lens_s[sequence]),
        num_decodes=jnp.int32(1),
        num_tiles=jnp.int32(0),
    )
    return step._replace(q=step.q[move], k=step.k[move], v=step.v[move], batch=alone)


def test_a_short_context_does_not_depend_on_those_that_share_its_tile() -> None:
    """Its bits are the same alone, and beside a sequence of NaN."""
    architecture = "TPU7x"
    step = make(DECODES, shape_of(8, 4, 64, 32), tiles=WIDE_TILES)
    whole = run(step, tiles=WIDE_TILES, architecture=architecture)
    for sequence in (0, 4, 9, 10):
        alone = run(only(step, sequence), tiles=WIDE_TILES, architecture=architecture)
        np.testing.assert_array_equal(alone.out[0], whole.out[sequence])
    broken = step._replace(k=step.k.at[7].set(jnp.nan), v=step.v.at[7].set(jnp.nan))
    result = run(broken, tiles=WIDE_TILES, architecture=architecture)
    assert np.isnan(result.out[7]).all()
    others = np.arange(len(DECODES)) != 7
    np.testing.assert_array_equal(result.out[: len(DECODES)][others], whole.out[: len(DECODES)][others])


@pytest.mark.parametrize("window", [NO_WINDOW, 100])
def test_blocks_of_rows(window: int) -> None:
    """Blocks see all of a tile, some of it, or only its first half; short ends of chunks are attended in parts."""
    tiles = Tiles(decode=3, query=64, kv=256)
    assert Cut.of(tiles.query, group=8, k=2).parts_per_block == 2
    step = make([(90, 90), (197, 70), (400, 130)], shape_of(16, 2, 64, 64), tiles=tiles)
    check(step, 1e-5, tiles, window=window)


@pytest.mark.parametrize(
    ("kind", "window"), [("bidirectional", NO_WINDOW), ("prefix", 24), ("images", 40), ("falling", NO_WINDOW)]
)
def test_rows_see_up_to_their_ends(ragged: Step, kind: str, window: int) -> None:
    check(with_row_ends(ragged, kind), 1e-5, window=window)


@pytest.mark.parametrize("kind", ["bidirectional", "falling", "images"])
def test_blocks_of_rows_see_up_to_their_ends(kind: str) -> None:
    """Blocks see all of a tile, some of it, or only its first half, with sinks and a soft cap."""
    tiles = Tiles(decode=3, query=64, kv=256)
    step = make([(90, 90), (197, 70), (400, 130)], shape_of(16, 2, 64, 64), tiles=tiles)
    check(with_row_ends(step, kind), 1e-5, tiles, soft_cap=5.0, sinks_n=sinks_of(16))


def test_ends_at_the_rows_own_positions_change_no_bit(ragged: Step) -> None:
    causal, same = run(ragged, window=40), run(with_row_ends(ragged, "causal"), window=40)
    np.testing.assert_array_equal(same.out, causal.out)
    np.testing.assert_array_equal(same.pool, causal.pool)


@pytest.mark.parametrize(
    ("shape", "window", "has_sinks", "architecture"),
    [
        (shape_of(8, 1, 64, 64, jnp.bfloat16), NO_WINDOW, True, None),
        (shape_of(1, 1, 256, 16, jnp.bfloat16), 50, False, None),
        (shape_of(4, 2, 512, 16, jnp.bfloat16), NO_WINDOW, False, None),
        (shape_of(4, 2, 64, 32, jnp.bfloat16, jnp.float8_e4m3fn), NO_WINDOW, False, "TPU7x"),
    ],
)
def test_bfloat16_error_is_at_most_twice_that_of_its_inputs(
    shape: AttentionShape, window: int, has_sinks: bool, architecture: str | None
) -> None:
    step = make(SHORT, shape)
    settings = {"window": window, "sinks_n": sinks_of(shape.num_heads) if has_sinks else None}
    exact, _ = reference(step, **settings)
    result = run(step, architecture=architecture, **settings)
    rounded = exact.astype(jnp.bfloat16).astype(np.float32)
    error = np.abs(result.out - exact)[step.rows].max()
    assert error <= 2 * max(np.abs(rounded - exact)[step.rows].max(), 2**-8)
    assert np.isfinite(result.out).all()
    check_pool(step, result, **settings)


def test_unpacked_float8_is_the_same() -> None:
    """TPUs that unpack another 8-bit float get the same bits, for all numbers of the pool's format."""
    step = make(SHORT, shape_of(4, 2, 64, 32, jnp.bfloat16, jnp.float8_e4m3fn))
    every = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    random = np.random.default_rng(1)
    k, v = (random.choice(every[np.isfinite(every)], step.k.shape) * factor for factor in (1 / 64, 1))
    pool = SplitPool(*(x + jnp.zeros_like(x) for x in step.pool))  # what the kernels write has no minus zero
    step = step._replace(k=jnp.asarray(k, jnp.bfloat16), v=jnp.asarray(v, jnp.bfloat16), pool=pool)
    result, expected = run(step, architecture="TPU v6 lite"), run(step)
    np.testing.assert_array_equal(result.out, expected.out)
    np.testing.assert_array_equal(result.pool, expected.pool)


def test_nan_stays_nan_where_float8_is_unpacked() -> None:
    x = jnp.asarray([0.0, -0.0, 2**-9, -448, np.nan, -np.nan], jnp.float8_e4m3fn)
    got = float8.unpack(float8.to_be_unpacked(x), jnp.float32) * float8.FACTOR
    np.testing.assert_array_equal(got, [0.0, 0.0, 2**-9, -448, np.nan, np.nan])
    assert not np.signbit(got[:2]).any()


def test_a_race_would_be_reported() -> None:
    """The race is a copy that is read before it is complete."""

    def kernel(x: Any, out: Any, buffer: Any, semaphore: Any) -> None:
        copy = pltpu.make_async_copy(x, buffer, semaphore)
        copy.start()
        out[...] = buffer[...]
        copy.wait()

    call = pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
    )
    with pytest.raises(Exception, match=r"[Rr]ace"):
        jax.block_until_ready(call(jnp.ones((8, 128), jnp.float32)))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("architecture", [None, "TPU v6 lite", "TPU7x"])
def test_tiles_of_real_models_fit(case: str, kv_dtype: Any, architecture: str | None) -> None:
    shape = CASES[case].shape(kv_dtype=kv_dtype)
    assert PAGED_ATTENTION["tpu"].refusal(shape) is None
    tiles = tpu_tiles(shape, architecture)
    tile_bytes = tiles.kv * shape.num_kv_heads * 2 * shape.head_dim * jnp.dtype(kv_dtype).itemsize
    assert tiles.decode * tile_bytes <= 16 * 2**20
    assert tiles.kv % shape.block_size == tiles.query % 16 == 0
