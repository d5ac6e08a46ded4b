"""The GPU's kernel of the scan of states equals the float32 reference in the GPU interpreter, without a race."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.recurrent_state.batches import Chunk
from pallas_kernels.recurrent_state.state_space import StateSpace, StateSpaceShape
from tests.pallas_kernels.gpu import H100, interpreted
from tests.pallas_kernels.states import LONG, MIXED, alone, scratch_bytes
from tests.pallas_kernels.test_state_space import OF_LAYER, assert_matches_reference, make

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)])
def test_matches_reference(dtype: Any, tolerance: float) -> None:
    shape = StateSpaceShape(2, 128, 1, 64, jnp.dtype(dtype))
    interpreted(assert_matches_reference, shape, "gpu", make(0, shape), tolerance)


def test_steps_of_decodes_alone_and_of_none() -> None:
    shape = StateSpaceShape(4, 64, 2, 192, jnp.dtype(jnp.float32))
    for chunks in (MIXED[:5], [Chunk(1, 3, 4, 4)]):
        interpreted(assert_matches_reference, shape, "gpu", alone(make(1, shape, chunks)), 1e-5)
    interpreted(assert_matches_reference, shape, "gpu", make(1, shape, MIXED[6:8]), 1e-5)


@pytest.mark.usefixtures("few_tiles_at_once")
def test_tiles_match_reference() -> None:
    shape = StateSpaceShape(2, 64, 1, 64, jnp.dtype(jnp.bfloat16))
    interpreted(assert_matches_reference, shape, "gpu", make(4, shape, LONG), 1e-2)


@pytest.mark.parametrize("state_dim", [128, 256])
def test_tiles_of_states_as_wide_as_those_of_real_models(state_dim: int) -> None:
    shape = StateSpaceShape(1, 128, 1, state_dim, jnp.dtype(jnp.bfloat16))
    chunks = [Chunk(1, 5, 7, 7), Chunk(100, 3, 8, 8, 70, 9), Chunk(65, 0, 0, 10)]
    interpreted(assert_matches_reference, shape, "gpu", make(5, shape, chunks), 1e-2)


def test_the_pool_is_not_copied() -> None:
    shape = StateSpaceShape(1, 64, 1, 64, jnp.dtype(jnp.float32))
    op, inputs = StateSpace(shape, "gpu", interpret=True), make(2, shape).inputs
    with jax.sharding.use_abstract_mesh(H100):
        pool, aliased, _ = scratch_bytes(op, inputs, 40, of_layer=OF_LAYER)
    assert aliased >= pool
