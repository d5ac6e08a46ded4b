"""The indexer chooses the reference's positions in a poisoned pool, whatever else is in the batch."""

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
from pallas_kernels.indexer import Indexer, IndexerPool, IndexerShape, pick
from pallas_kernels.indexer.cases import CASES
from pallas_kernels.indexer.cpu.kernel import Kernel
from pallas_kernels.indexer.reference import reference_scores
from pallas_kernels.native import compiling, processor
from pallas_kernels.paged_attention.layout import FLOAT8
from pallas_kernels.trials.indexer import LAYER, NUM_LAYERS, Step, held_pool, indexer_trials, make, reference
from pallas_kernels.trials.trial import is_same
from tests.quick import QUICK_COMPILE

pytestmark = pytest.mark.cpu_kernels

RAGGED = [(1, 1), (16, 1), (17, 1), (49, 1), (130, 1), (300, 1), (2, 2), (33, 33), (64, 20), (150, 47), (290, 3)]
DTYPES = (jnp.float32, jnp.bfloat16)
# The number of heads, the size of a key, and the number of positions that are chosen.
SIZES = [(1, 16, 16), (2, 16, 1), (5, 32, 40), (16, 64, 129), (20, 32, 512)]

IMPLEMENTATION = "xla"


@pytest.fixture(params=["xla", "cpu"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.IMPLEMENTATION", request.param)
    compiled.cache_clear()  # a test may choose another instruction set


def indexer(
    sizes: tuple[int, int, int], dtype: Any = jnp.float32, kv_dtype: Any = None, block_size: int = 16
) -> Indexer:
    return Indexer(IndexerShape(*sizes, block_size, jnp.dtype(dtype), jnp.dtype(kv_dtype or dtype)), IMPLEMENTATION)


@cache
def compiled(op: Indexer) -> Any:
    """Return the op as a function that compiles once for a test's steps of the same shapes."""

    def function(q, k, weights, pool, batch, layer):
        return op(q, k, weights, pool, batch, layer=layer, num_layers=NUM_LAYERS)

    quick: dict[str, Any] = dict(QUICK_COMPILE) if op.implementation == "xla" else {}
    return jax.jit(function, compiler_options={"xla_allow_excess_precision": False, **quick})


def run(op: Indexer, step: Step) -> tuple[np.ndarray, IndexerPool]:
    """Run a step; the layer is traced."""
    chosen, pool = compiled(op)(*step[:3], held_pool(op, step.pool), step.batch, LAYER)
    return np.asarray(chosen), pool


def assert_matches(op: Indexer, step: Step) -> None:
    """Check a step against the reference; no sum of its whole numbers is rounded."""
    expected, expected_pool = reference(step, op)
    chosen, pool = run(op, step)
    np.testing.assert_array_equal(chosen, expected)
    first = LAYER * (len(expected_pool.keys) // NUM_LAYERS)
    want = held_pool(op, IndexerPool(jnp.asarray(expected_pool.keys)))
    assert is_same(*(np.delete(np.asarray(x.keys), first, axis=0) for x in (pool, want)))


def draw_seed() -> int:
    return int(np.random.default_rng().integers(2**31))


@pytest.mark.parametrize(("sizes", "block_size"), [*zip(SIZES, [16, 48, 128, 16, 48], strict=True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(dtype: Any, sizes: tuple[int, int, int], block_size: int) -> None:
    op = indexer(sizes, dtype, block_size=block_size)
    assert_matches(op, make(draw_seed(), RAGGED, op, row_alignment=16 if sizes[0] == 2 else 1))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [*zip([jnp.float32, jnp.bfloat16] * 2, [jnp.float16, *FLOAT8, FLOAT8[0]], strict=True)]
)
def test_a_narrower_pool(dtype: Any, kv_dtype: Any) -> None:
    op = indexer((4, 32, 40), dtype, kv_dtype)
    assert_matches(op, make(draw_seed(), RAGGED, op))


def test_keys_beyond_8_bits_are_clipped() -> None:
    op = indexer((1, 16, 1), kv_dtype=jnp.float8_e4m3fn)
    step = make(draw_seed(), [(3, 3)], op)
    _, pool = run(op, step._replace(k=step.k.at[0].set(1e4)))
    slot = int(step.batch.slots_t[0])
    block = LAYER * (len(pool.keys) // NUM_LAYERS) + slot // 16
    written = jax.lax.bitcast_convert_type(pool.keys[block, slot % 16], jnp.float8_e4m3fn)
    np.testing.assert_array_equal(written.astype(jnp.float32), 448.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chooses_the_highest_scores_of_any_numbers(dtype: Any) -> None:
    op = indexer((16, 64, 40), dtype)
    step = make(draw_seed(), RAGGED, op, is_whole=False)
    q_tnh, k_th, weights_tn = (np.asarray(x) for x in step[:3])
    pool = IndexerPool(np.asarray(step.pool.keys))
    scores, _ = reference_scores(q_tnh, k_th, weights_tn, pool, step.batch, layer=LAYER, num_layers=NUM_LAYERS)
    positions = to_lists(run(op, step)[0])
    for row, scores_c in scores.items():
        chosen = positions[row]
        assert len(chosen) == min(len(scores_c), 40)
        rest = np.delete(scores_c, chosen)
        assert rest.max(initial=-np.inf) <= scores_c[chosen].min() + 1e-5 * np.abs(scores_c).max()


def test_the_lowest_of_equal_positions_win() -> None:
    op = indexer((2, 16, 7))
    step = make(draw_seed(), [(40, 1), (300, 1), (33, 33)], op)
    for weights in (step.weights * 0, -jnp.abs(step.weights)):
        # The second query is orthogonal to all keys, or each product is negative: scores are 0 and -0.
        zeros = step._replace(weights=weights, q=step.q * 0)
        positions = to_lists(run(op, zeros)[0])
        for row, seen in [(0, 40), (1, 300), *((2 + i, i + 1) for i in range(33))]:
            np.testing.assert_array_equal(positions[row], range(min(seen, 7)))


def test_zeros_of_both_signs_are_equal() -> None:
    """A negative weight makes the score -0 where a positive one makes it 0."""
    op = indexer((1, 16, 3))
    keys = jnp.zeros((6, 16)).at[:, 0].set(jnp.array([-1.0, 1.0, -2.0, 1.0, 0.0, 3.0]))
    step = make(draw_seed(), [(6, 6)], op, padding=0)
    q = jnp.zeros_like(step.q).at[:, :, 0].set(1.0)
    positions = to_lists(run(op, step._replace(q=q, k=keys, weights=jnp.full((6, 1), -1.0)))[0])
    np.testing.assert_array_equal(positions[-1], [0, 2, 4])
    np.testing.assert_array_equal(positions[3], [0, 1, 2])


def needs_kernel() -> None:
    if IMPLEMENTATION != "cpu":
        pytest.skip("plain XLA has no instruction sets, and its matmuls promise no bits")


def make_close(op: Indexer, chunks: list[tuple[int, int]]) -> Step:
    """Return a step of one chunk for each sequence, whose keys differ so little that rounding orders scores."""
    step = make(draw_seed(), chunks, op, is_whole=False)
    nudges = 1 + np.float32(3e-7 if op.shape.dtype == jnp.float32 else 1e-2) * step.k.astype(jnp.float32)
    return step._replace(k=(step.k[:1].astype(jnp.float32) * nudges).astype(op.shape.dtype))


@pytest.mark.parametrize("sizes", [(5, 32, 16), (16, 64, 33), (40, 128, 7)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(dtype: Any, sizes: tuple[int, int, int]) -> None:
    """A row is decoded alone or among others, and as decode or as the last row of a chunk."""
    needs_kernel()
    op = indexer(sizes, dtype)
    lengths = [5, 40, 129, 200, 31, 77]
    whole = make_close(op, [(length, length) for length in lengths])
    chosen, filled = run(op, whole)
    ends = np.cumsum(lengths)
    whole = jax.tree.map(np.asarray, whole)
    for picked in ([0], [3], [1, 2, 4], list(range(6))):
        index = np.array([ends[i] - 1 for i in picked])
        alone = whole.batch._replace(
            slots_t=whole.batch.slots_t[index],
            block_tables_sm=whole.batch.block_tables_sm[np.array(picked)],
            context_lens_s=whole.batch.context_lens_s[np.array(picked)],
            query_starts_s=np.arange(len(picked), dtype=np.int32),
            query_ends_s=np.arange(1, len(picked) + 1, dtype=np.int32),
            num_decodes=np.int32(len(picked)),
            num_tiles=np.int32(0),
        )
        rows = {"q": whole.q[index], "k": whole.k[index], "weights": whole.weights[index]}
        decoded, _ = run(op, whole._replace(**rows, pool=filled, batch=alone))
        np.testing.assert_array_equal(decoded, chosen[index])


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_equal_the_whole(dtype: Any) -> None:
    needs_kernel()
    op = indexer((16, 64, 33), dtype)
    whole = make_close(op, [(150, 150)])
    chosen, _ = run(op, whole)
    whole = jax.tree.map(np.asarray, whole)
    pool, parts = whole.pool, []
    for start, end in pairwise([0, 7, 8, 60, 64, 149, 150]):
        chunk = end - start
        part = whole.batch._replace(
            slots_t=whole.batch.slots_t[start:end],
            context_lens_s=np.array([end], np.int32),
            query_ends_s=np.array([chunk], np.int32),
            num_decodes=np.int32(chunk == 1),
            tile_seqs_i=np.zeros(150, np.int32),
            tile_rows_i=np.arange(150, dtype=np.int32),
            num_tiles=np.int32(chunk if chunk > 1 else 0),
        )
        index = slice(start, end)
        rows = {"q": whole.q[index], "k": whole.k[index], "weights": whole.weights[index]}
        got, pool = run(op, whole._replace(**rows, pool=pool, batch=part))
        parts.append(got)
    np.testing.assert_array_equal(np.concatenate(parts), chosen[:150])


@pytest.mark.parametrize("kv_dtype", [None, jnp.float8_e4m3fn])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("lesser_set")
def test_with_a_lesser_instruction_set(dtype: Any, kv_dtype: Any) -> None:
    needs_kernel()
    op = indexer((20, 64, 40), dtype, kv_dtype)
    assert_matches(op, make(draw_seed(), RAGGED, op))


def test_pairs_are_multiplied_where_the_processor_can(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_kernel()
    features: dict[str, bool] = dict.fromkeys((*processor.AVX2, *processor.AVX512, "avx512bf16"), True)
    with_pairs = processor.x86("x86_64-unknown-linux-gnu", "cooperlake", features)
    monkeypatch.setattr(processor, "current", lambda: with_pairs)
    module = llvm.parse_assembly(str(Kernel(CASES["deepseek-v3.2"].shape()).build("some")))
    assert "vdpbf16ps" in compiling.make_machine(with_pairs).emit_assembly(module)


@pytest.mark.parametrize("count", [1, 2000, 5000])
def test_any_scores_are_chosen_in_their_order(count: int) -> None:
    """Scores of one head and key number are drawn with all exponents and both signs, many of them twice."""
    op = indexer((1, 16, 1 + count // 3))
    step = make(draw_seed(), [(count, count)], op, padding=0)
    rng = np.random.default_rng()
    drawn = (rng.integers(1, 2**23, count) * 2.0 ** rng.integers(-60, 30, count)).astype(np.float32)
    drawn = np.where(rng.random(count) < 0.3, drawn[:1], drawn)
    keys = np.zeros((count, 16), np.float32)
    keys[:, 0], sign = drawn, np.float32(rng.choice([-1, 1]))
    q = jnp.zeros_like(step.q).at[:, :, 0].set(1.0)
    last = step._replace(q=q, k=jnp.asarray(keys), weights=jnp.full((count, 1), sign))
    positions = to_lists(run(op, last)[0])
    expected = np.sort(np.argsort(-sign * drawn, stable=True)[: op.shape.top_k])
    np.testing.assert_array_equal(positions[-1], expected)


def test_the_kernel_refuses_sizes() -> None:
    needs_kernel()
    op, reason = pick(IndexerShape(4, 24, 8, 16, jnp.dtype("float32"), jnp.dtype("float32")), "cpu")
    assert (op.implementation, reason) == ("xla", "keys and block_size must be multiples of 16, not 24 and 16")


def test_refuses_arrays_of_another_shape() -> None:
    op = indexer((4, 32, 16))
    step = make(draw_seed(), [(5, 5)], op)
    with pytest.raises(ValueError, match="are not of"):
        run(op, step._replace(q=step.q[:, :3]))
    with pytest.raises(ValueError, match="are not of"):
        run(op, step._replace(k=step.k[:2]))
    with pytest.raises(ValueError, match="float32 weights"):
        run(op, step._replace(weights=step.weights.astype(jnp.bfloat16)))
    with pytest.raises(ValueError, match="does not hold 3 layers"):
        run(op, step._replace(pool=IndexerPool(step.pool.keys[:, :8])))


@pytest.mark.parametrize("step", [0, 1])
def test_trials_notice_a_wrong_position(step: int) -> None:
    call = [*indexer_trials(indexer((2, 16, 24), jnp.bfloat16))][step].make()
    chosen, pool = jax.jit(call.function)(*call.arguments)
    assert call.compare((chosen, pool)).is_right
    assert not call.compare((chosen.at[0, 0].add(1), pool)).is_right
    assert not call.compare((chosen, IndexerPool(pool.keys.at[-1].set(1)))).is_right


def test_the_choice_by_platform() -> None:
    for platform in ("cpu", "tpu", "gpu"):
        op, reason = pick(CASES["deepseek-v3.2"].shape(), platform, architecture="9.0")
        assert (op.implementation, reason, op.cuts_pool) == (platform, None, False)
        assert op.pool_spec(61, 9).keys.shape == (61 * 9, 64, 128)
