"""The causal convolution, in plain XLA and as a CPU's kernel, equals the float32 reference over poisoned states."""

from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrent_state.batches import Chunk
from pallas_kernels.recurrent_state.causal_conv import CausalConv, pick
from pallas_kernels.recurrent_state.causal_conv.cases import CASES, Case
from pallas_kernels.recurrent_state.causal_conv.reference import reference_causal_conv
from tests.pallas_kernels.states import (
    LAYER,
    MIXED,
    NUM_LAYERS,
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
OF_LAYER = (1,)
"""The inputs without rows: the weights."""


def settings_of(case: Case, dtype: Any) -> dict[str, Any]:
    bias = np.random.default_rng(9).standard_normal(case.num_channels).astype(dtype) if case.has_bias else None
    return {"bias_c": bias, "activation": case.activation}


def assert_matches_reference(
    case: Case, dtype: Any, implementation: str, seed: int, tolerance: float, chunks: list[Chunk] = MIXED
) -> None:
    shape, settings = case.shape(dtype), settings_of(case, dtype)
    step = make(seed, shape, chunks)
    if all(chunk.size == 1 for chunk in chunks):
        step = alone(step)
    expected, expected_pool = reference_causal_conv(
        *step.inputs, pool=step.pool, batch=step.batch, layer=LAYER, num_layers=NUM_LAYERS, **settings
    )
    out, pool = run_op(CausalConv(shape, implementation, interpret=implementation == "gpu"), step, **settings)
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=tolerance, atol=tolerance)
    assert_pools_equal(pool, expected_pool, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["tiny", "tiny-short"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)])
def test_matches_reference(implementation: str, name: str, dtype: Any, tolerance: float) -> None:
    assert_matches_reference(CASES[name], dtype, implementation, 0, tolerance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kernel_size", [2, 7])
def test_kernels_of_other_sizes(implementation: str, kernel_size: int) -> None:
    """A state may be longer than a chunk, and be a single input."""
    assert_matches_reference(Case(1040, kernel_size), jnp.float32, implementation, 1, 1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_steps_of_decodes_alone(implementation: str) -> None:
    assert_matches_reference(CASES["tiny"], jnp.float32, implementation, 4, 1e-5, MIXED[:5])


@pytest.mark.usefixtures("lesser_set")
@pytest.mark.parametrize("name", ["tiny", "tiny-short"])
def test_with_lesser_sets(name: str) -> None:
    assert_matches_reference(CASES[name], jnp.bfloat16, "cpu", 2, 1e-2)


@pytest.mark.parametrize("activation", ["silu", None])
def test_a_rows_bits_are_its_own(activation: Literal["silu"] | None) -> None:
    shape = CASES["tiny-short"].shape(jnp.bfloat16)
    go = partial(run_op, CausalConv(shape, "cpu"), activation=activation)
    assert_rows_are_independent(go, lambda chunks: make(5, shape, chunks), of_layer=OF_LAYER)
    assert_saves_change_nothing(go, make(6, shape))


def test_a_state_may_be_saved_to_where_it_was_read() -> None:
    """The state that is saved to another slot still has the inputs that were read."""
    shape = CASES["tiny"].shape(jnp.float32)
    step = make(3, shape, [Chunk(1, 9, 1, 2, 1, 1), Chunk(2, 9, 3, 4, 1, 3)])
    expected = reference_causal_conv(*step.inputs, pool=step.pool, batch=step.batch, layer=LAYER, num_layers=NUM_LAYERS)
    for implementation in IMPLEMENTATIONS:
        out, pool = run_op(CausalConv(shape, implementation), step)
        np.testing.assert_allclose(out, expected[0], rtol=1e-5, atol=1e-5)
        assert_pools_equal(pool, expected[1], rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_pool_is_not_copied(implementation: str) -> None:
    op = CausalConv(CASES["tiny"].shape(jnp.float32), implementation)
    inputs = make(7, op.shape).inputs
    pool, aliased, scratch = scratch_bytes(op, inputs, 4000, of_layer=OF_LAYER)
    assert aliased >= pool
    assert scratch < pool / 4


def test_which_implementation_runs() -> None:
    shape = CASES["lfm2-1.2b"].shape()
    op, reason = pick(shape, "cpu")
    assert (op.implementation, reason, op.missing_kernels("cpu")) == ("cpu", None, None)
    spec = op.pool_spec(2, 5)
    assert (spec.shape, spec.dtype) == ((10, 2, 2048), jnp.bfloat16)
    assert pick(shape, "gpu", architecture="9.0")[0].implementation == "gpu"
    op, reason = pick(shape._replace(num_channels=40), "gpu", architecture="9.0")
    assert (op.implementation, reason) == ("xla", "num_channels must be a multiple of 128, not 40")
    op, reason = pick(shape._replace(num_channels=40), "cpu")
    assert (op.implementation, reason) == ("xla", "num_channels must be a multiple of 16, not 40")


def test_refuses_what_is_not_of_its_shape() -> None:
    shape = CASES["tiny"].shape(jnp.float32)
    step = make(8, shape)
    op, (x, weight) = CausalConv(shape), step.inputs
    with pytest.raises(ValueError, match=r"x is .* not"):
        run_op(op, step._replace(inputs=(x[:, :16], weight)))
    with pytest.raises(ValueError, match=r"bias is .* not"):
        run_op(op, step, bias_c=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="no activation 'relu'"):
        run_op(op, step, activation="relu")
