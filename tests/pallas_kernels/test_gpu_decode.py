"""The GPU's decode kernel, and the whole op, equal the reference in their interpreter, which detects races."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.implementations import PAGED_ATTENTION
from pallas_kernels.paged_attention import NO_WINDOW, AttentionBatch, AttentionShape, FusedPool, Rope
from pallas_kernels.paged_attention.cases import CASES
from pallas_kernels.paged_attention.gpu import gpu_paged_attention, gpu_tiles
from pallas_kernels.paged_attention.gpu.common import decode_queries
from pallas_kernels.paged_attention.gpu.decode import DecodeConfig, decode_attention, decode_config
from pallas_kernels.paged_attention.gpu.handover import NEXT, PROVEN, Handover
from pallas_kernels.paged_attention.gpu.splits import SplitRule
from tests.pallas_kernels.gpu import assert_pools_equal, filled, interpreted, traced
from tests.pallas_kernels.steps import LAYER, NUM_LAYERS, SCALE, Step, fused, make_step, reference

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]
# Around the edges of blocks, tiles and splits (of 128 positions here), and a longer chunk that is not for decode.
LENGTHS = [1, 17, 193]
STEP = [(length, 1) for length in LENGTHS] + [(20, 4)]
UNTOUCHED = 7.0


def shape_of(n: int, k: int, h: int = 64, block_size: int = 16, kv_dtype: Any = jnp.bfloat16) -> AttentionShape:
    return AttentionShape(n, k, h, block_size, jnp.dtype(jnp.bfloat16), jnp.dtype(kv_dtype))


def make(seed: int, shape: AttentionShape, chunks: list[tuple[int, int]] = STEP) -> Step:
    return make_step(np.random.default_rng(seed), chunks, shape, query_tile=128, row_alignment=16)


def small(shape: AttentionShape, workers: int = 2, way: Handover = PROVEN) -> DecodeConfig:
    """Return the configuration of a shape, with short splits and few thread blocks."""
    config = decode_config(shape.head_dim, shape.kv_dtype, num_rows=8, num_kv_heads=shape.num_kv_heads, way=way)
    return config._replace(splits=SplitRule(most=3, least_tiles=1), workers=workers)


@cache
def compiled(config: DecodeConfig, soft_cap: float | None = None) -> Any:
    fixed = {"num_layers": NUM_LAYERS, "scale": SCALE, "soft_cap": soft_cap, "config": config, "interpret": True}

    def function(q: Any, pool: Any, batch: Any, layer: Any, window: Any, sinks_n: Any) -> Any:
        t, n, h = q.shape
        k = pool.kv.shape[1]
        padding = ((0, 0), (0, 0), (0, -(n // k) % 8), (0, 0))
        # The padding of the query heads may be anything.
        q_rkgh = jnp.pad(q.reshape(t, k, n // k, h), padding, constant_values=jnp.nan)
        out_tc = jax.new_ref(jnp.full((t, n * h), UNTOUCHED, q.dtype))
        q_rkgh = decode_queries(q_rkgh, pool.kv.dtype)
        decode_attention(q_rkgh, pool, batch, out_tc, layer=layer, window=window, sinks_n=sinks_n, **fixed)
        return jax.freeze(out_tc).reshape(q.shape)

    return jax.jit(function)


def decode(
    step: Step,
    pool: FusedPool,
    config: DecodeConfig,
    *,
    window: int = NO_WINDOW,
    soft_cap: float | None = None,
    sinks_n: np.ndarray | None = None,
) -> np.ndarray:
    out = interpreted(compiled(config, soft_cap), step.q, pool, step.batch, LAYER, window, sinks_n)
    return np.asarray(out, np.float32)


@pytest.mark.parametrize(
    ("shape", "window", "soft_cap", "has_sinks"),
    [
        (shape_of(1, 1), NO_WINDOW, None, False),
        (shape_of(3, 1, block_size=64), 40, 5.0, True),
        (shape_of(4, 1, 128), 130, None, True),
        (shape_of(3, 1, 256, 128), 100, None, False),
        (shape_of(8, 1, kv_dtype=jnp.float8_e4m3fn), NO_WINDOW, None, True),
        (shape_of(4, 1, 128, 64, kv_dtype=jnp.float8_e5m2), 1, None, False),
        (shape_of(9, 1, 256, kv_dtype=jnp.float8_e4m3fn), NO_WINDOW, 2.0, False),
    ],
    ids=str,
)
def test_matches_reference(shape: AttentionShape, window: int, soft_cap: float | None, has_sinks: bool) -> None:
    step = make(0, shape)
    sinks = np.random.default_rng(1).standard_normal(shape.num_heads).astype(np.float32) if has_sinks else None
    settings = {"window": window, "soft_cap": soft_cap, "sinks_n": sinks}
    pool, expected = filled(step, **settings)
    out = decode(step, pool, small(shape), **settings)
    np.testing.assert_allclose(out[: len(LENGTHS)], expected[: len(LENGTHS)], rtol=2e-2, atol=1e-2)
    assert (out[len(LENGTHS) :] == UNTOUCHED).all(), "rows that are no decodes stay as they are"


@pytest.mark.parametrize(
    ("shape", "window", "soft_cap", "has_sinks"),
    [
        (shape_of(1, 1), NO_WINDOW, None, False),
        (shape_of(4, 1, 128), 130, 5.0, True),
        (shape_of(9, 1, 128, 64, kv_dtype=jnp.float8_e4m3fn), 40, None, True),
    ],
    ids=str,
)
def test_the_successor_matches_the_reference(
    shape: AttentionShape, window: int, soft_cap: float | None, has_sinks: bool
) -> None:
    """Once with two stages only, so that each is freed and filled again."""
    step = make(0, shape)
    sinks = np.random.default_rng(1).standard_normal(shape.num_heads).astype(np.float32) if has_sinks else None
    settings = {"window": window, "soft_cap": soft_cap, "sinks_n": sinks}
    pool, expected = filled(step, **settings)
    config = small(shape, way=NEXT)
    assert (config.tile_stages, config.parts) == (2, 1)
    for fewer in (config, config._replace(stages=2)):
        out = decode(step, pool, fewer, **settings)
        np.testing.assert_allclose(out[: len(LENGTHS)], expected[: len(LENGTHS)], rtol=2e-2, atol=1e-2)


def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_any_thread_block() -> None:
    shape = shape_of(4, 1)
    step = make(2, shape, [(7, 1), (150, 1)])
    pool, _ = filled(step)
    out = decode(step, pool, small(shape))
    np.testing.assert_array_equal(decode(step, pool, small(shape)), out)
    np.testing.assert_array_equal(decode(step, pool, small(shape, workers=3)), out)
    picked = np.array([1])
    batch = step.batch._replace(
        block_tables_sm=step.batch.block_tables_sm[picked],
        context_lens_s=step.batch.context_lens_s[picked],
        num_decodes=jnp.int32(1),
    )
    alone = step._replace(q=step.q[picked], batch=batch)
    np.testing.assert_array_equal(decode(alone, pool, small(shape)), out[picked])


@pytest.mark.parametrize("chunks", [[(5, 1), (70, 1), (20, 17)], [(5, 1), (70, 1)]])
def test_the_op_rotates_writes_decodes_and_prefills(chunks: list[tuple[int, int]]) -> None:
    """Steps of decodes alone come without room for tiles, and then there is no prefill."""
    shape = shape_of(2, 1)
    step = make(4, shape, chunks)
    has_tiles = chunks[-1][1] > 1
    if not has_tiles:
        step = step._replace(batch=step.batch.without_tiles())
    expected, expected_pool = reference(step, rope=step.rope)
    settings = {"num_layers": NUM_LAYERS, "scale": SCALE, "tiles": gpu_tiles(shape), "interpret": True}

    @jax.jit
    def function(q: Any, k: Any, v: Any, pool: Any, batch: AttentionBatch, rope: Rope) -> Any:
        return gpu_paged_attention(q, k, v, pool, batch, rope=rope, layer=LAYER, window=NO_WINDOW, **settings)

    arguments = (step.q, step.k, step.v, fused(step.pool), step.batch, step.rope)
    out, pool = interpreted(function, *arguments)
    out = np.asarray(out, np.float32)
    np.testing.assert_allclose(out[step.rows], expected[step.rows], rtol=2e-2, atol=1e-2)
    assert np.isfinite(out).all(), "padding rows must stay finite, they flow through the layers"
    assert_pools_equal(pool, expected_pool)
    kernels = traced(function, *arguments)
    assert "paged_decode" in kernels
    assert ("paged_prefill" in kernels) == has_tiles


@pytest.mark.parametrize("way", [PROVEN, NEXT])
@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_every_case_has_tiles_in_flight(kv_dtype: Any, way: Handover) -> None:
    for name, case in CASES.items():
        if PAGED_ATTENTION["gpu"].refusal(case.shape()):
            continue
        config = decode_config(case.head_dim, jnp.dtype(kv_dtype), 64, case.num_kv_heads, way)
        stage = config.stage_groups * 64 * 2 * case.head_dim * jnp.dtype(kv_dtype).itemsize
        # A multiprocessor's share of 3.35 TB/s, times 2 us: enough to hide the latency of HBM twice.
        assert config.stages >= 2 * config.tile_stages, name
        assert config.stages * stage >= 50_000, name
