"""The GPU's attention over latents equals the reference in its interpreter, which looks for races."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.latent_attention import LatentAttention, LatentPool, LatentShape
from tests.pallas_kernels.gpu import interpreted, traced
from tests.pallas_kernels.latent_steps import LAYER, NUM_LAYERS, SCALE, Step, assert_pools_equal, make, reference

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]
BFLOAT16 = jnp.dtype(jnp.bfloat16)


def attention(num_heads: int, latent_dim: int = 512, block_size: int = 16) -> LatentAttention:
    return LatentAttention(LatentShape(num_heads, latent_dim, 64, block_size, BFLOAT16, BFLOAT16), "gpu", True)


def make_step(seed: int, chunks: list[tuple[int, int]], op: LatentAttention) -> Step:
    return make(seed, chunks, op, row_alignment=op.row_alignment)


def run(op: LatentAttention, step: Step) -> tuple[np.ndarray, LatentPool]:
    def function(q: Any, latents: Any, pool: Any, batch: Any, layer: Any) -> Any:
        return op(q, latents, pool, batch, layer=layer, num_layers=NUM_LAYERS, scale=SCALE)

    arguments = step.q, step.latents, step.pool, step.batch, LAYER
    out, pool = interpreted(jax.jit(function), *arguments)
    kernels = traced(jax.jit(function), *arguments)
    assert "latent_decode" in kernels
    assert ("latent_prefill" in kernels) == bool(step.batch.tile_seqs_i.shape[0])
    return np.asarray(out, np.float32), pool


@pytest.mark.parametrize(
    ("op", "chunks"),
    [
        (attention(16), [(1, 1), (70, 1), (20, 6)]),
        (attention(20, block_size=64), [(65, 1), (67, 3)]),
        (attention(2, 256, 128), [(130, 1), (150, 33)]),
        (attention(72, 256), [(17, 1), (66, 2)]),
    ],
    ids=["16 heads", "20 heads", "2 heads of 256", "two groups of 36 heads"],
)
def test_matches_reference(op: LatentAttention, chunks: list[tuple[int, int]]) -> None:
    step = make_step(len(chunks), chunks, op)
    expected, expected_pool = reference(step, op)
    out, pool = run(op, step)
    np.testing.assert_allclose(out[step.rows], expected[step.rows], rtol=2e-2, atol=1e-2)
    assert np.isfinite(out).all(), "padding rows must stay finite, they flow through the layers"
    assert_pools_equal(pool, expected_pool)
