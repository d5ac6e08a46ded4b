"""The TPU's kernel of the gated delta rule equals the float32 reference in the TPU interpreter, without a race."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels.recurrent_state.batches import Chunk
from pallas_kernels.recurrent_state.gated_delta import GatedDelta, GatedDeltaShape
from tests.pallas_kernels.states import LONG, MIXED, scratch_bytes
from tests.pallas_kernels.test_gated_delta import CHANGES, assert_matches_reference, make

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation", "tpu_interpreter")]


@pytest.mark.parametrize(
    ("has_key_decay", "dtype", "tolerance"),
    [(False, jnp.float32, 1e-5), (True, jnp.float32, 1e-5), (False, jnp.bfloat16, 1e-2)],
)
def test_matches_reference(has_key_decay: bool, dtype: Any, tolerance: float) -> None:
    shape = GatedDeltaShape(1, 2, 128, 128, has_key_decay, jnp.dtype(dtype))
    assert_matches_reference(shape, "tpu", make(0, shape), tolerance)


@pytest.mark.usefixtures("few_tiles_at_once")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("has_key_decay", [False, True])
def test_chunks_of_several_tiles(has_key_decay: bool, change: Any) -> None:
    shape = GatedDeltaShape(1, 1, 128, 128, has_key_decay, jnp.dtype(jnp.float32))
    assert_matches_reference(shape, "tpu", change(make(3, shape, LONG)), 2e-5)


def test_steps_of_decodes_alone_and_of_none() -> None:
    shape = GatedDeltaShape(2, 2, 128, 128, False, jnp.dtype(jnp.float32))
    for chunks in (MIXED[:5], MIXED[6:8], [Chunk(1, 3, 4, 4)]):
        assert_matches_reference(shape, "tpu", make(1, shape, chunks), 1e-5)


def test_the_pool_is_not_copied() -> None:
    shape = GatedDeltaShape(1, 1, 128, 128, False, jnp.dtype(jnp.float32))
    pool, aliased, _ = scratch_bytes(GatedDelta(shape, "tpu"), make(2, shape).inputs, 40)
    assert aliased >= pool
