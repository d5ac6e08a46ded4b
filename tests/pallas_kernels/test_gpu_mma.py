"""The kernels for GPUs from Ampere on equal the reference in the interpreter, in which a thread block is one thread."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.paged_attention import NO_WINDOW, AttentionShape, pick
from pallas_kernels.paged_attention.gpu.splits import SplitRule
from pallas_kernels.paged_attention.gpu_mma import MMA_ROWS, decode_attention
from pallas_kernels.paged_attention.gpu_mma.decode import decode_sizes
from tests.pallas_kernels.gpu import assert_pools_equal, filled, interpreted
from tests.pallas_kernels.steps import LAYER, NUM_LAYERS, SCALE, Step, fused, make_step, reference, with_row_ends

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]
UNTOUCHED = 7.0


def shape_of(
    n: int, k: int, h: int = 64, block_size: int = 16, kv_dtype: Any = jnp.bfloat16, dtype: Any = jnp.bfloat16
) -> AttentionShape:
    return AttentionShape(n, k, h, block_size, jnp.dtype(dtype), jnp.dtype(kv_dtype))


F16 = jnp.float16


def make(shape: AttentionShape, chunks: list[tuple[int, int]]) -> Step:
    return make_step(np.random.default_rng(0), chunks, shape, query_tile=64, row_alignment=16)


@cache
def compiled_decode(soft_cap: float | None = None) -> Any:
    def function(q: Any, pool: Any, batch: Any, window: Any, sinks_n: Any) -> Any:
        t, n, h = q.shape
        k = pool.kv.shape[1]
        sizes = decode_sizes(h, k, n // k)._replace(splits=SplitRule(most=3, least_tiles=1), most_blocks=2)
        padding = ((0, 0), (0, 0), (0, -(n // k) % MMA_ROWS), (0, 0))
        # The padding of the query heads may be anything.
        q_rkmh = jnp.pad(q.reshape(t, k, n // k, h), padding, constant_values=jnp.nan)
        out_tc = jax.new_ref(jnp.full((t, n * h), UNTOUCHED, q.dtype))
        masks: dict[str, Any] = {"window": window, "sinks_n": sinks_n, "soft_cap": soft_cap}
        layers: dict[str, Any] = {"layer": LAYER, "num_layers": NUM_LAYERS}
        decode_attention(q_rkmh, pool, batch, out_tc, scale=SCALE, sizes=sizes, interpret=True, **masks, **layers)
        return jax.freeze(out_tc).reshape(q.shape)

    return jax.jit(function)


@pytest.mark.parametrize(
    ("shape", "window", "soft_cap", "has_sinks"),
    [
        (shape_of(3, 1, block_size=64), 40, 5.0, True),
        (shape_of(4, 1, 128), NO_WINDOW, None, False),
        (shape_of(1, 1, 256, 128), 100, None, False),
        (shape_of(20, 1, kv_dtype=jnp.float8_e4m3fn), NO_WINDOW, None, True),
        (shape_of(4, 1, kv_dtype=jnp.float8_e5m2), 1, None, False),
    ],
    ids=str,
)
def test_decode_matches_the_reference(
    shape: AttentionShape, window: int, soft_cap: float | None, has_sinks: bool
) -> None:
    step = make(shape, [(1, 1), (17, 1), (193, 1), (20, 4)])
    sinks = np.random.default_rng(1).standard_normal(shape.num_heads).astype(np.float32) if has_sinks else None
    pool, expected = filled(step, window=window, soft_cap=soft_cap, sinks_n=sinks)
    out = interpreted(compiled_decode(soft_cap), step.q, pool, step.batch, window, sinks)
    out = np.asarray(out, np.float32)
    np.testing.assert_allclose(out[:3], expected[:3], rtol=2e-2, atol=2e-2)
    assert (out[3:] == UNTOUCHED).all(), "rows that are no decodes stay as they are"


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    step = make(shape_of(4, 1, 128), [(7, 1), (150, 1)])
    pool, _ = filled(step)
    out = interpreted(compiled_decode(), step.q, pool, step.batch, NO_WINDOW, None)
    batch = step.batch._replace(
        block_tables_sm=step.batch.block_tables_sm[1:2],
        context_lens_s=step.batch.context_lens_s[1:2],
        num_decodes=jnp.int32(1),
    )
    alone = interpreted(compiled_decode(), step.q[1:2], pool, batch, NO_WINDOW, None)
    np.testing.assert_array_equal(np.asarray(alone[0]), np.asarray(out[1]))


@pytest.mark.parametrize(
    ("shape", "window", "soft_cap", "ends"),
    [
        (shape_of(2, 1), NO_WINDOW, None, None),
        (shape_of(2, 2, 128, 64), 30, 5.0, "images"),
        (shape_of(1, 1, 256, 32), 100, None, None),
        (shape_of(2, 1, kv_dtype=jnp.float8_e4m3fn), NO_WINDOW, None, "falling"),
        (shape_of(2, 1, kv_dtype=F16, dtype=F16), 30, None, None),
    ],
    ids=str,
)
def test_the_op_rotates_writes_decodes_and_prefills(
    shape: AttentionShape, window: int, soft_cap: float | None, ends: str | None
) -> None:
    step = make(shape, [(5, 1), (90, 70), (20, 17)])
    step = step if ends is None else with_row_ends(step, ends)
    # Of a float8 pool, the keys are rounded after they are rotated, which the reference does not do.
    rope = step.rope if shape.kv_dtype == shape.dtype else None
    op, _ = pick(shape, "cpu", "gpu_mma")
    settings = {"window": window, "soft_cap": soft_cap}
    expected, expected_pool = reference(step, **settings, **({"rope": rope} if rope else {}))
    layers = {"layer": LAYER, "num_layers": NUM_LAYERS, "scale": SCALE}
    function = jax.jit(lambda *x: op(*x[:-1], rope=x[-1], **settings, **layers))
    out, pool = interpreted(function, step.q, step.k, step.v, fused(step.pool), step.batch, rope)
    out = np.asarray(out, np.float32)
    np.testing.assert_allclose(out[step.rows], expected[step.rows], rtol=2e-2, atol=2e-2)
    assert np.isfinite(out).all(), "padding rows must stay finite, they flow through the layers"
    assert_pools_equal(pool, expected_pool)


@pytest.mark.parametrize(("chunks", "num_rows"), [([(20, 1)], 1), ([(20, 1), (9, 5)], 21)])
def test_steps_without_padding(chunks: list[tuple[int, int]], num_rows: int) -> None:
    """The kernel that writes takes eight rows at a time, and prefill sixteen."""
    shape = shape_of(2, 1)
    step = make(shape, chunks)
    expected, expected_pool = reference(step, rope=step.rope)
    q, k, v, rope = jax.tree.map(lambda x: x[:num_rows], (step.q, step.k, step.v, step.rope))
    batch = step.batch._replace(slots_t=step.batch.slots_t[:num_rows])
    op, _ = pick(shape, "cpu", "gpu_mma")
    layers: dict[str, Any] = {"layer": LAYER, "num_layers": NUM_LAYERS, "scale": SCALE}
    function = jax.jit(lambda *x: op(*x[:-1], rope=x[-1], window=NO_WINDOW, **layers))
    out, pool = interpreted(function, q, k, v, fused(step.pool), batch, rope)
    np.testing.assert_allclose(np.asarray(out, np.float32)[step.rows], expected[step.rows], rtol=2e-2, atol=2e-2)
    assert_pools_equal(pool, expected_pool)


def numbers_of_threads(layout: Any, shape: tuple[int, int]) -> np.ndarray:
    """Return the indices of a matrix's entries that each thread of each warp has, in order."""
    x = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        outer = x.ndim - len(tile)
        split = [part for size, t in zip(x.shape[outer:], tile, strict=True) for part in (size // t, t)]
        x = x.reshape(*x.shape[:outer], *split)
        x = x.transpose(*range(outer), *range(outer, x.ndim, 2), *range(outer + 1, x.ndim, 2))
    threads = [axis % x.ndim for axis in (*layout.warp_dims, *layout.lane_dims) if isinstance(axis, int)]
    return np.moveaxis(x, threads, range(len(threads))).reshape(4, 32, -1)


def test_a_result_of_an_mma_is_the_operand_of_the_next() -> None:
    """`as_operand` relies on it."""
    layouts = mgpu.MMALayouts(jnp.bfloat16)
    result, operand = (numbers_of_threads(layout, (64, 64)) for layout in (layouts.acc, layouts.lhs))
    np.testing.assert_array_equal(result, operand)


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        (shape_of(8, 8), {"7.5": "xla", "8.0": "gpu_mma", "9.0": "gpu", "12.1": "gpu_mma"}),
        (shape_of(8, 8, kv_dtype=F16, dtype=F16), {"8.0": "gpu_mma", "9.0": "gpu_mma"}),
        (shape_of(72, 1), {"8.0": "gpu_mma", "9.0": "gpu_mma"}),
        (shape_of(8, 8, h=80), {"8.0": "xla", "9.0": "xla"}),
    ],
    ids=["bfloat16", "float16", "72 query heads", "h=80"],
)
def test_a_gpu_runs_the_first_kernels_that_take_the_shape(shape: AttentionShape, names: dict[str, str]) -> None:
    for architecture, name in names.items():
        op, reason = pick(shape, "gpu", architecture=architecture)
        assert op.implementation == name
        assert (reason is None) == (name != "xla")


def test_the_reason_for_plain_xla_is_the_shape_where_kernels_run() -> None:
    for architecture in ("8.9", "9.0"):
        _, reason = pick(shape_of(8, 8, h=80), "gpu", architecture=architecture)
        assert "head_dim must be 64, 128 or 256" in str(reason)
    _, reason = pick(shape_of(8, 8, h=80), "gpu", architecture="7.5")
    assert "from Ampere on" in str(reason)


def test_results_of_splits_are_bounded_for_any_number_of_query_heads() -> None:
    for k, group in ((1, 1), (8, 4), (1, 16), (1, 17), (8, 64), (1, 128)):
        rows = decode_sizes(128, k, group).splits.most * k * -(-group // MMA_ROWS) * MMA_ROWS
        assert rows <= 160 * MMA_ROWS
