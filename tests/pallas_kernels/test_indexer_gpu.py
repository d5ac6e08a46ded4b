"""The GPU's indexer equals the reference in its interpreter, which detects races."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chosen import to_lists
from pallas_kernels.indexer import Indexer, IndexerPool, IndexerShape, pick
from pallas_kernels.indexer.cases import CASES
from pallas_kernels.indexer.gpu import sizes
from pallas_kernels.indexer.gpu.choice import select
from pallas_kernels.indexer.reference import reference_scores
from pallas_kernels.trials.indexer import LAYER, NUM_LAYERS, Step, make, reference
from pallas_kernels.trials.trial import is_same
from tests.pallas_kernels.gpu import interpreted, traced

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]
BFLOAT16 = jnp.dtype(jnp.bfloat16)


def indexer(num_heads: int, head_dim: int, top_k: int, block_size: int = 16) -> Indexer:
    return Indexer(IndexerShape(num_heads, head_dim, top_k, block_size, BFLOAT16, BFLOAT16), "gpu", interpret=True)


def compiled(op: Indexer) -> Any:
    @jax.jit
    def function(q: Any, k: Any, weights: Any, pool: Any, batch: Any, layer: Any) -> Any:
        return op(q, k, weights, pool, batch, layer=layer, num_layers=NUM_LAYERS)

    return function


def assert_matches(op: Indexer, step: Step) -> None:
    """Check a step against the reference; no sum of its whole numbers is rounded."""
    expected, expected_pool = reference(step, op)
    chosen, pool = interpreted(compiled(op), *step, LAYER)
    np.testing.assert_array_equal(np.asarray(chosen), expected)
    null_block = LAYER * (len(expected_pool.keys) // NUM_LAYERS)
    assert is_same(*(np.delete(np.asarray(x.keys), null_block, axis=0) for x in (pool, expected_pool)))


@pytest.mark.parametrize(
    ("op", "chunks"),
    [
        (indexer(16, 64, 20), [(1, 1), (20, 1), (21, 1), (130, 1), (33, 20), (150, 5)]),
        (indexer(64, 128, 40, 64), [(200, 1), (70, 33)]),
        (indexer(32, 128, 7, 128), [(300, 1), (3, 1), (64, 1)]),
    ],
    ids=["16 heads", "64 heads", "decodes alone"],
)
def test_matches_reference(op: Indexer, chunks: list[tuple[int, int]]) -> None:
    """Steps of decodes alone come without room for tiles."""
    step = make(len(chunks), chunks, op, row_alignment=op.row_alignment)
    has_tiles = chunks[-1][1] > 1
    if not has_tiles:
        step = step._replace(batch=step.batch.without_tiles())
    assert_matches(op, step)
    kernels = traced(compiled(op), *step, LAYER)
    assert "indexer_score_decodes" in kernels
    assert ("indexer_score_chunks" in kernels) == has_tiles


def test_a_long_step_is_scored_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    op = indexer(16, 64, 20)
    step = make(7, [(50, 1), (2100, 1), (61, 40), (30, 2)], op, row_alignment=op.row_alignment)
    monkeypatch.setattr(sizes, "SCORE_BYTES", 1)
    assert sizes.rows_at_a_time(len(step.batch.slots_t), 4096) < len(step.batch.slots_t)
    assert_matches(op, step)


def draw_scores(kind: str, rng: np.random.Generator, count: int) -> np.ndarray:
    """Return int32 scores that are of all sizes, or mostly equal, or the least and the highest."""
    whole = np.iinfo(np.int32)
    match kind:
        case "of all sizes":
            return rng.integers(whole.min, whole.max, count, np.int32, endpoint=True)
        case "equal":
            return rng.integers(-1, 2, count, np.int32)
        case _:
            return rng.choice(np.array([whole.min, whole.min + 1, -1, 0, whole.max], np.int32), count)


@pytest.mark.parametrize("kind", ["of all sizes", "equal", "at the ends"])
def test_selects_the_highest_and_of_equal_ones_the_first(kind: str) -> None:
    rng, columns, top_k = np.random.default_rng(), 6144, 300
    seen = np.array([0, 1, 299, 300, 301, 2048, 2049, 4096, 5000, 6144], np.int32)
    scores = np.stack([draw_scores(kind, rng, columns) for _ in seen])
    run = jax.jit(lambda *args: select(*args, top_k=top_k, words=columns // 32, interpret=True))
    chosen = to_lists(np.asarray(interpreted(run, jnp.asarray(scores), jnp.asarray(seen))))
    for row, count in enumerate(seen):
        order = np.argsort(-scores[row, :count].astype(np.int64), stable=True)
        np.testing.assert_array_equal(chosen[row], np.sort(order[:top_k]))


def test_zeros_of_both_signs_are_equal_and_the_first_win() -> None:
    op = indexer(8, 64, 5)
    step = make(2, [(40, 1), (33, 33)], op, row_alignment=op.row_alignment)
    step = step._replace(q=step.q * 0, weights=-jnp.abs(step.weights))
    assert_matches(op, step)


def test_any_numbers_are_chosen_by_their_scores() -> None:
    """Scores are sums in another order than the reference's, so that the choice may differ where they are close."""
    op = indexer(32, 128, 40)
    step = make(5, [(500, 1), (90, 20)], op, row_alignment=op.row_alignment, is_whole=False)
    chosen, _ = interpreted(compiled(op), *step, LAYER)
    q, k, weights = (np.asarray(x) for x in step[:3])
    fixed = {"layer": LAYER, "num_layers": NUM_LAYERS}
    scores, _ = reference_scores(q, k, weights, IndexerPool(np.asarray(step.pool.keys)), step.batch, **fixed)
    for row, positions in enumerate(to_lists(np.asarray(chosen))):
        scores_c = scores.get(row, np.zeros(0))
        assert len(positions) == min(len(scores_c), 40)
        rest = np.delete(scores_c, positions)
        least = scores_c[positions].min(initial=np.inf)
        assert rest.max(initial=-np.inf) <= least + 1e-5 * np.abs(scores_c).max(initial=0)


def test_scores_take_bounded_memory() -> None:
    assert sizes.rows_at_a_time(2048, 8192) == 2048
    assert sizes.rows_at_a_time(2048, 131072) == 512
    assert sizes.rows_at_a_time(8, 131072) == 16


def test_a_hopper_gpu_gets_it() -> None:
    op, reason = pick(CASES["deepseek-v3.2"].shape(), "gpu", architecture="9.0")
    assert (op.implementation, op.interpret, reason) == ("gpu", False, None)
    assert (op.row_alignment, op.takes_decodes_alone, op.tiles.query) == (16, True, 4)
    assert pick(CASES["glm-5"].shape(), "gpu", architecture="9.0")[0].tiles.query == 8


@pytest.mark.parametrize(
    ("shape", "architecture", "reason"),
    [
        (CASES["glm-5"].shape(), "8.0", "compute capability 8.0"),
        (CASES["tiny"].shape(), "9.0", "head_dim must be 64, 128 or 256, not 16"),
        (CASES["glm-5"].shape(dtype=jnp.float32), "9.0", "must be bfloat16, not float32 and float32"),
        (CASES["glm-5"].shape(kv_dtype=jnp.float8_e4m3fn), "9.0", "not bfloat16 and float8_e4m3fn"),
        (CASES["glm-5"]._replace(num_heads=12).shape(), "9.0", "a multiple of 8 up to 256, not 12"),
        (CASES["glm-5"].shape(block_size=48), "9.0", "block_size must be 16, 32, 64 or 128, not 48"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_what_it_cannot_run_goes_to_plain_xla(shape: IndexerShape, architecture: str, reason: str) -> None:
    op, why = pick(shape, "gpu", architecture=architecture)
    assert op.implementation == "xla"
    assert why is not None
    assert reason in why
