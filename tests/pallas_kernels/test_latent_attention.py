"""Attention over latents equals the float32 reference in a poisoned pool, whatever else is in the batch."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import llvmlite.binding as llvm
import numpy as np
import pytest

from pallas_kernels.chosen import to_lists
from pallas_kernels.latent_attention import LatentAttention, LatentPool, LatentShape, pick
from pallas_kernels.latent_attention.cases import CASES
from pallas_kernels.latent_attention.cpu.kernel import ROWS_PER_CORE, Kernel
from pallas_kernels.native import compiling, processor
from pallas_kernels.native.compiling import num_cores
from pallas_kernels.paged_attention import AttentionBatch, copy_blocks
from pallas_kernels.paged_attention.layout import FLOAT8
from tests.pallas_kernels.latent_steps import (
    LAYER,
    NUM_LAYERS,
    SCALE,
    Step,
    assert_pools_equal,
    float32,
    make,
    reference,
)
from tests.quick import QUICK_COMPILE

pytestmark = pytest.mark.cpu_kernels

RAGGED = [(1, 1), (16, 1), (17, 1), (49, 1), (130, 1), (300, 1), (2, 2), (33, 33), (64, 20), (150, 47), (290, 3)]
DTYPES = (jnp.float32, jnp.bfloat16)
# The number of heads, and the sizes of a latent and of its rotated part.
SIZES = [(1, 16, 16), (2, 16, 16), (5, 32, 16), (16, 64, 32), (20, 32, 32)]

IMPLEMENTATION = "xla"


@pytest.fixture(params=["xla", "cpu"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.IMPLEMENTATION", request.param)
    compiled.cache_clear()  # a test may choose another instruction set


def attention(
    sizes: tuple[int, int, int],
    dtype: Any = jnp.float32,
    kv_dtype: Any = None,
    block_size: int = 16,
    top_k: int | None = None,
) -> LatentAttention:
    dtypes = jnp.dtype(dtype), jnp.dtype(kv_dtype or dtype)
    return LatentAttention(LatentShape(*sizes, block_size, *dtypes, top_k), IMPLEMENTATION)


@cache
def compiled(op: LatentAttention) -> Any:
    """Return the op as a function that compiles once for a test's steps of the same shapes."""

    def function(q, latents, pool, batch, layer, chosen):
        settings: dict[str, Any] = {"layer": layer, "num_layers": NUM_LAYERS, "scale": SCALE}
        return op(q, latents, pool, batch, **settings, chosen_tw=chosen)

    quick: dict[str, Any] = dict(QUICK_COMPILE) if op.implementation == "xla" else {}
    return jax.jit(function, compiler_options={"xla_allow_excess_precision": False, **quick})


def run(op: LatentAttention, step: Step, batch: AttentionBatch | None = None) -> tuple[Any, LatentPool]:
    """Run a step, or another batch over its arrays; the layer is traced."""
    pool = step.pool
    if op.shape.kv_dtype.itemsize == 1:
        pool = LatentPool(jax.lax.bitcast_convert_type(pool.latents, jnp.uint8))
    return compiled(op)(step.q, step.latents, pool, step.batch if batch is None else batch, LAYER, step.chosen)


def assert_same(got: Any, expected: Any, dtype: Any) -> None:
    """Check equality to the bit, except for XLA:CPU: its matmuls with latents of 512 depend on the number of rows."""
    tolerance = 0 if IMPLEMENTATION == "cpu" else 2e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(float32(got), float32(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("block_size", [16, 48, 128])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(dtype: Any, sizes: tuple[int, int, int], block_size: int) -> None:
    op = attention(sizes, dtype, block_size=block_size)
    assert_matches(op, make(sum(sizes) + block_size, RAGGED, op, row_alignment=16 if sizes[0] == 2 else 1))


def assert_matches(op: LatentAttention, step: Step) -> None:
    """Check a step against the reference, which does not depend on instruction sets, groups, or units of work."""
    expected, expected_pool = reference(step, op)
    out, pool = run(op, step)
    tolerance = 1e-5 if op.shape.dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(float32(out)[step.rows], expected[step.rows], rtol=tolerance, atol=tolerance)
    assert np.isfinite(float32(out)).all(), "padding rows must stay finite, they flow through the layers"
    if op.shape.kv_dtype.itemsize == 1:
        pool = LatentPool(jax.lax.bitcast_convert_type(pool.latents, op.shape.kv_dtype))
    assert_pools_equal(pool, expected_pool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_as_wide_as_they_come(dtype: Any) -> None:
    op = attention(CASES["deepseek-v2-lite"][:3], dtype)
    step = make(1, [(17, 1), (130, 1), (33, 33), (150, 47)], op)
    exact, expected_pool = reference(step, op)
    out, pool = run(op, step)
    assert_pools_equal(pool, expected_pool)
    error = np.abs(float32(out) - exact)[step.rows].max()
    rounded = exact.astype(dtype).astype(np.float32)
    # XLA:CPU's sums of 576 products are less exact without AVX-512.
    most = 2e-5 if IMPLEMENTATION == "cpu" else 5e-5
    assert error <= max(most, 2 * np.abs(rounded - exact)[step.rows].max())


@pytest.mark.parametrize("kv_dtype", [jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(4, 32, 16), (4, 32, 32)])
def test_a_narrower_pool_holds_rounded_latents(sizes: tuple[int, int, int], dtype: Any, kv_dtype: Any) -> None:
    op = attention(sizes, dtype, kv_dtype)
    assert_matches(op, make(6, RAGGED, op))


@pytest.mark.parametrize(("sizes", "top_k"), [*zip(SIZES, [1, 16, 40, 150, 150], strict=True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chosen_positions_match_the_reference(dtype: Any, sizes: tuple[int, int, int], top_k: int) -> None:
    op = attention(sizes, dtype, top_k=top_k, block_size=48 if top_k == 40 else 16)
    step = make(draw_seed(), RAGGED, op, row_alignment=16 if sizes[0] == 2 else 1)
    assert_matches(op, step)
    # Each row sees nothing but its positions: the rest of the pool may as well be NaN.
    tables, seen = np.asarray(step.batch.block_tables_sm), np.zeros(step.pool.latents.shape[:2], bool)
    first, chosen = LAYER * (len(step.pool.latents) // NUM_LAYERS), to_lists(np.asarray(step.chosen))
    for seq, (start, end) in enumerate(zip(step.batch.query_starts_s, step.batch.query_ends_s, strict=True)):
        positions = np.unique([position for row in range(start, end) for position in chosen[row]]).astype(int)
        seen[first + tables[seq][positions // op.shape.block_size], positions % op.shape.block_size] = True
    poisoned = jnp.where(seen[..., None], step.pool.latents, jnp.nan)
    assert_matches(op, step._replace(pool=LatentPool(poisoned)))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [*zip([jnp.float32, jnp.bfloat16] * 2, [jnp.float16, *FLOAT8, FLOAT8[0]], strict=True)]
)
def test_chosen_positions_in_a_narrower_pool(dtype: Any, kv_dtype: Any) -> None:
    op = attention((4, 32, 16), dtype, kv_dtype, top_k=33)
    assert_matches(op, make(draw_seed(), RAGGED, op))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_positions_chosen_is_attention_to_all(dtype: Any) -> None:
    step = make(draw_seed(), RAGGED, attention((4, 32, 16), dtype, top_k=300))
    chosen, _ = run(attention((4, 32, 16), dtype, top_k=300), step)
    out, _ = run(attention((4, 32, 16), dtype), step._replace(chosen=None))
    tolerance = 2e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(float32(chosen)[step.rows], float32(out)[step.rows], rtol=tolerance, atol=tolerance)


def test_a_row_without_a_position_is_finite() -> None:
    op = attention((4, 32, 16), top_k=8)
    step = make(draw_seed(), [(5, 1), (130, 1), (33, 33)], op)
    out, _ = run(op, step._replace(chosen=jnp.zeros_like(step.chosen)))
    assert np.isfinite(float32(out)).all()


def test_positions_come_with_a_shape_that_has_them() -> None:
    op = attention((4, 32, 16), top_k=8)
    step = make(5, [(5, 5)], op)
    with pytest.raises(ValueError, match="chosen_tw has the shape None, not"):
        run(op, step._replace(chosen=None))
    with pytest.raises(ValueError, match="chosen_tw has the shape"):
        run(op, step._replace(chosen=jnp.tile(step.chosen, 2)))
    with pytest.raises(ValueError, match=r"chosen_tw has the shape \(.*\), not None"):
        run(attention((4, 32, 16)), step)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_all_kernels_take_chosen_positions(platform: str) -> None:
    op, reason = pick(CASES["deepseek-v3"].shape(top_k=2048), platform, architecture="9.0")
    assert (op.implementation, reason) == (platform, None)


def draw_seed() -> int:
    return int(np.random.default_rng().integers(2**31))


def test_latents_beyond_8_bits_are_clipped() -> None:
    op = attention((1, 16, 16), kv_dtype=jnp.float8_e4m3fn)
    step = make(7, [(3, 3)], op)
    step = step._replace(latents=step.latents.at[0].set(1e4))
    np.testing.assert_allclose(run(op, step)[0][0], 448.0)


@pytest.mark.parametrize(
    ("sizes", "top_k"),
    [((6, 32, 16), None), ((1, 32, 16), None), ((16, 512, 64), None), ((6, 32, 16), 33), ((16, 512, 64), 70)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(dtype: Any, sizes: tuple[int, int, int], top_k: int | None) -> None:
    """A row is decoded alone or among others, and as decode or as the last row of a chunk."""
    op = attention(sizes, dtype, top_k=top_k)
    lengths = [5, 40, 129, 200, 31, 77]
    whole = make(2, [(length, length) for length in lengths], op)
    batch, ends = whole.batch, np.cumsum(lengths)
    out, filled = run(op, whole)
    batch, whole, out = jax.tree.map(np.asarray, (batch, whole, out))  # what numpy picks need not be compiled
    for picked in ([0], [3], [1, 2, 4], list(range(6))):
        index = np.array([ends[i] - 1 for i in picked])
        alone = batch._replace(
            slots_t=batch.slots_t[index],
            block_tables_sm=batch.block_tables_sm[np.array(picked)],
            context_lens_s=batch.context_lens_s[np.array(picked)],
            query_starts_s=np.arange(len(picked), dtype=np.int32),
            query_ends_s=np.arange(1, len(picked) + 1, dtype=np.int32),
            num_decodes=np.int32(len(picked)),
            num_tiles=np.int32(0),
        )
        rows = {"q": whole.q[index], "latents": whole.latents[index], "chosen": pick_rows(whole, index)}
        decoded, _ = run(op, whole._replace(**rows, pool=filled, batch=alone))
        assert_same(decoded, out[index], dtype)


def pick_rows(step: Step, index: Any) -> Any:
    """Return the chosen positions of some rows, if there are any."""
    return None if step.chosen is None else step.chosen[index]


@pytest.mark.parametrize(("sizes", "top_k"), [((4, 32, 16), None), ((16, 512, 64), None), ((4, 32, 16), 33)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_equal_the_whole(dtype: Any, sizes: tuple[int, int, int], top_k: int | None) -> None:
    op = attention(sizes, dtype, top_k=top_k)
    whole = make(3, [(150, 150)], op, padding=0)
    out, _ = run(op, whole)
    whole = jax.tree.map(np.asarray, whole)  # what numpy cuts need not be compiled
    pool, parts = whole.pool, []
    for start, end in pairwise([0, 7, 8, 60, 64, 149, 150]):
        chunk = end - start
        starts = list(range(0, chunk, op.tiles.query)) if chunk > 1 else []
        part = whole.batch._replace(
            slots_t=whole.batch.slots_t[start:end],
            context_lens_s=np.array([end], np.int32),
            query_ends_s=np.array([chunk], np.int32),
            num_decodes=np.int32(chunk == 1),
            tile_seqs_i=np.zeros(150, np.int32),
            tile_rows_i=np.array(starts + [0] * (150 - len(starts)), np.int32),
            num_tiles=np.int32(len(starts)),
        )
        index = slice(start, end)
        rows = {"q": whole.q[index], "latents": whole.latents[index], "chosen": pick_rows(whole, index)}
        inputs = whole._replace(**rows, pool=pool, batch=part)
        got, pool = run(op, inputs)
        parts.append(float32(got))
    assert_same(np.concatenate(parts), out, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", [None, jnp.float8_e4m3fn])
@pytest.mark.parametrize(("sizes", "top_k"), [((5, 64, 32), None), ((2, 32, 16), None), ((5, 64, 32), 40)])
@pytest.mark.usefixtures("lesser_set")
def test_with_a_lesser_instruction_set(
    sizes: tuple[int, int, int], top_k: int | None, dtype: Any, kv_dtype: Any
) -> None:
    needs_kernel()
    op = attention(sizes, dtype, kv_dtype, top_k=top_k)
    assert_matches(op, make(8, RAGGED, op))


@pytest.mark.parametrize("top_k", [None, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("lesser_set")
def test_bits_with_a_lesser_instruction_set(dtype: Any, top_k: int | None) -> None:
    needs_kernel()
    test_a_row_does_not_depend_on_its_batch(dtype, (5, 64, 32), top_k)
    test_chunks_equal_the_whole(dtype, (5, 64, 32), top_k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "top_k"), [(8, None), (40, None), (40, 50)])
def test_decodes_for_all_cores(num_heads: int, top_k: int | None, dtype: Any) -> None:
    """The heads of a row are one unit of work when there are many rows, otherwise several."""
    op = attention((num_heads, 32, 32), dtype, top_k=top_k)
    rng = np.random.default_rng(11)
    step = make(11, [(int(length), 1) for length in rng.integers(1, 300, ROWS_PER_CORE * num_cores() + 1)], op)
    assert_matches(op, step)
    out, filled = run(op, step)
    few = step.batch._replace(num_decodes=jnp.int32(2))
    alone, _ = run(op, step._replace(pool=filled), few)
    assert_same(alone[:2], out[:2], dtype)


def test_tiles_hold_about_as_many_heads_for_all_models() -> None:
    needs_kernel()
    tiles = {name: attention(case[:3]).tiles.query for name, case in CASES.items()}
    assert (tiles["deepseek-v2-lite"], tiles["glm-4.7-flash"], tiles["deepseek-v3"]) == (8, 6, 1)


def needs_kernel() -> None:
    if IMPLEMENTATION != "cpu":
        pytest.skip("plain XLA has no instruction sets and units of work")


@pytest.mark.parametrize(("kv_dtype", "top_k"), [(jnp.bfloat16, None), (jnp.float8_e5m2, None), (jnp.bfloat16, 2048)])
def test_amx_is_compiled_anywhere_on_x86(kv_dtype: Any, top_k: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_kernel()
    features: dict[str, bool] = dict.fromkeys((*processor.AVX2, *processor.AVX512, *processor.AMX, "avx512bf16"), True)
    with_amx = processor.x86("x86_64-unknown-linux-gnu", "sapphirerapids", features)
    monkeypatch.setattr(processor, "current", lambda: with_amx)
    shape = CASES["deepseek-v2-lite"].shape(kv_dtype=kv_dtype, top_k=top_k)
    assembly = compiling.make_machine(with_amx).emit_assembly(llvm.parse_assembly(str(Kernel(shape, 8).build("some"))))
    assert assembly.count("tdpbf16ps") == 8
    assert "tilerelease" in assembly


def test_blocks_are_copied_in_all_layers() -> None:
    pool = LatentPool(jnp.arange(3 * 4 * 2 * 2).reshape(12, 2, 2))
    copied = copy_blocks(pool, jnp.array([1, 0]), jnp.array([3, 0]), num_layers=3)
    assert isinstance(copied, LatentPool)
    for first in (0, 4, 8):
        np.testing.assert_array_equal(copied.latents[first + 3], pool.latents[first + 1])
        np.testing.assert_array_equal(copied.latents[first : first + 3], pool.latents[first : first + 3])


def test_refuses_arrays_of_another_shape() -> None:
    op = attention((4, 32, 16))
    step = make(5, [(5, 5)], op)
    with pytest.raises(ValueError, match="are not of"):
        run(op, step._replace(q=step.q[:, :3]))
    with pytest.raises(ValueError, match="are not of"):
        run(op, step._replace(latents=step.latents[:2]))
    with pytest.raises(ValueError, match="does not hold 3 layers"):
        run(op, step._replace(pool=LatentPool(step.pool.latents[:, :8])))


def test_a_pool_holds_one_copy_of_each_latent() -> None:
    [spec] = LatentAttention(CASES["deepseek-v3"].shape(block_size=128)).pool_spec(61, 9)
    assert (spec.shape, spec.dtype) == ((61 * 9, 128, 576), jnp.bfloat16)
    eight_bits = CASES["deepseek-v3"].shape(kv_dtype=jnp.float8_e4m3fn)
    assert LatentAttention(eight_bits).pool_spec(61, 9).latents.dtype == jnp.uint8


def test_a_cpu_gets_its_kernel_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pallas_kernels.native.compiling.refuse", lambda: None)
    assert pick(CASES["deepseek-v3"].shape(), "cpu")[0].implementation == "cpu"
    op, reason = pick(LatentShape(4, 24, 16, 16, jnp.dtype("float32"), jnp.dtype("float32")), "cpu")
    assert op.implementation == "xla"
    assert reason is not None
    assert "multiples of 16, not 24, 16 and 16" in reason
