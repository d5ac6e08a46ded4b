"""The TPU's kernels of attention over latents equal the float32 reference in the TPU interpreter, without a race."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.implementations import LATENT_ATTENTION
from pallas_kernels.latent_attention import LatentAttention, LatentPool, LatentShape, pick
from pallas_kernels.latent_attention.cases import CASES
from pallas_kernels.latent_attention.layout import row_columns
from pallas_kernels.latent_attention.tpu import tpu_latent_attention, tpu_tiles
from pallas_kernels.paged_attention import Tiles
from pallas_kernels.paged_attention.tpu.prefill import Cut
from tests.pallas_kernels.latent_steps import LAYER, NUM_LAYERS, SCALE, Step, float32, make, reference
from tests.pallas_kernels.rounding import has_exact_matmuls

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation", "tpu_interpreter")]
# A ring shorter than the list of tiles, and tiles shorter than the contexts.
TILES = Tiles(decode=3, query=32, kv=128)
# Decodes of 1 block to 3 and 1 token, chunks at odd positions, of several tiles, of two tokens in one slab.
RAGGED = [(1, 1), (17, 1), (130, 1), (300, 1), (2, 2), (64, 20), (150, 47), (290, 3)]
SHORT = [(49, 1), (193, 1), (33, 33), (197, 70)]
REAL = [name for name in CASES if name != "tiny"]


class Result(NamedTuple):
    out: np.ndarray
    pool: np.ndarray


def op_of(
    num_heads: int,
    latent_dim: int = 128,
    rope_dim: int = 64,
    block_size: int = 16,
    dtype: Any = jnp.float32,
    kv_dtype: Any = None,
    top_k: int | None = None,
) -> LatentAttention:
    dtypes = jnp.dtype(dtype), jnp.dtype(kv_dtype or dtype)
    return LatentAttention(LatentShape(num_heads, latent_dim, rope_dim, block_size, *dtypes, top_k), "tpu")


def make_step(op: LatentAttention, chunks: list[tuple[int, int]], tiles: Tiles = TILES) -> Step:
    """Return a step over a pool whose unused slots are NaN."""
    return make(0, chunks, op, row_alignment=op.row_alignment, query_tile=tiles.query)


@cache
def compiled(latent_dim: int, tiles: Tiles, architecture: str | None) -> Any:
    def function(q: Any, latents: Any, pool: Any, batch: Any, layer: Any, chosen: Any) -> Any:
        settings: dict[str, Any] = {"layer": layer, "num_layers": NUM_LAYERS, "scale": SCALE, "chosen_tw": chosen}
        settings |= {"latent_dim": latent_dim, "tiles": tiles, "architecture": architecture}
        return tpu_latent_attention(q, latents, pool, batch, **settings)

    # Most of the time goes into compiling the interpreter's program.
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def run(op: LatentAttention, step: Step, tiles: Tiles = TILES, architecture: str | None = None) -> Result:
    shape = op.shape
    function = compiled(shape.latent_dim, tiles, architecture)
    latents, layer = step.latents.astype(shape.kv_dtype), jnp.int32(LAYER)
    out, pool = function(step.q, latents, widened(op, step.pool), step.batch, layer, step.chosen)
    assert (out.dtype, pool.latents.dtype) == (step.q.dtype, shape.kv_dtype)
    return Result(float32(out), float32(pool.latents))


def widened(op: LatentAttention, pool: LatentPool) -> LatentPool:
    """Return a pool with rows of whole lanes: zeros behind a token's numbers, NaN in unused slots."""
    width = row_columns(op.shape) - op.shape.key_dim
    rest = jnp.where(jnp.isnan(pool.latents[..., :1]), jnp.nan, 0).astype(pool.latents.dtype)
    return LatentPool(jnp.concatenate([pool.latents, jnp.repeat(rest, width, axis=-1)], axis=-1))


def check_pool(op: LatentAttention, expected: LatentPool, result: Result) -> None:
    """Check that the pool is the reference's to the bit, except the null blocks, where padding need not be written."""
    want, got = np.array(widened(op, expected).latents), result.pool.copy()
    num_blocks = len(want) // NUM_LAYERS
    for x in (want, got):
        x[::num_blocks] = 0
    np.testing.assert_array_equal(got, want)


def check(op: LatentAttention, step: Step, tolerance: float, tiles: Tiles = TILES) -> None:
    expected, pool = reference(step, op)
    result = run(op, step, tiles)
    np.testing.assert_allclose(result.out[step.rows], expected[step.rows], rtol=tolerance, atol=tolerance)
    assert np.isfinite(result.out).all(), "rows of padding must stay finite, they flow through the layers"
    check_pool(op, pool, result)


@pytest.mark.parametrize("num_heads", [1, 5, 16])
def test_matches_reference(num_heads: int) -> None:
    op = op_of(num_heads)
    check(op, make_step(op, RAGGED), 1e-5)


def test_decodes_alone_chunks_alone_and_nothing() -> None:
    """Sequences that are not in the step are neither written nor attended."""
    op = op_of(3)
    step = make_step(op, SHORT)
    whole, rows = run(op, step), np.arange(len(step.q))
    num_decodes = int(step.batch.num_decodes)
    is_decode = rows < num_decodes
    is_tile = np.isin(rows, step.rows) & ~is_decode
    for here, counts in (
        (is_decode, {"num_tiles": jnp.int32(0)}),
        (is_tile, {"num_decodes": jnp.int32(0)}),
        (np.zeros_like(is_tile), {"num_tiles": jnp.int32(0), "num_decodes": jnp.int32(0)}),
    ):
        batch = step.batch._replace(**counts)
        result = run(op, step._replace(batch=batch))
        np.testing.assert_array_equal(result.out[here], whole.out[here])
        written = batch._replace(slots_t=jnp.where(jnp.asarray(here), batch.slots_t, 0))
        check_pool(op, reference(step._replace(batch=written), op)[1], result)


def test_blocks_of_rows() -> None:
    """Blocks see all of a tile, some of it, or only its first half; short ends of chunks are attended in parts."""
    tiles = Tiles(decode=3, query=128, kv=256)
    assert Cut.of(tiles.query, group=20, k=1).parts_per_block == 4
    op = op_of(20, latent_dim=256, block_size=64)
    # The interpreter multiplies with XLA:CPU, whose sums of float32 are a little less exact on some processors.
    tolerance = 1e-5 if has_exact_matmuls() else 3e-5
    check(op, make_step(op, [(90, 90), (197, 70), (400, 130)], tiles), tolerance, tiles)


@pytest.mark.parametrize(("num_heads", "top_k"), [(5, 40), (8, 1)])
def test_chosen_positions_match_the_reference(num_heads: int, top_k: int) -> None:
    """Rows share a register with others', or fill registers; a decode or a chunk may not see its own token."""
    op = op_of(num_heads, top_k=top_k)
    check(op, make_step(op, RAGGED), 1e-5)


def test_chosen_positions_in_blocks_of_rows() -> None:
    """Words fill more than a row of lanes, and blocks of rows have parts."""
    tiles = Tiles(decode=3, query=128, kv=256)
    op = op_of(24, latent_dim=256, block_size=64, top_k=300)
    tolerance = 1e-5 if has_exact_matmuls() else 3e-5
    check(op, make_step(op, [(4500, 1), (197, 70), (4220, 130)], tiles), tolerance, tiles)


def test_a_row_without_a_position_is_finite() -> None:
    op = op_of(8, top_k=20)
    step = make_step(op, SHORT)
    assert np.isfinite(run(op, step._replace(chosen=step.chosen * 0)).out).all()


@pytest.mark.parametrize("case", REAL)
def test_bfloat16_error_is_at_most_twice_that_of_its_inputs(case: str) -> None:
    """The models' own widths, with the heads of one device of four."""
    num_heads, *dims = CASES[case]
    op = op_of(num_heads // 4, *dims, dtype=jnp.bfloat16)
    check_bfloat16(op, make_step(op, SHORT))


@pytest.mark.parametrize("kv_dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_a_pool_of_8_bits_holds_rounded_latents(kv_dtype: Any) -> None:
    op = op_of(5, 256, block_size=32, dtype=jnp.bfloat16, kv_dtype=kv_dtype)
    check_bfloat16(op, make_step(op, SHORT))


def check_bfloat16(op: LatentAttention, step: Step) -> None:
    exact, pool = reference(step, op)
    result = run(op, step)
    rounded = exact.astype(jnp.bfloat16).astype(np.float32)
    error = np.abs(result.out - exact)[step.rows].max()
    assert error <= 2 * max(np.abs(rounded - exact)[step.rows].max(), 2**-8)
    assert np.isfinite(result.out).all()
    check_pool(op, pool, result)


def test_unpacked_float8_is_the_same() -> None:
    """TPUs that unpack another 8-bit float get the same bits."""
    op = op_of(4, block_size=32, dtype=jnp.bfloat16, kv_dtype=jnp.float8_e4m3fn)
    step = make_step(op, SHORT)
    step = step._replace(pool=LatentPool(step.pool.latents + jnp.zeros_like(step.pool.latents)))  # no minus zero
    result, expected = run(op, step, architecture="TPU v6 lite"), run(op, step)
    np.testing.assert_array_equal(result.out, expected.out)
    np.testing.assert_array_equal(result.pool, expected.pool)


@pytest.mark.parametrize("top_k", [None, 6])
def test_the_op_runs_its_kernels_in_place(top_k: int | None) -> None:
    """As in an engine: a pool of its spec and its own tiles, and latents as the model makes them."""
    op, reason = pick(op_of(2, top_k=top_k).shape, "cpu", "tpu")
    assert (op.implementation, op.interpret, reason) == ("tpu", True, None)
    step = make_step(op, [(20, 1), (18, 18)], op.tiles)
    pool = widened(op, step.pool)
    [spec] = op.pool_spec(NUM_LAYERS, len(pool.latents) // NUM_LAYERS)
    assert (spec.shape, spec.dtype) == (pool.latents.shape, pool.latents.dtype)

    def function(pool: Any, q: Any, latents: Any, batch: Any, chosen: Any) -> Any:
        settings: dict[str, Any] = {"layer": LAYER, "num_layers": NUM_LAYERS, "scale": SCALE}
        return op(q, latents, pool, batch, **settings, chosen_tw=chosen)

    out, pool = jax.jit(function)(pool, step.q, step.latents, step.batch, step.chosen)
    expected, expected_pool = reference(step, op)
    np.testing.assert_allclose(float32(out)[step.rows], expected[step.rows], rtol=1e-5, atol=1e-5)
    check_pool(op, expected_pool, Result(float32(out), float32(pool.latents)))


@pytest.mark.parametrize("case", REAL)
@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("architecture", [None, "TPU v6 lite", "TPU7x"])
def test_tiles_of_real_models_fit(case: str, kv_dtype: Any, architecture: str | None) -> None:
    for num_devices in (1, 2, 4):
        shape = CASES[case].shape(kv_dtype=kv_dtype)
        shape = shape._replace(num_heads=shape.num_heads // num_devices)
        assert LATENT_ATTENTION["tpu"].refusal(shape) is None
        tiles = tpu_tiles(shape, architecture)
        assert tiles.decode * tiles.kv * row_columns(shape) * jnp.dtype(kv_dtype).itemsize <= 16 * 2**20
        assert tiles.query * shape.num_heads <= 4096
        assert tiles.kv % shape.block_size == tiles.query % 32 == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"latent_dim": 192}, "latents must have a multiple of 128 numbers, not 192"),
        ({"num_heads": 256}, "a device can have at most 128 heads in bfloat16, not 256"),
        (dict.fromkeys(("dtype", "kv_dtype"), jnp.dtype(jnp.float32)), "a device can have at most 64 heads in float32"),
        ({"dtype": jnp.dtype(jnp.float16)}, "dtype must be bfloat16 or float32, not float16"),
        ({"kv_dtype": jnp.dtype(jnp.float32)}, "the pool must be of the same dtype or float8, not float32"),
        ({"block_size": 16, "kv_dtype": jnp.dtype(jnp.float8_e5m2)}, "block_size must be 32, 64, 128, not 16"),
    ],
)
def test_what_it_cannot_run_goes_to_plain_xla(changes: dict[str, Any], reason: str) -> None:
    shape = CASES["deepseek-v3"].shape()
    op, missing = pick(shape, "tpu")
    assert (op.implementation, missing) == ("tpu", None)
    op, missing = pick(shape._replace(**changes), "tpu")
    assert op.implementation == "xla"
    assert missing is not None
    assert missing.startswith(reason)
