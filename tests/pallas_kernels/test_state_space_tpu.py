"""The TPU's kernel of the scan of states equals the float32 reference in the TPU interpreter, without a race."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels.recurrent_state.batches import Chunk
from pallas_kernels.recurrent_state.state_space import StateSpace, StateSpaceShape
from tests.pallas_kernels.states import LONG, MIXED, scratch_bytes
from tests.pallas_kernels.test_state_space import OF_LAYER, assert_matches_reference, make, with_strong_decays

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation", "tpu_interpreter")]


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)])
def test_matches_reference(dtype: Any, tolerance: float) -> None:
    shape = StateSpaceShape(4, 64, 2, 128, jnp.dtype(dtype))
    assert_matches_reference(shape, "tpu", make(0, shape), tolerance)


@pytest.mark.usefixtures("few_tiles_at_once")
@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("sizes", [(2, 64, 1, 128), (2, 128, 2, 128), (3, 16, 1, 128)])
def test_chunks_of_several_tiles(sizes: tuple[int, int, int, int], strong: bool) -> None:
    """The last shape's heads do not fill a register, and plain XLA takes its chunks."""
    shape = StateSpaceShape(*sizes, jnp.dtype(jnp.float32))
    step = make(3, shape, LONG)
    assert_matches_reference(shape, "tpu", with_strong_decays(step) if strong else step, 2e-5)


def test_steps_of_decodes_alone_and_of_none() -> None:
    shape = StateSpaceShape(3, 16, 1, 256, jnp.dtype(jnp.float32))
    for chunks in (MIXED[:5], MIXED[6:8], [Chunk(1, 3, 4, 4)]):
        assert_matches_reference(shape, "tpu", make(1, shape, chunks), 1e-5)


def test_the_pool_is_not_copied() -> None:
    shape = StateSpaceShape(2, 64, 1, 128, jnp.dtype(jnp.float32))
    inputs = make(2, shape).inputs
    pool, aliased, _ = scratch_bytes(StateSpace(shape, "tpu"), inputs, 40, of_layer=OF_LAYER)
    assert aliased >= pool
