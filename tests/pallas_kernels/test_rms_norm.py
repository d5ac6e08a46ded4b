"""A CPU's RMS norm equals float64's: every dtype, rows of padding, rows that do not depend on the others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm import can_norm, rms_norm

DTYPES = [jnp.bfloat16, jnp.float32]


def make(t: int, d: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return jnp.asarray(3 * rng.standard_normal((t, d)), dtype), jnp.asarray(rng.standard_normal((4, d)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("t", "d"), [(1, 16), (17, 96), (100, 576), (3, 4096)])
def test_matches_float64(t: int, d: int, offset: float, dtype: Any) -> None:
    x, scale = make(t, d, dtype)
    got = jax.jit(lambda x, scale, layer: rms_norm(x, scale, layer, eps=1e-3, offset=offset))(x, scale, 2)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-3) * (np.asarray(scale[2], np.float64) + offset)
    tolerance = 2.0**-8 if dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 15, 16, 33, 64])
def test_rows_of_padding_are_0_and_no_row_depends_on_others(num_rows: int, dtype: Any) -> None:
    x, scale = make(64, 96, dtype)
    norm = jax.jit(lambda x, num_rows: rms_norm(x, scale, 0, eps=1e-5, offset=0.0, num_rows=num_rows))
    whole = norm(x, 64)
    got = norm(x.at[num_rows:].set(jnp.nan), num_rows)
    np.testing.assert_array_equal(got[:num_rows], whole[:num_rows])
    assert not got[num_rows:].any()
    np.testing.assert_array_equal(rms_norm(x[5:6], scale, 0, eps=1e-5, offset=0.0), whole[5:6])


def test_says_what_it_cannot_norm() -> None:
    assert can_norm(64, jnp.bfloat16)
    assert not can_norm(40, jnp.bfloat16)
    assert not can_norm(64, jnp.float16)
