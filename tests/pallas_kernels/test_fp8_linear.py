"""Matmuls in float8 equal float64's of rounded rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.linear import Linear, LinearShape, fp8_device_refusal
from pallas_kernels.linear.cases import FORMATS
from pallas_kernels.linear.fp8 import round_rows
from pallas_kernels.weights import dequantize
from tests.pallas_kernels.quantized_linear import LAYER, make

pytestmark = pytest.mark.kernels


def rounded(x_ti: np.ndarray) -> np.ndarray:
    """Return rows as float64 numbers, rounded as the op says."""
    largest_t1 = abs(x_ti).max(axis=1, keepdims=True).astype(np.float32)
    scales_t1 = np.where(largest_t1 > 0, largest_t1 / np.float32(448), np.float32(1))
    return (x_ti / scales_t1).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales_t1


def test_matches_float64_of_rounded_rows() -> None:
    """Rows differ in size by powers of ten; one is 0, and one has numbers that are small beside its largest."""
    call = make(FORMATS["fp8"], 7, 48, 160)
    x = np.array(call.x, np.float32) * np.array([1, 1e-6, 1e6, 0, 1, 100, 3], np.float32)[:, None]
    x[4, 0] = 3e4
    x = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    got = jax.jit(Linear("gpu_fp8"), static_argnames="out_dtype")(
        jnp.asarray(x, jnp.bfloat16), call.weight, LAYER, out_dtype=jnp.float32
    )
    numbers = dequantize({name: np.asarray(part[LAYER]) for name, part in call.weight.parts.items()}, FORMATS["fp8"])
    w = numbers.astype(np.float64)
    expected = rounded(x) @ w.T
    assert (abs(np.asarray(got) - expected) <= 2e-6 * abs(rounded(x)) @ abs(w).T).all()


def test_rounding_keeps_three_bits_and_the_largest() -> None:
    x = np.random.default_rng(0).standard_normal((16, 64)).astype(ml_dtypes.bfloat16)
    codes, scales = (np.asarray(a, np.float32) for a in round_rows(jnp.asarray(x)))
    x = x.astype(np.float32)
    assert (abs(codes).max(axis=1) == 448).all()
    assert (abs(codes * scales - x) <= 2**-4 * abs(x) + 2**-15 * abs(x).max(axis=1, keepdims=True)).all()


def test_a_row_of_tiny_numbers_is_no_nan() -> None:
    """Its scale would be a subnormal number, which is 0 on a CPU."""
    codes, scales = round_rows(jnp.asarray([[1e-37, 0.0]], jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(codes, np.float32) * np.asarray(scales), 0)


def test_a_row_does_not_depend_on_the_others() -> None:
    call = make(FORMATS["fp8"], 4, 32, 64)
    larger = call.x.at[1].multiply(1000)
    first, second = (round_rows(x) for x in (call.x, larger))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.delete(np.asarray(a), 1, 0), np.delete(np.asarray(b), 1, 0))


@pytest.mark.parametrize("name", ["fp8-block", "int8", "awq"])
def test_other_weights_are_refused(name: str) -> None:
    op = Linear("gpu_fp8")
    assert op.refusal(LinearShape(64, 128, jnp.bfloat16, jnp.bfloat16, FORMATS["fp8"])) is None
    assert "e4m3" in (op.refusal(LinearShape(64, 128, jnp.bfloat16, jnp.bfloat16, FORMATS[name])) or "")
    assert "16" in (op.refusal(LinearShape(72, 128, jnp.bfloat16, jnp.bfloat16, FORMATS["fp8"])) or "")


def test_devices() -> None:
    for architecture in ("8.9", "9.0", "10.0", "12.0"):
        assert fp8_device_refusal(architecture) is None
    for architecture in ("8.6", "8.0", "7.5", "gfx942", None):
        assert "8.9" in (fp8_device_refusal(architecture) or "")
