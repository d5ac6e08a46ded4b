"""A CPU's matmul by quantized weights of rows that are rounded to 8 bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear import Linear, LinearShape, rounding_refusal
from pallas_kernels.linear.cpu import Kind, cpu_linear
from pallas_kernels.native import processor
from pallas_kernels.weights import WeightFormat, dequantize
from pallas_kernels.weights.held import Quantized
from tests.pallas_kernels.quantized import FORMATS, HALVES, make_parts, packed
from tests.pallas_kernels.test_quantized_linear import inputs_of, stacked

pytestmark = pytest.mark.cpu_kernels

LAYER, BLOCK = 1, 32
INTEGERS = {name: form for name, form in FORMATS.items() if form.values in ("integer", "e2m1")}
SOME = ("Q4_0", "Q4_1", "Q6_K", "Q8_0", "MXFP4", "AWQ", "int8")
CAN_ROUND = rounding_refusal(LinearShape(16, 64, jnp.float32, jnp.float32, FORMATS["Q4_0"])) is None


@pytest.fixture(autouse=True)
def _can_round() -> None:
    if not CAN_ROUND:
        pytest.skip("the processor multiplies integers no faster")


def skip_unless_rounded(form: WeightFormat) -> None:
    reason = rounding_refusal(LinearShape(16, 4096, jnp.float32, jnp.float32, form))
    if reason:
        pytest.skip(reason)


def rounded(x_tk: np.ndarray) -> np.ndarray:
    """Return rows rounded to 8 bits, 32 numbers with one scale."""
    blocks = x_tk.astype(np.float32).reshape(len(x_tk), -1, BLOCK)
    largest = abs(blocks).max(-1, keepdims=True)
    grow = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    # In float64 the product is exact, and rounded once.
    return (np.rint(blocks.astype(np.float64) * grow) * (largest.astype(np.float64) / 127)).reshape(x_tk.shape)


def multiply(
    x: Any, form: WeightFormat, parts: dict[str, np.ndarray], out_dtype: Any = jnp.float32, **options: Any
) -> Any:
    held = Quantized(stacked(packed(parts, form)), form, is_packed=True)
    program = jax.jit(partial(cpu_linear, out_dtype=out_dtype, rounds=True, **options))
    return np.asarray(program(jnp.asarray(x), held, layer=jnp.int32(LAYER)))


def make_x(t: int, k: int, seed: int = 0) -> np.ndarray:
    """Return rows of numbers of very different sizes."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((t, k)) * np.exp(rng.standard_normal((t, k)))).astype(np.float32)


def check_close(got: np.ndarray, x: np.ndarray, w: np.ndarray, plus: Any = 0.0) -> None:
    """Compare with float64, to within some of float32's last places of the sum of sizes."""
    expected, sizes = rounded(x) @ w.T + plus, abs(rounded(x)) @ abs(w).T
    assert (abs(got - expected) <= 1e-6 * sizes + 1e-30).all()


@pytest.mark.parametrize("form", INTEGERS.values(), ids=INTEGERS)
def test_equals_numpy_of_rounded_rows(form: WeightFormat) -> None:
    skip_unless_rounded(form)
    for t, n, least in ((1, 16, 64), (3, 33, 2304), (5, 40, 576), (103, 50, 1200)):
        k = inputs_of(form, least)
        parts = make_parts(form, n, k)
        x = make_x(t, k)
        check_close(multiply(x, form, parts), x, dequantize(parts, form).astype(np.float64))


@pytest.mark.parametrize("name", SOME)
def test_a_row_does_not_depend_on_the_rows_beside_it(name: str) -> None:
    form = FORMATS[name]
    skip_unless_rounded(form)
    k = inputs_of(form, 2400)
    parts, x = make_parts(form, 40, k), make_x(103, k)
    together = multiply(x, form, parts)
    for first, count in ((0, 1), (1, 2), (4, 3), (8, 4), (17, 5), (95, 8), (40, 63)):
        np.testing.assert_array_equal(multiply(x[first : first + count], form, parts), together[first : first + count])


@pytest.mark.parametrize("name", SOME)
def test_bits_are_those_of_other_instructions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With VNNI or without, in long registers or short ones."""
    form = FORMATS[name]
    skip_unless_rounded(form)
    k = inputs_of(form, 576)
    parts, x = make_parts(form, 33, k), make_x(13, k)
    expected = {t: multiply(x[:t], form, parts) for t in (1, 13)}
    own, kernel_name = processor.current(), Kind.name.fget
    others = [replace(own, has_int8_dot=False)] if own.is_x86 else []
    others += [processor.restricted(own, lesser) for lesser in processor.LESSER.get(own.name, ())[:-1]]
    for number, other in enumerate(others):
        monkeypatch.setattr("pallas_kernels.native.processor.current", lambda other=other: other)
        # The kernels of a name stay what they are.
        monkeypatch.setattr(Kind, "name", property(lambda self, number=number: f"{kernel_name(self)}_{number}"))
        if rounding_refusal(LinearShape(33, k, jnp.float32, jnp.float32, form)) is None:
            for t, found in expected.items():
                np.testing.assert_array_equal(multiply(x[:t], form, parts), found)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", ["Q4_1", "int8"])
def test_gates_and_sums(name: str, dtype: Any) -> None:
    form = FORMATS[name]
    skip_unless_rounded(form)
    n, k = 34, 192
    parts = make_parts(form, n, k)
    w = dequantize(parts, form).astype(np.float64)
    for t in (1, 9):
        x = jnp.asarray(make_x(t, k), dtype)
        rows = np.asarray(x.astype(jnp.float32))
        rng = np.random.default_rng(t)
        plus, bias = rng.standard_normal((t, n)).astype(np.float32), rng.standard_normal(n).astype(np.float32)
        sums = rounded(rows) @ w.T
        got = multiply(x, form, parts, plus_to=jnp.asarray(plus), bias_o=jnp.asarray(bias))
        np.testing.assert_allclose(got, sums + plus + bias, rtol=1e-4, atol=1e-4)
        gates, gated = np.split(sums + plus, 2, axis=1)
        got = multiply(x, form, parts, plus_to=jnp.asarray(plus), activation="silu")
        np.testing.assert_allclose(got, gates / (1 + np.exp(-gates)) * gated, rtol=1e-3, atol=1e-3)
        got = multiply(x, form, parts, activation="silu", is_gated=False)
        np.testing.assert_allclose(got, sums / (1 + np.exp(-sums)), rtol=1e-3, atol=1e-3)
        got = multiply(x, form, parts, jnp.bfloat16)
        exact = multiply(x, form, parts)
        np.testing.assert_array_equal(got, np.asarray(jnp.asarray(exact).astype(jnp.bfloat16)))


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_rows_of_zeros_and_of_nan(name: str) -> None:
    form = FORMATS[name]
    skip_unless_rounded(form)
    parts = make_parts(form, 20, 256)
    x = make_x(6, 256)
    x[1], x[2], x[3, 100], x[4, 5] = 0.0, 1e-33, np.nan, np.inf
    got = multiply(x, form, parts)
    assert (got[1:3] == 0).all()
    assert np.isnan(got[3]).all()
    assert not np.isfinite(got[4]).any()
    check_close(got[[0, 5]], x[[0, 5]], dequantize(parts, form).astype(np.float64))


def test_rows_that_do_not_count_become_zeros() -> None:
    form = FORMATS["Q4_0"]
    parts, x = make_parts(form, 20, 128), make_x(110, 128)
    expected = multiply(x, form, parts)
    for num_rows in (1, 5, 100):
        x[num_rows:] = np.nan
        got = multiply(x, form, parts, num_rows=num_rows)
        np.testing.assert_array_equal(got[:num_rows], expected[:num_rows])
        assert (got[num_rows:] == 0).all()
        x = make_x(110, 128)


def test_what_is_not_rounded_is_multiplied_exactly() -> None:
    form, plain, rounding = FORMATS["nf4"], Linear("cpu"), Linear("cpu_int8")
    x = jnp.asarray(make_x(5, 192))
    parts = stacked(packed(make_parts(form, 20, 192), form))
    few = {
        name: jnp.asarray(part)[None]
        for name, part in packed(make_parts(FORMATS["Q4_0"], 8, 192), FORMATS["Q4_0"]).items()
    }
    for weight in (
        Quantized(parts, form, is_packed=True),
        Quantized(few, FORMATS["Q4_0"], is_packed=True),
        jnp.asarray(make_x(20, 192))[None],
    ):
        expected = jax.jit(lambda x, weight: plain(x, weight, 0))(x, weight)
        np.testing.assert_array_equal(jax.jit(lambda x, weight: rounding(x, weight, 0))(x, weight), expected)


def refusal(form: WeightFormat | None, n: int = 64, k: int = 64, **options: Any) -> str | None:
    return rounding_refusal(LinearShape(n, k, jnp.float32, jnp.float32, form, **options))


def test_says_what_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not quantized" in str(refusal(None))
    assert "not quantized" in str(refusal(HALVES["bfloat16"]))
    assert "nf4" in str(refusal(FORMATS["nf4"]))
    assert "e4m3" in str(refusal(FORMATS["FP8"]))
    assert "at least 16 outputs" in str(refusal(FORMATS["int8"], 16, activation="silu"))
    assert "multiple of 64 inputs" in str(refusal(FORMATS["int8"], k=96))
    for own, bits in (
        (processor.x86("x", "x", dict.fromkeys(processor.AVX2, True)), 8),
        (processor.aarch64("a", "a", {}), 4),
    ):
        monkeypatch.setattr("pallas_kernels.native.processor.current", lambda own=own: own)
        assert str(refusal(WeightFormat(bits, 32))) in (
            "without VNNI, codes of 8 bits are multiplied no faster than floats",
            "the processor has no instruction for products of 8-bit integers (i8mm)",
        )
    assert refusal(FORMATS["Q6_K"], k=256) is not None
    vnni = processor.x86("x", "x", dict.fromkeys((*processor.AVX2, "avxvnni"), True))
    monkeypatch.setattr("pallas_kernels.native.processor.current", lambda: vnni)
    assert refusal(FORMATS["Q8_0"]) is None
