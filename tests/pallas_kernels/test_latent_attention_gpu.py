"""The GPU's attention over latents equals the reference in its interpreter, which detects races."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chosen import to_lists
from pallas_kernels.latent_attention import LatentAttention, LatentPool, LatentShape, pick
from pallas_kernels.latent_attention.cases import CASES
from pallas_kernels.latent_attention.gpu import decode_attention, prefill_attention
from pallas_kernels.latent_attention.gpu.attend import Config, fill_smem
from pallas_kernels.latent_attention.gpu.sizes import Heads, divide_heads, split_rule
from pallas_kernels.paged_attention.gpu.splits import SplitRule
from tests.pallas_kernels.gpu import interpreted, traced
from tests.pallas_kernels.latent_steps import LAYER, NUM_LAYERS, SCALE, Step, assert_pools_equal, make, reference
from tests.pallas_kernels.rounding import has_exact_matmuls

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]
BFLOAT16 = jnp.dtype(jnp.bfloat16)
UNTOUCHED = 7.0


def attention(
    num_heads: int,
    latent_dim: int = 512,
    block_size: int = 16,
    kv_dtype: Any = jnp.bfloat16,
    top_k: int | None = None,
) -> LatentAttention:
    shape = LatentShape(num_heads, latent_dim, 64, block_size, BFLOAT16, jnp.dtype(kv_dtype), top_k)
    return LatentAttention(shape, "gpu", interpret=True)


def make_step(seed: int, chunks: list[tuple[int, int]], op: LatentAttention) -> Step:
    return make(seed, chunks, op, row_alignment=op.row_alignment)


@pytest.mark.parametrize(
    ("op", "chunks"),
    [
        (attention(16), [(1, 1), (70, 1), (20, 6)]),
        (attention(20, block_size=64), [(65, 1), (67, 3)]),
        (attention(2, 256, 128), [(130, 1), (150, 33)]),
        (attention(72, 256), [(17, 1), (66, 2)]),
        (attention(20, 256, 32), [(64, 1), (33, 1)]),
        (attention(8, kv_dtype=jnp.float8_e4m3fn), [(65, 1), (130, 9)]),
        (attention(4, 256, 64, jnp.float8_e5m2), [(193, 1), (1, 1)]),
    ],
    ids=["16 heads", "20 heads", "2 heads of 256", "two groups of 36 heads", "decodes alone", "e4m3", "e5m2 decodes"],
)
def test_matches_reference(op: LatentAttention, chunks: list[tuple[int, int]]) -> None:
    """Steps of decodes alone come without room for tiles, and then only decodes are attended."""
    step = make_step(len(chunks), chunks, op)
    has_tiles = chunks[-1][1] > 1
    if not has_tiles:
        step = step._replace(batch=step.batch.without_tiles())
    expected, expected_pool = reference(step, op)

    @jax.jit
    def function(q: Any, latents: Any, pool: Any, batch: Any, layer: Any) -> Any:
        return op(q, latents, pool, batch, layer=layer, num_layers=NUM_LAYERS, scale=SCALE)

    arguments = step.q, step.latents, step.pool, step.batch, LAYER
    out, pool = interpreted(function, *arguments)
    out = np.asarray(out, np.float32)
    np.testing.assert_allclose(out[step.rows], expected[step.rows], rtol=2e-2, atol=1e-2)
    assert np.isfinite(out).all(), "padding rows must stay finite, they flow through the layers"
    assert_pools_equal(pool, expected_pool)
    kernels = traced(function, *arguments)
    assert "latent_decode" in kernels
    assert ("latent_prefill" in kernels) == has_tiles


@pytest.mark.parametrize(
    ("op", "chunks"),
    [
        (attention(16, top_k=200), [(1, 1), (100, 1), (250, 1), (40, 10)]),
        (attention(80, 256, 64, top_k=40), [(90, 1), (5, 2)]),
        (attention(8, 256, 128, top_k=300), [(5, 1), (290, 1)]),
        (attention(8, 512, 32, jnp.float8_e4m3fn, top_k=130), [(170, 1), (20, 2)]),
    ],
    ids=["splits", "two groups of 40 heads", "splits of decodes alone", "e4m3"],
)
def test_chosen_positions_match_the_reference(op: LatentAttention, chunks: list[tuple[int, int]]) -> None:
    """Each row sees nothing but its positions: the rest of the pool is NaN, or belongs to other rows."""
    step = make_step(len(chunks), chunks, op)
    has_tiles = chunks[-1][1] > 1
    if not has_tiles:
        step = step._replace(batch=step.batch.without_tiles())
    expected, _ = reference(step, op)

    @jax.jit
    def function(q: Any, latents: Any, pool: Any, batch: Any, layer: Any, chosen_tw: Any) -> Any:
        settings: dict[str, Any] = {"layer": layer, "num_layers": NUM_LAYERS, "scale": SCALE}
        return op(q, latents, pool, batch, **settings, chosen_tw=chosen_tw)

    arguments = step.q, step.latents, poisoned(step, op), step.batch, LAYER, step.chosen
    out, _ = interpreted(function, *arguments)
    out = np.asarray(out, np.float32)
    np.testing.assert_allclose(out[step.rows], expected[step.rows], rtol=2e-2, atol=1e-2)
    assert np.isfinite(out).all(), "padding rows must stay finite, they flow through the layers"
    is_split = "latent_chosen_split" in traced(function, *arguments)
    # A split has at least two tiles of 64.
    assert is_split == (op.shape.top_k is not None and op.shape.top_k > 192)


def poisoned(step: Step, op: LatentAttention) -> LatentPool:
    """Return the step's pool with NaN wherever no row attends."""
    seen, tables = np.zeros(step.pool.latents.shape[:2], bool), np.asarray(step.batch.block_tables_sm)
    first, lists = LAYER * (len(seen) // NUM_LAYERS), to_lists(np.asarray(step.chosen))
    for seq, (start, end) in enumerate(zip(step.batch.query_starts_s, step.batch.query_ends_s, strict=True)):
        for positions in lists[start:end]:
            blocks, offsets = np.divmod(positions, op.shape.block_size)
            seen[first + tables[seq][blocks], offsets] = True
    return LatentPool(jnp.where(seen[..., None], step.pool.latents, jnp.nan))


def test_rows_without_a_position_are_finite() -> None:
    op = attention(8, 256, top_k=70)
    step = make_step(2, [(5, 1), (33, 20)], op)
    run = jax.jit(lambda *args: op(*args[:4], layer=LAYER, num_layers=NUM_LAYERS, scale=SCALE, chosen_tw=args[4]))
    out, _ = interpreted(run, step.q, step.latents, step.pool, step.batch, jnp.zeros_like(step.chosen))
    assert np.isfinite(np.asarray(out, np.float32)).all()


def filled(step: Step, op: LatentAttention) -> tuple[LatentPool, np.ndarray]:
    """Return the pool with the step's latents in it, null blocks NaN again, and the expected output."""
    expected, [pool] = reference(step, op)
    pool[:: len(pool) // NUM_LAYERS] = np.nan
    return LatentPool(jnp.asarray(pool, BFLOAT16)), expected


def attend(kernel: Any, step: Step, pool: LatentPool, op: LatentAttention, **settings: Any) -> np.ndarray:
    """Run one of the kernels alone, on an array of `UNTOUCHED`."""

    @jax.jit
    def function(q: Any, pool: Any, batch: Any, layer: Any) -> Any:
        out = jnp.full((*q.shape[:2], op.shape.latent_dim), UNTOUCHED, q.dtype)
        fixed = {"num_layers": NUM_LAYERS, "scale": SCALE, "interpret": True}
        return kernel(q, pool, batch, out, layer=layer, **fixed, **settings)

    return np.asarray(interpreted(function, step.q, pool, step.batch, LAYER), np.float32)


def test_a_decode_has_the_same_bits_alone_and_in_a_batch() -> None:
    op, rule = attention(8, 256), SplitRule(most=3, least_tiles=1)
    step = make_step(2, [(7, 1), (250, 1), (20, 4)], op)
    pool, expected = filled(step, op)
    out = attend(decode_attention, step, pool, op, rule=rule)
    np.testing.assert_allclose(out[:2], expected[:2], rtol=2e-2, atol=1e-2)
    assert (out[2:] == UNTOUCHED).all(), "rows that are no decodes stay as they are"
    picked = np.array([1])
    batch = step.batch._replace(
        block_tables_sm=step.batch.block_tables_sm[picked],
        context_lens_s=step.batch.context_lens_s[picked],
        num_decodes=jnp.int32(1),
    )
    alone = step._replace(q=step.q[picked], batch=batch)
    np.testing.assert_array_equal(attend(decode_attention, alone, pool, op, rule=rule), out[picked])


def test_a_row_of_a_chunk_has_the_same_bits_wherever_the_chunk_begins() -> None:
    """The interpreter multiplies with XLA:CPU, whose sums depend a little on a matrix's other rows on some processors.

    So a few numbers may be rounded to the next bfloat16.
    """
    op = attention(4, 256)
    whole = make_step(3, [(80, 40)], op)
    pool, expected = filled(whole, op)
    out = attend(prefill_attention, whole, pool, op)
    np.testing.assert_allclose(out[whole.rows], expected[whole.rows], rtol=2e-2, atol=1e-2)
    rows = op.tiles.query
    batch = whole.batch._replace(
        query_ends_s=whole.batch.query_ends_s - 23,
        tile_rows_i=jnp.arange(len(whole.batch.tile_rows_i), dtype=jnp.int32) * rows,
        num_tiles=jnp.int32(-(-17 // rows)),
    )
    last = attend(prefill_attention, whole._replace(q=whole.q[23:39], batch=batch), pool, op)
    if has_exact_matmuls():
        np.testing.assert_array_equal(last, out[23:39])
    else:
        np.testing.assert_allclose(last, out[23:39], rtol=2**-7, atol=0)
        assert (last != out[23:39]).mean() < 1e-3


def test_heads_fill_the_rows_of_a_matmul() -> None:
    """Rows that are attended together belong to one chunk, and only whole groups of 8 vectors are stored."""
    divided = {count: divide_heads(count) for count in (1, 8, 16, 20, 32, 64, 72, 128)}
    assert divided == {
        1: Heads(1, 1, 16),
        8: Heads(1, 8, 8),
        16: Heads(1, 16, 4),
        20: Heads(1, 20, 2),
        32: Heads(1, 32, 2),
        64: Heads(1, 64, 1),
        72: Heads(2, 36, 1),
        128: Heads(2, 64, 1),
    }


@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("is_split", [True, False])
def test_every_case_has_two_tiles_in_flight(is_split: bool, kv_dtype: Any) -> None:
    for name, case in CASES.items():
        if name == "tiny":
            continue
        config = Config(case.latent_dim, *divide_heads(case.num_heads), 1.0, is_split, False, jnp.dtype(kv_dtype))
        stages = fill_smem(config, case.latent_dim + case.rope_dim).stages
        # A tile of a float8 pool is in flight while another is converted to bfloat16.
        assert stages >= (2 if kv_dtype == jnp.bfloat16 else 1), name


def test_splits_of_large_steps_take_bounded_memory() -> None:
    heads = divide_heads(128)
    assert split_rule(1, heads, 512) == SplitRule(66, 2)
    assert split_rule(256, heads, 512) == SplitRule(2, 8)
    assert split_rule(1024, heads, 512).most == 1


def test_a_hopper_gpu_gets_it() -> None:
    op, reason = pick(CASES["deepseek-v3"].shape(), "gpu", architecture="9.0")
    assert (op.implementation, op.interpret, reason) == ("gpu", False, None)
    assert (op.row_alignment, op.takes_decodes_alone) == (16, True)


@pytest.mark.parametrize(
    ("shape", "architecture", "reason"),
    [
        (CASES["deepseek-v3"].shape(), "8.0", "compute capability 8.0"),
        (CASES["tiny"].shape(), "9.0", "256 or 512 numbers and 64 rotated ones, not 16 and 8"),
        (CASES["kimi-k2"].shape(dtype=jnp.float32), "9.0", "dtype must be bfloat16, not float32"),
        (CASES["kimi-k2"].shape(kv_dtype=jnp.float32), "9.0", "the pool must be bfloat16 or float8, not float32"),
        (CASES["kimi-k2"].shape(block_size=48), "9.0", "block_size must be 16, 32, 64, 128, not 48"),
        (CASES["kimi-k2"]._replace(num_heads=4).shape(top_k=9), "9.0", "4 heads fill no whole groups of 8 rows"),
        (CASES["kimi-k2"]._replace(num_heads=36).shape(), "9.0", "36 heads fill no whole groups of 8 rows"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_what_it_cannot_run_goes_to_plain_xla(shape: LatentShape, architecture: str, reason: str) -> None:
    op, why = pick(shape, "gpu", architecture=architecture)
    assert op.implementation == "xla"
    assert why is not None
    assert reason in why
