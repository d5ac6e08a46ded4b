"""The GPU's kernel of the gated delta rule equals the float32 reference in the GPU interpreter, without a race."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.recurrent_state.batches import Chunk
from pallas_kernels.recurrent_state.gated_delta import GatedDelta, GatedDeltaShape
from tests.pallas_kernels.gpu import H100, interpreted, traced
from tests.pallas_kernels.states import LONG, MIXED, NUM_LAYERS, NUM_SLOTS, alone, scratch_bytes
from tests.pallas_kernels.test_gated_delta import CHANGES, assert_matches_reference, make

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]


@pytest.mark.parametrize(
    ("has_key_decay", "dtype", "tolerance"),
    [(False, jnp.float32, 1e-5), (True, jnp.float32, 1e-5), (False, jnp.bfloat16, 1e-2)],
)
def test_matches_reference(has_key_decay: bool, dtype: Any, tolerance: float) -> None:
    shape = GatedDeltaShape(1, 2, 64, 128, has_key_decay, jnp.dtype(dtype))
    interpreted(assert_matches_reference, shape, "gpu", make(0, shape), tolerance)


def test_steps_of_decodes_alone_and_of_none() -> None:
    shape = GatedDeltaShape(2, 2, 64, 64, False, jnp.dtype(jnp.float32))
    for chunks in (MIXED[:5], [Chunk(1, 3, 4, 4)]):
        interpreted(assert_matches_reference, shape, "gpu", alone(make(1, shape, chunks)), 1e-5)
    interpreted(assert_matches_reference, shape, "gpu", make(1, shape, MIXED[6:8]), 1e-5)


@pytest.mark.usefixtures("few_tiles_at_once")
@pytest.mark.parametrize("change", CHANGES)
def test_tiles_match_reference(change: Any) -> None:
    shape = GatedDeltaShape(1, 2, 64, 64, False, jnp.dtype(jnp.bfloat16))
    step = make(4, shape, LONG)
    pairs = zip(change(step).inputs, step.inputs, strict=True)
    step = step._replace(inputs=tuple(changed.astype(x.dtype) for changed, x in pairs))
    interpreted(assert_matches_reference, shape, "gpu", step, 1e-2, 1e-4)


@pytest.mark.parametrize("has_key_decay", [False, True])
def test_tiles_of_heads_as_wide_as_those_of_real_models(has_key_decay: bool) -> None:
    shape = GatedDeltaShape(1, 1, 128, 128, has_key_decay, jnp.dtype(jnp.bfloat16))
    chunks = [Chunk(1, 5, 7, 7), Chunk(100, 3, 8, 8, 70, 9), Chunk(65, 0, 0, 10)]
    interpreted(assert_matches_reference, shape, "gpu", make(5, shape, chunks), 1e-2)


def test_only_chunks_take_loops() -> None:
    """A loop with a bound that the host must read would break a decode step's command buffer."""
    shape = GatedDeltaShape(1, 2, 128, 128, False, jnp.dtype(jnp.bfloat16))
    op, step = GatedDelta(shape, "gpu"), make(3, shape, MIXED[:5])
    run = jax.jit(partial(op, layer=0, num_layers=NUM_LAYERS))
    for tried, has_loop in ((step, True), (alone(step), False)):
        text = traced(run, *tried.inputs, op.pool_spec(NUM_LAYERS, NUM_SLOTS), tried.batch)
        assert "gated_delta_decode" in text
        assert ("while" in text) == has_loop


def test_keys_of_other_lengths() -> None:
    shape = GatedDeltaShape(1, 1, 192, 64, False, jnp.dtype(jnp.float32))
    interpreted(assert_matches_reference, shape, "gpu", alone(make(2, shape, MIXED[:4])), 1e-5)


def test_the_pool_is_not_copied() -> None:
    shape = GatedDeltaShape(1, 1, 64, 64, False, jnp.dtype(jnp.float32))
    with jax.sharding.use_abstract_mesh(H100):
        pool, aliased, _ = scratch_bytes(GatedDelta(shape, "gpu", interpret=True), make(2, shape).inputs, 40)
    assert aliased >= pool
