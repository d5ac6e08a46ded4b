"""What a GPU runs in plain XLA for a few rows and quantized weights equals float64, and writes no widened weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear import Linear
from pallas_kernels.linear.cases import FORMATS, RARE
from pallas_kernels.linear.xla import SUMMED_ROWS, multiply_few
from tests.pallas_kernels.quantized_linear import LAYER, Call, exact, make, sizes_of_sums


def layer_of(call: Call) -> Call:
    return call._replace(weight=call.weight.map(lambda stack: stack[LAYER]))


def multiply(call: Call) -> np.ndarray:
    x, weight = layer_of(call)
    return np.asarray(jax.jit(functools.partial(multiply_few, out_dtype=jnp.float32))(x, weight), np.float64)


@pytest.mark.parametrize("num_rows", [1, SUMMED_ROWS])
@pytest.mark.parametrize("name", [*FORMATS, *RARE])
def test_equals_float64(name: str, num_rows: int) -> None:
    form = (FORMATS | RARE)[name]
    num_inputs = max(512, form.factor_group or 0)
    call = make(form, num_rows, 24, num_inputs)
    error = abs(multiply(call) - exact(call, rounded=False))
    assert (error <= num_inputs * 2.0**-24 * sizes_of_sums(call)).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_one_row_by_plain_weights_equals_float64(dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((1, 512)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((24, 512)), dtype)
    got = multiply_few(x, w, out_dtype=jnp.float32)
    exact_to = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(got, exact_to, atol=512 * 2.0**-24 * float(abs(w).max()) * 20, rtol=0)


def test_a_row_does_not_depend_on_the_others() -> None:
    call = make(FORMATS["awq"], SUMMED_ROWS, 24, 512)
    other = call._replace(x=jnp.flip(call.x, 0).at[SUMMED_ROWS - 1].set(call.x[SUMMED_ROWS - 1]))
    np.testing.assert_array_equal(multiply(call)[-1], multiply(other)[-1])


@pytest.mark.parametrize(
    ("platform", "num_rows", "multiplies"),
    [
        ("cuda", 1, False),
        ("cuda", SUMMED_ROWS, False),
        ("cuda", SUMMED_ROWS + 1, True),
        ("cpu", 1, True),
        ("tpu", 1, True),
    ],
)
def test_only_a_gpu_sums_products(platform: str, num_rows: int, *, multiplies: bool) -> None:
    x, weight = make(FORMATS["q4_k"], num_rows, 24, 512)
    traced = jax.jit(lambda x, weight: Linear()(x, weight, LAYER)).trace(x, weight)
    assert ("dot_general" in traced.lower(lowering_platforms=(platform,)).as_text()) is multiplies


def test_no_row() -> None:
    x, weight = make(FORMATS["q4_k"], 1, 24, 512)
    assert jax.jit(lambda x, weight: Linear()(x, weight, LAYER))(x[:0], weight).shape == (0, 24)
