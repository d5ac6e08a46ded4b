"""The GPU's indexer equals the reference in its interpreter, which detects races."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chosen import to_lists
from pallas_kernels.indexer import Indexer, IndexerShape, pick
from pallas_kernels.indexer.cases import CASES
from pallas_kernels.indexer.gpu import sizes
from pallas_kernels.indexer.gpu.select import select
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
