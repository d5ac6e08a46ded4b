"""The TPU's kernels of the indexer choose the reference's positions in the TPU interpreter, without a race."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chosen import to_lists
from pallas_kernels.implementations import INDEXER
from pallas_kernels.indexer import Indexer, IndexerPool, IndexerShape, pick
from pallas_kernels.indexer.cases import CASES
from pallas_kernels.indexer.reference import reference_scores
from pallas_kernels.indexer.tpu import tpu_indexer
from pallas_kernels.paged_attention import Tiles
from pallas_kernels.paged_attention.layout import FLOAT8
from pallas_kernels.trials.indexer import LAYER, NUM_LAYERS, Step, indexer_trials, make, reference
from pallas_kernels.trials.trial import is_same

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation", "tpu_interpreter")]
# A ring shorter than the list of tiles, and tiles shorter than the contexts.
TILES = Tiles(decode=3, query=32, kv=128)
# Decodes of less than `TOP_K` tokens and more, ten of them; chunks at odd positions, of several tiles, within `TOP_K`.
DECODES = [(length, 1) for length in (1, 16, 49, 130, 20, 300, 128, 24, 25, 77)]
RAGGED = [*DECODES, (2, 2), (33, 33), (64, 20), (150, 47), (290, 3)]
SHORT = [(49, 1), (193, 1), (33, 33), (197, 70)]
TOP_K = 24


def op_of(
    num_heads: int, top_k: int = TOP_K, block_size: int = 16, dtype: Any = jnp.float32, kv_dtype: Any = None
) -> Indexer:
    dtypes = jnp.dtype(dtype), jnp.dtype(kv_dtype or dtype)
    return Indexer(IndexerShape(num_heads, 128, top_k, block_size, *dtypes), "tpu")


def make_step(op: Indexer, chunks: list[tuple[int, int]], **settings: Any) -> Step:
    """Return a step over a pool whose unused slots are NaN."""
    return make(draw_seed(), chunks, op, row_alignment=op.row_alignment, **settings)


def draw_seed() -> int:
    return int(np.random.default_rng().integers(2**31))


@cache
def compiled(top_k: int, tiles: Tiles, architecture: str | None) -> Any:
    def function(q: Any, k: Any, weights: Any, pool: Any, batch: Any, layer: Any) -> Any:
        settings: dict[str, Any] = {"layer": layer, "num_layers": NUM_LAYERS, "top_k": top_k, "tiles": tiles}
        return tpu_indexer(q, k, weights, pool, batch, architecture=architecture, **settings)

    # Most of the time goes into compiling the interpreter's program.
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def run(
    op: Indexer, step: Step, tiles: Tiles = TILES, architecture: str | None = None
) -> tuple[np.ndarray, IndexerPool]:
    function = compiled(op.shape.top_k, tiles, architecture)
    k = step.k.astype(op.shape.kv_dtype)
    chosen, pool = function(step.q, k, step.weights, step.pool, step.batch, jnp.int32(LAYER))
    return np.asarray(chosen), pool


def check_pool(pool: IndexerPool, expected: IndexerPool) -> None:
    """Check that the pool is the reference's to the bit, except the null block, where padding need not be written."""
    null_block = LAYER * (len(expected.keys) // NUM_LAYERS)
    assert is_same(*(np.delete(np.asarray(x.keys), null_block, axis=0) for x in (pool, expected)))


def check(op: Indexer, step: Step, tiles: Tiles = TILES, architecture: str | None = None) -> None:
    """Check a step against the reference; no sum of its whole numbers is rounded."""
    expected, expected_pool = reference(step, op)
    chosen, pool = run(op, step, tiles, architecture)
    np.testing.assert_array_equal(chosen, expected)
    check_pool(pool, expected_pool)


@pytest.mark.parametrize(("num_heads", "top_k", "dtype"), [(2, TOP_K, jnp.bfloat16), (5, 1, jnp.float32)])
def test_matches_reference(num_heads: int, top_k: int, dtype: Any) -> None:
    op = op_of(num_heads, top_k, dtype=dtype)
    check(op, make_step(op, RAGGED))


def test_words_of_more_positions_than_a_row_of_lanes_has() -> None:
    op = op_of(2, 500, block_size=128, dtype=jnp.bfloat16)
    check(op, make_step(op, [(4400, 1), (700, 1), (4100, 4), (40, 9)]), Tiles(decode=3, query=32, kv=1024))


def test_decodes_alone_chunks_alone_and_nothing() -> None:
    """Sequences that are not in the step get no bits, and their keys are not written."""
    op = op_of(2)
    step = make_step(op, SHORT)
    whole, _ = run(op, step)
    rows, num_decodes = np.arange(len(step.q)), int(step.batch.num_decodes)
    for here, counts in (
        (rows < num_decodes, {"num_tiles": jnp.int32(0)}),
        (rows >= num_decodes, {"num_decodes": jnp.int32(0)}),
        (rows < 0, {"num_tiles": jnp.int32(0), "num_decodes": jnp.int32(0)}),
    ):
        slots = jnp.where(jnp.asarray(here), step.batch.slots_t, 0)
        part = step._replace(batch=step.batch._replace(slots_t=slots, **counts))
        chosen, pool = run(op, part)
        np.testing.assert_array_equal(chosen, np.where(here[:, None], whole, 0))
        check_pool(pool, reference(part, op)[1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_chooses_the_highest_scores_of_any_numbers(dtype: Any) -> None:
    op = op_of(16, 40, dtype=dtype)
    step = make_step(op, RAGGED, is_whole=False)
    q, k, weights = (np.asarray(x) for x in step[:3])
    pool = IndexerPool(np.asarray(step.pool.keys))
    scores, _ = reference_scores(q, k, weights, pool, step.batch, layer=LAYER, num_layers=NUM_LAYERS)
    positions = to_lists(run(op, step)[0])
    for row, scores_c in scores.items():
        assert len(positions[row]) == min(len(scores_c), 40)
        rest = np.delete(scores_c, positions[row])
        assert rest.max(initial=-np.inf) <= scores_c[positions[row]].min() + 1e-5 * np.abs(scores_c).max()


def test_the_lowest_of_equal_positions_win() -> None:
    op = op_of(2, 7)
    step = make_step(op, [(40, 1), (300, 1), (33, 33)])
    zeros = step._replace(weights=-jnp.abs(step.weights), q=step.q * 0)  # scores are 0 and -0
    positions = to_lists(run(op, zeros)[0])
    for row, seen in [(0, 40), (1, 300), *((16 + i, i + 1) for i in range(33))]:
        np.testing.assert_array_equal(positions[row], range(min(seen, 7)))


@pytest.mark.parametrize("sign", [-1, 1])
def test_any_scores_are_chosen_in_their_order(sign: int) -> None:
    """Scores of one head and key number are drawn with many exponents and both signs, many of them twice."""
    count = 600
    op = op_of(1, 201)
    step = make_step(op, [(count, count)])
    rng = np.random.default_rng()
    drawn = (rng.integers(1, 2**23, count) * 2.0 ** rng.integers(-60, 30, count)).astype(np.float32)
    drawn = np.where(rng.random(count) < 0.3, drawn[:1], drawn) * rng.choice([1, -1], count)
    keys = np.zeros(step.k.shape, np.float32)
    keys[:count, 0] = drawn
    q = jnp.zeros_like(step.q).at[:, :, 0].set(1.0)
    positions = to_lists(run(op, step._replace(q=q, k=jnp.asarray(keys), weights=step.weights * 0 + sign))[0])
    scores = sign * np.maximum(drawn, 0)
    for row in (count - 1, 411, 200):
        expected = np.sort(np.argsort(-scores[: row + 1], stable=True)[:201])
        np.testing.assert_array_equal(positions[row], expected)


@pytest.mark.parametrize(
    ("kv_dtype", "architecture"), [(FLOAT8[0], None), (FLOAT8[1], None), (FLOAT8[0], "TPU v6 lite")]
)
def test_a_pool_of_8_bits(kv_dtype: Any, architecture: str | None) -> None:
    op = op_of(4, block_size=32, dtype=jnp.bfloat16, kv_dtype=kv_dtype)
    step = make_step(op, SHORT)
    check(op, step._replace(pool=IndexerPool(step.pool.keys + jnp.zeros_like(step.pool.keys))), TILES, architecture)


def test_trials_pass_with_its_own_tiles() -> None:
    """As in an engine: a pool of the op's spec and the op's tiles."""
    op, reason = pick(op_of(2, dtype=jnp.bfloat16).shape, "cpu", "tpu")
    assert (op.implementation, op.interpret, reason) == ("tpu", True, None)
    call = [*indexer_trials(op)][1].make()
    assert call.compare(jax.jit(call.function)(*call.arguments)).is_right


def test_longer_contexts_than_vmem_holds_are_refused() -> None:
    op = op_of(2)
    step = make_step(op, [(20, 1)])
    tables = jnp.zeros((step.batch.block_tables_sm.shape[0], 300_000 // 16), jnp.int32)
    with pytest.raises(ValueError, match="at most 294912 tokens on a TPU, not 300000"):
        run(op, step._replace(batch=step.batch._replace(block_tables_sm=tables)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 64}, "keys must have 128 numbers, not 64"),
        ({"num_heads": 160}, "there can be at most 128 heads, not 160"),
        ({"dtype": jnp.dtype(jnp.float16)}, "dtype must be bfloat16 or float32, not float16"),
        ({"kv_dtype": jnp.dtype(jnp.float32)}, "the pool must be of the same dtype or float8, not float32"),
        ({"block_size": 16, "kv_dtype": jnp.dtype(jnp.float8_e5m2)}, "block_size must be 32, 64, 128, not 16"),
    ],
)
def test_what_it_cannot_run_goes_to_plain_xla(changes: dict[str, Any], reason: str) -> None:
    shape = CASES["deepseek-v3.2"].shape()
    op, missing = pick(shape, "tpu")
    assert (op.implementation, missing) == ("tpu", None)
    assert INDEXER["tpu"].refusal(CASES["glm-5"].shape(kv_dtype=jnp.float8_e4m3fn)) is None
    op, missing = pick(shape._replace(**changes), "tpu")
    assert (op.implementation, missing and missing.startswith(reason)) == ("xla", True)
