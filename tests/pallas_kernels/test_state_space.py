"""The scan of states, in plain XLA and as a CPU's kernel, equals the float32 reference over poisoned states."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrent_state.batches import Chunk
from pallas_kernels.recurrent_state.state_space import StateSpace, StateSpaceShape, pick
from pallas_kernels.recurrent_state.state_space.cases import CASES
from pallas_kernels.recurrent_state.state_space.reference import reference_state_space
from tests.pallas_kernels.states import (
    LAYER,
    LONG,
    MIXED,
    NUM_LAYERS,
    Elsewhere,
    Step,
    alone,
    assert_pools_equal,
    assert_rows_are_independent,
    assert_saves_change_nothing,
    make,
    run_op,
    scratch_bytes,
)

pytestmark = pytest.mark.cpu_kernels

IMPLEMENTATIONS = ["xla", "cpu"]
OF_LAYER = (2, 5)
"""The inputs without rows: a and d."""


def assert_matches_reference(shape: StateSpaceShape, implementation: str, step: Step, tolerance: float) -> None:
    expected, expected_pool = reference_state_space(
        *step.inputs, pool=step.pool, batch=step.batch, layer=LAYER, num_layers=NUM_LAYERS
    )
    out, pool = run_op(StateSpace(shape, implementation, interpret=implementation == "gpu"), step)
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=tolerance, atol=tolerance * 3)
    assert_pools_equal(pool, expected_pool, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)])
def test_matches_reference(implementation: str, dtype: Any, tolerance: float) -> None:
    shape = CASES["tiny"].shape(dtype)
    assert_matches_reference(shape, implementation, make(0, shape), tolerance)


@dataclass(frozen=True)
class ElsewhereStateSpace(Elsewhere, StateSpace):
    """The op as plain XLA runs it on a TPU or GPU."""


def with_strong_decays(step: Step) -> Step:
    """One token in five forgets everything, others next to nothing."""
    x, dt, a, b, c, d = step.inputs
    is_strong = np.random.default_rng(1).uniform(size=dt.shape) < 0.2
    # Such a token adds no more than other tokens.
    dt = np.where(is_strong, np.float32(1000), dt * 0.01)
    return step._replace(inputs=(np.where(is_strong[..., None], x * 1e-3, x), dt, a, b, c, d))


@pytest.mark.usefixtures("few_tiles_at_once")
@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("chunks", [MIXED, LONG])
def test_tiles_match_reference(chunks: list[Chunk], strong: bool) -> None:
    shape = CASES["tiny"].shape(jnp.float32)
    step = make(9, shape, chunks)
    step = with_strong_decays(step) if strong else step
    expected, expected_pool = reference_state_space(
        *step.inputs, pool=step.pool, batch=step.batch, layer=LAYER, num_layers=NUM_LAYERS
    )
    out, pool = run_op(ElsewhereStateSpace(shape), step)
    # The terms that cancel out are as large as the largest.
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=5e-5)
    assert_pools_equal(pool, expected_pool, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("sizes", [(4, 64, 1, 128), (2, 128, 1, 256)])
def test_heads_as_wide_as_those_of_real_models(sizes: tuple[int, int, int, int]) -> None:
    shape = StateSpaceShape(*sizes, jnp.dtype(jnp.float32))
    assert_matches_reference(shape, "cpu", make(1, shape), 1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_steps_of_decodes_alone(implementation: str) -> None:
    shape = CASES["tiny"].shape(jnp.float32)
    assert_matches_reference(shape, implementation, alone(make(9, shape, MIXED[:5])), 1e-5)


@pytest.mark.usefixtures("lesser_set")
def test_with_lesser_sets() -> None:
    shape = CASES["tiny"].shape(jnp.bfloat16)
    assert_matches_reference(shape, "cpu", make(2, shape), 1e-2)


def test_a_rows_bits_are_its_own() -> None:
    shape = CASES["tiny"].shape(jnp.bfloat16)
    op = StateSpace(shape, "cpu")
    assert_rows_are_independent(lambda step: run_op(op, step), lambda chunks: make(5, shape, chunks), of_layer=OF_LAYER)
    assert_saves_change_nothing(lambda step: run_op(op, step), make(6, shape))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_pool_is_not_copied(implementation: str) -> None:
    op = StateSpace(CASES["tiny"].shape(jnp.float32), implementation)
    pool, aliased, scratch = scratch_bytes(op, make(7, op.shape).inputs, 4000, of_layer=OF_LAYER)
    assert aliased >= pool
    assert scratch < pool / 4


def test_which_implementation_runs() -> None:
    shape = CASES["nemotron-h-8b"].shape()
    op, reason = pick(shape, "cpu")
    assert (op.implementation, reason, op.missing_kernels("cpu")) == ("cpu", None, None)
    assert op.pool_spec(2, 5).shape == (10, 128, 2, 128, 32)
    op, reason = pick(shape._replace(head_dim=40), "cpu")
    assert (op.implementation, reason) == ("xla", "head_dim and state_dim must be multiples of 16, not 40 and 128")
    assert op.pool_spec(2, 5).shape == (10, 128, 40, 128)
    assert pick(shape, "gpu", architecture="9.0")[0].implementation == "gpu"
    assert pick(shape._replace(head_dim=48), "gpu", architecture="9.0")[1] == (
        "head_dim and state_dim must be multiples of 64, and state_dim at most 256, not 48 and 128"
    )


def test_refuses_arrays_of_another_shape() -> None:
    shape = CASES["tiny"].shape(jnp.float32)
    step = make(8, shape)
    x, *rest = step.inputs
    with pytest.raises(ValueError, match=r"x is .* not"):
        run_op(StateSpace(shape), step._replace(inputs=(x[:, :1], *rest)))
