"""A CPU's layer norm equals float64's: every dtype, rows of padding, rows that do not depend on the others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layer_norm import layer_norm

pytestmark = pytest.mark.cpu_kernels

DTYPES = [jnp.bfloat16, jnp.float32]


def make(t: int, d: int, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    rows = 3 * rng.standard_normal((t, d)) + 2
    return tuple(jnp.asarray(x, dtype) for x in (rows, *rng.standard_normal((2, 4, d))))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("t", "d"), [(1, 16), (17, 96), (100, 384), (3, 4096)])
def test_matches_float64(t: int, d: int, has_bias: bool, dtype: Any) -> None:
    x, scale, bias = make(t, d, dtype)
    added = bias if has_bias else None
    got = jax.jit(lambda x, scale, layer: layer_norm(x, scale, added, layer, eps=1e-3))(x, scale, 2)
    exact = np.asarray(x, np.float64)
    exact = exact - exact.mean(axis=1, keepdims=True)
    exact = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-3) * np.asarray(scale[2], np.float64)
    exact = exact + (np.asarray(bias[2], np.float64) if has_bias else 0)
    tolerance = 2.0**-8 if dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=tolerance, atol=5e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 15, 16, 33, 64])
def test_rows_of_padding_are_0_and_no_row_depends_on_others(num_rows: int, dtype: Any) -> None:
    x, scale, bias = make(64, 96, dtype)
    norm = jax.jit(lambda x, num_rows: layer_norm(x, scale, bias, 0, eps=1e-5, num_rows=num_rows))
    whole = norm(x, 64)
    got = norm(x.at[num_rows:].set(jnp.nan), num_rows)
    np.testing.assert_array_equal(got[:num_rows], whole[:num_rows])
    assert not got[num_rows:].any()
    np.testing.assert_array_equal(layer_norm(x[5:6], scale, bias, 0, eps=1e-5), whole[5:6])
