"""Paged attention of a CPU, in plain XLA and as a kernel, equals the float32 reference in a poisoned pool."""

import re
from functools import cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.native import processor
from pallas_kernels.native.cores import num_cores
from pallas_kernels.paged_attention import (
    NO_WINDOW,
    AttentionBatch,
    AttentionShape,
    PagedAttention,
    PairedPool,
    Rope,
    SplitPool,
    pick,
)
from pallas_kernels.paged_attention.cases import CASES
from pallas_kernels.paged_attention.cpu.kernel import ROWS_PER_CORE
from pallas_kernels.paged_attention.cpu.spans import SPAN
from pallas_kernels.paged_attention.tiles import XLA_TILES
from tests.pallas_kernels.steps import (
    LAYER,
    NUM_LAYERS,
    SCALE,
    Step,
    make_step,
    reference,
    with_row_ends,
)
from tests.quick import QUICK_COMPILE

RAGGED = [
    (1, 1),
    (16, 1),
    (17, 1),
    (49, 1),
    (130, 1),
    (300, 1),
    (700, 1),
    (2, 2),
    (33, 33),
    (64, 20),
    (150, 47),
    (290, 3),
]


IMPLEMENTATION = "xla"


@pytest.fixture(
    params=[pytest.param("xla", marks=pytest.mark.kernels), pytest.param("cpu", marks=pytest.mark.cpu_kernels)],
    autouse=True,
)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.IMPLEMENTATION", request.param)
    compiled.cache_clear()  # a test may choose another instruction set


def attention(n: int, k: int, h: int, block_size: int = 16, dtype=jnp.float32, kv_dtype=None) -> PagedAttention:
    dtype, kv_dtype = jnp.dtype(dtype), jnp.dtype(kv_dtype or dtype)
    return PagedAttention(AttentionShape(n, k, h, block_size, dtype, kv_dtype), IMPLEMENTATION)


def make(seed: int, chunks: list[tuple[int, int]], op: PagedAttention, **kwargs) -> Step:
    return make_step(np.random.default_rng(seed), chunks, op.shape, query_tile=XLA_TILES.query, **kwargs)


def split(pool: PairedPool) -> SplitPool:
    """Return the same keys and values without pairs."""
    return SplitPool(*(x.swapaxes(-1, -2).reshape(*x.shape[:2], -1, x.shape[3]) for x in pool))


@cache
def compiled(op: PagedAttention, soft_cap: float | None) -> Any:
    """Return the op as a function that compiles once for a test's steps of the same shapes."""

    def function(q, k, v, pool, batch, layer, window, sinks_n, rope):
        settings = {"window": window, "scale": SCALE, "soft_cap": soft_cap, "sinks_n": sinks_n, "rope": rope}
        return op(q, k, v, pool, batch, layer=layer, num_layers=NUM_LAYERS, **settings)

    quick: dict[str, Any] = dict(QUICK_COMPILE) if op.implementation == "xla" else {}
    return jax.jit(function, compiler_options={"xla_allow_excess_precision": False, **quick})


def run(
    op: PagedAttention,
    step: Step,
    batch: AttentionBatch | None = None,
    *,
    window: int = NO_WINDOW,
    soft_cap: float | None = None,
    sinks_n: np.ndarray | None = None,
    rope: Rope | None = None,
):
    """Run the op on a step, or on another batch over its arrays; layer and window are traced."""
    bits = SplitPool(*map(np.asarray, step.pool))  # what numpy rearranges need not be compiled
    if op.shape.kv_dtype.itemsize == 1:
        bits = SplitPool(*(x.view(np.uint8) for x in bits))
    if is_paired := isinstance(op.pool_spec(1, 1), PairedPool):
        bits = PairedPool.of(bits)
    batch = step.batch if batch is None else batch
    out, pool = compiled(op, soft_cap)(step.q, step.k, step.v, bits, batch, LAYER, window, sinks_n, rope)
    pool = jax.tree.map(np.asarray, pool)
    return np.asarray(out), split(pool) if is_paired else pool


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize(
    ("heads", "window", "soft_cap", "has_sinks"),
    [
        ((2, 2), NO_WINDOW, None, False),
        ((9, 3), NO_WINDOW, None, True),
        ((4, 1), 24, None, False),
        ((8, 1), NO_WINDOW, 5.0, False),
        ((7, 1), NO_WINDOW, None, False),
        ((3, 3), 200, 2.0, True),
    ],
)
def test_matches_reference(
    block_size: int, heads: tuple[int, int], window: int, soft_cap: float | None, has_sinks: bool
) -> None:
    op = attention(*heads, 16, block_size)
    # Rows of chunks may start anywhere, or at the alignment of other platforms' kernels.
    step = make(hash((block_size, heads, window)) % 2**32, RAGGED, op, row_alignment=16 if has_sinks else 1)
    sinks = np.random.default_rng(0).standard_normal(heads[0]).astype(np.float32) if has_sinks else None
    settings = {"window": window, "soft_cap": soft_cap, "sinks_n": sinks}
    expected, expected_pool = reference(step, **settings)
    out, pool = run(op, step, **settings)
    np.testing.assert_allclose(out[step.rows], expected[step.rows], rtol=1e-5, atol=1e-5)
    assert np.isfinite(out).all(), "padding rows must stay finite, they flow through the layers"
    assert_pools_equal(pool, expected_pool)


@pytest.mark.parametrize(
    ("kind", "dtype", "heads", "window", "soft_cap", "has_sinks", "tolerance"),
    [
        ("bidirectional", jnp.float32, (9, 3, 16), NO_WINDOW, None, True, 1e-5),
        ("bidirectional", jnp.bfloat16, (4, 2, 16), 50, None, False, 1e-2),
        ("prefix", jnp.float32, (3, 3, 16), 24, 2.0, False, 1e-5),
        ("falling", jnp.float32, (4, 1, 16), NO_WINDOW, None, False, 1e-5),
        # MiniLM's heads.
        ("bidirectional", jnp.float32, (12, 12, 32), NO_WINDOW, None, False, 1e-5),
        ("bidirectional", jnp.bfloat16, (12, 12, 32), 50, None, False, 1e-2),
        ("images", jnp.bfloat16, (8, 1, 16), 40, 5.0, True, 1e-2),
    ],
)
def test_rows_see_up_to_their_ends(
    kind: str,
    dtype,
    heads: tuple[int, int, int],
    window: int,
    soft_cap: float | None,
    has_sinks: bool,
    tolerance: float,
) -> None:
    op = attention(*heads, dtype=dtype)
    step = with_row_ends(make(13, RAGGED, op), kind)
    sinks = np.random.default_rng(0).standard_normal(heads[0]).astype(np.float32) if has_sinks else None
    settings = {"window": window, "soft_cap": soft_cap, "sinks_n": sinks}
    expected, expected_pool = reference(step, **settings)
    out, pool = run(op, step, **settings)
    np.testing.assert_allclose(
        np.asarray(out, np.float32)[step.rows], expected[step.rows], rtol=tolerance, atol=tolerance
    )
    assert np.isfinite(np.asarray(out, np.float32)).all()
    assert_pools_equal(pool, expected_pool)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ends_at_the_rows_own_positions_change_no_bit(dtype) -> None:
    op = attention(6, 3, 16, dtype=dtype)
    step = make(12, RAGGED, op)
    for window in (NO_WINDOW, 40):
        (causal, _), (same, _) = run(op, step, window=window), run(op, with_row_ends(step, "causal"), window=window)
        np.testing.assert_array_equal(
            np.asarray(same, np.float32)[step.rows], np.asarray(causal, np.float32)[step.rows]
        )


@pytest.mark.parametrize(
    ("dtype", "block_size", "window", "tolerance"),
    [(jnp.float32, 128, NO_WINDOW, 1e-5), (jnp.float32, 128, 24, 1e-5), (jnp.bfloat16, 48, NO_WINDOW, 1e-2)],
)
def test_decodes_for_all_cores_match_reference(dtype, block_size: int, window: int, tolerance: float) -> None:
    """The CPU's kernel divides its work differently with many rows, and part-filled blocks into cache lines."""
    op = attention(6, 3, 16, block_size, dtype)
    rng = np.random.default_rng(11)
    step = make(11, [(int(length), 1) for length in rng.integers(1, 300, ROWS_PER_CORE * num_cores() + 1)], op)
    expected, expected_pool = reference(step, window=window)
    out, pool = run(op, step, window=window)
    np.testing.assert_allclose(
        np.asarray(out, np.float32)[step.rows], expected[step.rows], rtol=tolerance, atol=tolerance
    )
    assert_pools_equal(pool, expected_pool)


def assert_pools_equal(pool: SplitPool, expected: SplitPool) -> None:
    """Check that pools are equal except for the null block, where padding goes."""
    num_blocks = expected.k.shape[0] // NUM_LAYERS
    for got, want in zip(pool, expected, strict=True):
        got, want = (np.delete(np.asarray(x, np.float32), LAYER * num_blocks, axis=0) for x in (got, want))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("head_dim", "tolerance"), [(256, 1e-5), (512, 2e-5)])
def test_heads_as_wide_as_they_come(head_dim: int, tolerance: float) -> None:
    op = attention(4, 2, head_dim)
    step = make(14, [(17, 1), (130, 1), (33, 33), (150, 47)], op)
    expected, expected_pool = reference(step, window=100)
    out, pool = run(op, step, window=100)
    np.testing.assert_allclose(out[step.rows], expected[step.rows], rtol=tolerance, atol=tolerance)
    assert_pools_equal(pool, expected_pool)


@pytest.mark.parametrize("head_dim", [64, 512])
def test_bfloat16_error_is_at_most_twice_that_of_its_inputs(head_dim: int) -> None:
    op = attention(4, 2, head_dim, dtype=jnp.bfloat16)
    step = make(1, RAGGED, op)
    exact, _ = reference(step)
    out, _ = run(op, step)
    rounded = exact.astype(jnp.bfloat16).astype(np.float32)
    error = np.abs(np.asarray(out, np.float32) - exact)[step.rows].max()
    assert error <= 2 * max(np.abs(rounded - exact)[step.rows].max(), 2**-8)


@pytest.mark.parametrize("lengths", [[(77, 77), (3, 3)], [(length, 1) for length in (1, 2, 15, 16, 17, 31, 200)]])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.usefixtures("avx2")
def test_with_avx2_alone(lengths, head_dim: int, dtype) -> None:
    op = attention(4, 2, head_dim, dtype=dtype)
    step = make(1, lengths, op)
    rope = step.rope if dtype == jnp.bfloat16 else None  # which rounds as the reference does
    expected, expected_pool = reference(step, rope=rope)
    out, pool = run(op, step, rope=rope)
    np.testing.assert_allclose(np.asarray(out, np.float32)[step.rows], expected[step.rows], rtol=2e-2, atol=1e-2)
    assert_pools_equal(pool, expected_pool)


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_rotates_queries_and_keys(kv_dtype) -> None:
    op = attention(4, 2, 64, dtype=jnp.bfloat16, kv_dtype=kv_dtype)
    step = make(8, RAGGED, op)
    expected, expected_pool = reference(step, rope=step.rope)
    out, pool = run(op, step, rope=step.rope)
    np.testing.assert_allclose(np.asarray(out, np.float32)[step.rows], expected[step.rows], rtol=2e-2, atol=1e-2)
    if kv_dtype != jnp.bfloat16:
        pool = SplitPool(*(x.view(kv_dtype) for x in pool))
    assert_pools_equal(pool, expected_pool)


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_a_narrower_pool_holds_rounded_values(kv_dtype) -> None:
    op = attention(4, 2, 16, kv_dtype=kv_dtype)
    step = make(6, RAGGED, op)
    expected, expected_pool = reference(step)
    out, pool = run(op, step)
    np.testing.assert_allclose(out[step.rows], expected[step.rows], rtol=1e-5, atol=1e-5)
    assert_pools_equal(SplitPool(*(jax.lax.bitcast_convert_type(x, kv_dtype) for x in pool)), expected_pool)


@pytest.mark.parametrize(("kv_dtype", "most"), [(jnp.float8_e4m3fn, 448.0), (jnp.float16, 65504.0)])
def test_values_beyond_a_narrower_range_are_clipped(kv_dtype, most: float) -> None:
    op = attention(1, 1, 16, kv_dtype=kv_dtype)
    step = make(7, [(3, 3)], op)
    step = step._replace(v=step.v.at[0].set(1e6))
    out, _ = run(op, step)
    np.testing.assert_allclose(out[0], most)


def assert_same(got, expected, dtype) -> None:
    """Check equality to the bit, except for XLA:CPU's float32 matmuls: their last bit may differ between row counts."""
    tolerance = 0 if dtype == jnp.bfloat16 or IMPLEMENTATION == "cpu" else 1e-6
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(expected, np.float32), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize(("window", "has_sinks"), [(NO_WINDOW, False), (400, True)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_does_not_depend_on_its_batch(dtype, window: int, has_sinks: bool) -> None:
    """A row is decoded alone or among others, and as a decode or as the last row of a chunk.

    The CPU's kernel attends spans of a long context separately where rows are few.
    """
    op = attention(6, 3, 16, dtype=dtype)
    lengths = [5, 40, 129, 2 * SPAN + 190, 31, SPAN + 1]
    whole = make(2, [(length, length) for length in lengths], op)
    batch, ends = whole.batch, np.cumsum(lengths)
    sinks = np.random.default_rng(0).standard_normal(6).astype(np.float32) if has_sinks else None
    settings = {"window": window, "sinks_n": sinks}
    out, filled = run(op, whole, **settings)
    batch, whole = jax.tree.map(np.asarray, (batch, whole))
    for picked in ([0], [3], [1, 2, 4], list(range(6)), [3, 5] * (ROWS_PER_CORE * num_cores() // 2)):
        index = np.array([ends[i] - 1 for i in picked])
        arrays: dict[str, Any] = {
            "slots_t": batch.slots_t[index],
            "block_tables_sm": batch.block_tables_sm[np.array(picked)],
            "context_lens_s": batch.context_lens_s[np.array(picked)],
            "query_starts_s": np.arange(len(picked), dtype=np.int32),
            "query_ends_s": np.arange(1, len(picked) + 1, dtype=np.int32),
            "num_decodes": np.int32(len(picked)),
            "tile_seqs_i": np.zeros(1, np.int32),
            "tile_rows_i": np.zeros(1, np.int32),
            "num_tiles": np.int32(0),
        }
        alone = AttentionBatch(**arrays)
        q, k, v = (x[index] for x in (whole.q, whole.k, whole.v))
        decoded, _ = run(op, whole._replace(q=q, k=k, v=v, pool=filled, batch=alone), **settings)
        assert_same(decoded, out[index], dtype)


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("implementation", ["cpu"], indirect=True)
@pytest.mark.parametrize(
    ("block_size", "heads", "window"), [(16, (14, 2), NO_WINDOW), (48, (6, 3), 400), (128, (4, 1), 600)]
)
def test_spans_that_are_attended_apart_match_reference(block_size: int, heads: tuple[int, int], window: int) -> None:
    op = attention(*heads, 16, block_size)
    step = make(7, [(3 * SPAN + 21, 1), (SPAN - 5, 1)], op)
    sinks = np.random.default_rng(0).standard_normal(heads[0]).astype(np.float32)
    settings = {"window": window, "soft_cap": 3.0, "sinks_n": sinks}
    expected, expected_pool = reference(step, **settings)
    out, pool = run(op, step, **settings)
    np.testing.assert_allclose(out[step.rows], expected[step.rows], rtol=1e-5, atol=1e-5)
    assert_pools_equal(pool, expected_pool)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_decode_rows_in_a_group_or_left_over_from_one(dtype) -> None:
    op = attention(6, 3, 16, dtype=dtype)
    step = make(5, [(length, 1) for length in (200, 3, 129, 40, 7, 131, 77, 128, 90, 31, 12)], op)
    out, filled = run(op, step)
    expected, _ = reference(step)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.asarray(out[:11], np.float32), expected[:11], rtol=tolerance, atol=tolerance)
    for num_decodes in (1, 2, 3, 9, 10):
        batch = step.batch._replace(
            num_decodes=jnp.int32(num_decodes),
            context_lens_s=jnp.where(
                jnp.arange(len(step.batch.context_lens_s)) < num_decodes, step.batch.context_lens_s, 0
            ),
        )
        fewer, _ = run(op, step._replace(pool=filled), batch=batch)
        assert_same(fewer[:num_decodes], out[:num_decodes], dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_chunks_equal_the_whole(dtype) -> None:
    op = attention(4, 2, 16, dtype=dtype)
    whole = make(3, [(150, 150)], op, padding=0)
    out, _ = run(op, whole, window=40)
    whole = jax.tree.map(np.asarray, whole)  # what numpy cuts need not be compiled
    pool, parts = whole.pool, []
    for start, end in pairwise([0, 7, 8, 60, 64, 149, 150]):
        chunk = end - start
        starts = list(range(0, chunk, XLA_TILES.query)) if chunk > 1 else []
        part = whole.batch._replace(
            slots_t=whole.batch.slots_t[start:end],
            context_lens_s=np.array([end], np.int32),
            query_ends_s=np.array([chunk], np.int32),
            num_decodes=np.int32(chunk == 1),
            tile_seqs_i=np.zeros(8, np.int32),
            tile_rows_i=np.array(starts + [0] * (8 - len(starts)), np.int32),
            num_tiles=np.int32(len(starts)),
        )
        q, k, v = (x[start:end] for x in (whole.q, whole.k, whole.v))
        got, pool = run(op, whole._replace(q=q, k=k, v=v, pool=pool, batch=part), window=40)
        parts.append(np.asarray(got, np.float32))
    assert_same(np.concatenate(parts), out, dtype)


@pytest.mark.cpu_kernels
@pytest.mark.parametrize("implementation", ["cpu"], indirect=True)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_blocks_before_the_window_need_not_exist(dtype) -> None:
    op = attention(4, 2, 16, dtype=dtype)
    window = 4
    step = make(6, [(300, 1), (68, 1), (52, 1), (90, 33)], op)
    expected, _ = run(op, step, window=window)
    tables = np.array(step.batch.block_tables_sm)
    for table, first_row in zip(tables, (299, 67, 51, 57), strict=False):
        table[: max(0, first_row - window + 1) // 16] = 0  # all NaN
    got, _ = run(op, step, batch=step.batch._replace(block_tables_sm=jnp.asarray(tables)), window=window)
    assert_same(got[step.rows], expected[step.rows], dtype)
    assert np.isfinite(np.asarray(got, np.float32)).all()


def test_the_same_call_twice_is_bitwise_equal() -> None:
    op = attention(4, 2, 16, dtype=jnp.bfloat16)
    step = make(4, RAGGED, op)
    first, second = (np.asarray(run(op, step)[0], np.float32) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_refuses_arrays_of_another_shape() -> None:
    op = attention(4, 2, 16, block_size=32)
    step = make(5, [(5, 5)], op)
    with pytest.raises(ValueError, match="are not of"):
        run(op, step._replace(q=step.q[:, :3]))
    with pytest.raises(ValueError, match="are not of"):
        run(op, step._replace(k=step.k[:2]))
    with pytest.raises(ValueError, match="does not hold 3 layers"):
        run(op, step._replace(pool=SplitPool(step.pool.v, step.pool.k)))


def test_pool_specs_have_layers_end_to_end() -> None:
    shape = CASES["smollm2-135m"].shape(block_size=128)
    split: Any = PagedAttention(shape).pool_spec(30, 9)
    keys, values = split
    assert (keys.shape, values.shape, keys.dtype) == ((270, 3, 64, 128), (270, 3, 128, 64), jnp.bfloat16)
    paired: Any = PagedAttention(shape, "cpu").pool_spec(30, 9)
    assert [x.shape for x in paired] == [(270, 3, 32, 128, 2), (270, 3, 64, 64, 2)]
    eight_bits: Any = PagedAttention(shape._replace(kv_dtype=jnp.dtype(jnp.float8_e5m2)), "cpu").pool_spec(30, 9)
    assert [x.shape for x in eight_bits] == [x.shape for x in split]
    fused: Any = PagedAttention(shape, "tpu").pool_spec(30, 9)[0]
    assert (fused.shape, fused.dtype) == ((270, 3, 128, 128), jnp.bfloat16)


def test_pairs_lie_side_by_side() -> None:
    keys, values = (np.arange(4 * 6, dtype=np.float32).reshape(1, 1, *block) for block in ((4, 6), (6, 4)))
    paired = PairedPool.of(SplitPool(keys, values))
    assert paired.k[0, 0, 1, 5].tolist() == keys[0, 0, 2:4, 5].tolist()
    assert paired.v[0, 0, 1, 3].tolist() == values[0, 0, 2:4, 3].tolist()
    for got, want in zip(split(paired), (keys, values), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_processor_without_avx2_runs_plain_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = processor.restricted(processor.host(), "plain")
    monkeypatch.setattr("pallas_kernels.native.processor.current", lambda: plain)
    op, reason = pick(CASES["llama-3-8b"].shape(), "cpu")
    assert op.implementation == "xla"
    assert "neither AVX2 and FMA nor NEON" in str(reason)


def test_each_platform_gets_its_own_kernels_where_they_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pallas_kernels.native.compiling.refuse", lambda: None)
    shape = CASES["llama-3-8b"].shape()
    picked = [pick(shape, platform, architecture="9.0")[0].implementation for platform in ("cpu", "tpu", "gpu")]
    assert picked == ["cpu", "tpu", "gpu"]
    assert pick(shape, "cpu", "tpu")[0].interpret
    assert not pick(shape, "tpu", "tpu")[0].interpret
    op, reason = pick(shape._replace(head_dim=80), "tpu")
    assert (op.implementation, reason) == ("xla", "head_dim must be 64, 128, 256 or 512, not 80")
    assert pick(shape._replace(head_dim=72), "cpu")[0].implementation == "xla"
    wide = CASES["gemma-4-26b-global"].shape()
    assert [pick(wide, platform)[0].implementation for platform in ("cpu", "tpu")] == ["cpu", "tpu"]
    op, reason = pick(wide, "gpu", architecture="9.0")
    assert op.implementation == "xla"
    assert reason is not None
    assert reason.startswith("head_dim must be 64, 128 or 256, not 512")
    assert reason.endswith("three times their bytes")
    float32 = shape._replace(dtype=jnp.dtype("float32"), kv_dtype=jnp.dtype("float32"))
    assert pick(float32, "gpu", architecture="9.0")[1] == "dtype must be bfloat16, not float32"
    for platform, name, wrong, match in (
        ("cpu", "cuda", {}, r"no implementation 'cuda', only xla, cpu, tpu, gpu"),
        ("gpu", "tpu", {}, r"'tpu' does not run on a gpu"),
        (
            "tpu",
            "tpu",
            {"block_size": 8},
            r"cannot run this model here: block_size must be 16, 32, 64, 128, not 8",
        ),
        ("tpu", "tpu", {"kv_dtype": jnp.dtype("float32")}, "same dtype or float8"),
        ("gpu", "cpu", {}, r"'cpu' does not run on a gpu"),
        ("cpu", "cpu", {"block_size": 8}, "multiples of 16, not 128 and 8"),
        ("cpu", "gpu", {"num_heads": 8 * 65}, "at most 64 query heads"),
    ):
        with pytest.raises(ValueError, match=match):
            pick(shape._replace(**wrong), platform, name, architecture="9.0")


@pytest.mark.parametrize(
    ("architecture", "default", "fact"),
    [
        ("9.0", "gpu", None),
        ("8.0", "gpu_mma", "has compute capability 8.0"),
        ("8.9", "gpu_mma", "has compute capability 8.9"),
        ("10.0", "gpu_mma", "has compute capability 10.0"),
        ("12.0", "gpu_mma", "has compute capability 12.0"),
        ("7.5", "xla", "has compute capability 7.5"),
        ("gfx942", "xla", "is not NVIDIA's (gfx942)"),
        (None, "xla", "is not NVIDIA's (ROCm)"),
    ],
)
def test_each_gpu_has_the_kernels_that_run_on_it(architecture: str | None, default: str, fact: str | None) -> None:
    shape = CASES["llama-3-8b"].shape()
    op, reason = pick(shape, "gpu", architecture=architecture)
    assert op.implementation == default
    if default == "xla":
        missing = f"the kernels are for NVIDIA's GPUs from Ampere on (compute capability 8.0), and this GPU {fact}"
        assert reason == missing
        # This reason comes before one that another model may have: it holds for another head size too.
        assert pick(shape._replace(head_dim=80), "gpu", architecture=architecture)[1] == missing
    else:
        assert reason is None
        assert pick(shape, "gpu", default, architecture=architecture)[0] == op
    if fact is not None:
        missing = f"the kernels are for NVIDIA's Hopper (compute capability 9.0), and this GPU {fact}"
        with pytest.raises(ValueError, match=re.escape(f"'gpu' cannot run this model here: {missing}")):
            pick(shape, "gpu", "gpu", architecture=architecture)
    assert pick(shape, "gpu", "xla", architecture=architecture)[0].implementation == "xla"
    assert pick(shape, "cpu", "gpu", architecture=architecture)[0].interpret
