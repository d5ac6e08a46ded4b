"""A CPU's matmul by quantized weights with rows that are rounded to 8 bits."""

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
from pallas_kernels.linear.cpu.rounded import UNITS_PER_CORE
from pallas_kernels.native import processor
from pallas_kernels.native.cores import num_cores
from pallas_kernels.weights import WeightFormat, dequantize
from pallas_kernels.weights.held import Quantized
from tests.pallas_kernels.quantized import FORMATS, HALVES, make_parts, packed
from tests.pallas_kernels.test_quantized_linear import inputs_of, stacked

pytestmark = pytest.mark.cpu_kernels

LAYER, BLOCK = 1, 32
INTEGERS = {name: form for name, form in FORMATS.items() if form.values in ("integer", "e2m1")}
SOME = ("Q4_0", "Q4_1", "Q6_K", "Q8_0", "MXFP4", "AWQ", "int8")


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
    """Compare with float64, to within some of float32's last places of the sum of magnitudes."""
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
    present, kernel_name = processor.current(), Kind.name.fget
    assert kernel_name is not None
    others = [processor.restricted(present, lesser) for lesser in processor.LESSER.get(present.name, ())[:-1]]
    if present.is_x86 and present.has_int8_dot:
        others.append(replace(present, has_int8_dot=False))
        if present.has_avx512:
            others.append(replace(present, name="avx2", num_registers=16, register_bytes=32))
    num_compared = 0
    for number, other in enumerate(others):
        monkeypatch.setattr("pallas_kernels.native.processor.current", lambda other=other: other)
        # A kernel keeps the name that it was first registered with.
        renamed = property(lambda self, number=number, name=kernel_name: f"{name(self)}_{number}")
        monkeypatch.setattr(Kind, "name", renamed)
        if rounding_refusal(LinearShape(33, k, jnp.float32, jnp.float32, form)) is None:
            num_compared += 1
            for t, rows in expected.items():
                np.testing.assert_array_equal(multiply(x[:t], form, parts), rows)
    if not num_compared:
        pytest.skip("the processor has one way of multiplying these")


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
    skip_unless_rounded(form)
    parts, x = make_parts(form, 20, 128), make_x(110, 128)
    expected = multiply(x, form, parts)
    for num_rows in (0, 1, 5, 100, 200):
        poisoned = np.where(np.arange(110)[:, None] < num_rows, x, np.nan)
        got = multiply(poisoned, form, parts, num_rows=num_rows)
        np.testing.assert_array_equal(got[:num_rows], expected[:num_rows])
        assert (got[num_rows:] == 0).all()


@pytest.mark.parametrize("name", ["Q4_1", "AWQ"])
def test_units_of_several_vectors_of_columns(name: str) -> None:
    form = FORMATS[name]
    skip_unless_rounded(form)
    # A unit has two vectors, and the last of all begins earlier than the others would have it.
    n, k = 16 * UNITS_PER_CORE * num_cores() + 18, 256
    parts = make_parts(form, n, k)
    w = dequantize(parts, form).astype(np.float64)
    for t in (2, 9):
        x = make_x(t, k)
        check_close(multiply(x, form, parts), x, w)
        gated = make_parts(form, 2 * n, k, seed=1)
        gates, values = np.split(rounded(x) @ dequantize(gated, form).astype(np.float64).T, 2, axis=1)
        got = multiply(x, form, gated, activation="silu")
        np.testing.assert_allclose(got, gates / (1 + np.exp(-gates)) * values, rtol=1e-3, atol=1e-3)


def test_mins_of_multiples_of_a_half() -> None:
    form = WeightFormat(4, 32, "e2m1", has_mins=True)
    skip_unless_rounded(form)
    parts, x = make_parts(form, 20, 128), make_x(9, 128)
    check_close(multiply(x, form, parts), x, dequantize(parts, form).astype(np.float64))


def test_rows_of_bfloat16_are_those_of_float32() -> None:
    form = FORMATS["Q4_K"]
    skip_unless_rounded(form)
    parts, x = make_parts(form, 20, 256), jnp.asarray(make_x(70, 256), jnp.bfloat16)
    np.testing.assert_array_equal(multiply(x, form, parts), multiply(x.astype(jnp.float32), form, parts))


def test_is_an_implementation_of_linear() -> None:
    form = FORMATS["Q4_0"]
    skip_unless_rounded(form)
    parts, x = make_parts(form, 20, 192), jnp.asarray(make_x(5, 192))
    weight = Quantized(stacked(packed(parts, form)), form, is_packed=True)
    exact, got = (jax.jit(partial(Linear(name), layer=LAYER))(x, weight) for name in ("cpu", "cpu_int8"))
    np.testing.assert_array_equal(got, multiply(x, form, parts))
    assert (np.asarray(exact) != np.asarray(got)).any()


def test_what_is_not_rounded_is_multiplied_exactly() -> None:
    plain, rounding = Linear("cpu"), Linear("cpu_int8")
    x = jnp.asarray(make_x(5, 192))
    nf4, few = ((make_parts(form, n, 192), form) for form, n in ((FORMATS["nf4"], 20), (FORMATS["Q4_0"], 8)))
    weights = [Quantized(stacked(packed(parts, form)), form, is_packed=True) for parts, form in (nf4, few)]
    for weight in (*weights, jnp.asarray(make_x(40, 192)).reshape(2, 20, 192)):
        expected = jax.jit(lambda x, weight: plain(x, weight, LAYER))(x, weight)
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(jax.jit(lambda x, weight: rounding(x, weight, LAYER))(x, weight), expected)


def refusal(form: WeightFormat | None, n: int = 64, k: int = 64, **options: Any) -> str | None:
    return rounding_refusal(LinearShape(n, k, jnp.float32, jnp.float32, form, **options))


def test_says_what_is_not_rounded() -> None:
    assert "not quantized" in str(refusal(None))
    assert "not quantized" in str(refusal(HALVES["bfloat16"]))
    assert "nf4" in str(refusal(FORMATS["nf4"]))
    assert "e4m3" in str(refusal(FORMATS["FP8"]))
    assert "at least 16 outputs" in str(refusal(FORMATS["int8"], 16, activation="silu"))
    assert "multiple of 64 inputs" in str(refusal(FORMATS["int8"], k=96))
    assert "share a scale" in str(refusal(WeightFormat(4, 2048), k=2048))


AVX2_ALONE = processor.x86("x86_64-none", "none", dict.fromkeys(processor.AVX2, True))
VNNI = processor.x86("x86_64-none", "none", dict.fromkeys((*processor.AVX2, "avxvnni"), True))
NEON_ALONE, I8MM = (processor.aarch64("a", "a", features) for features in ({}, {"i8mm": True}))


@pytest.mark.parametrize(
    ("present", "bits", "reason"),
    [
        (AVX2_ALONE, 6, None),
        (AVX2_ALONE, 8, "without VNNI, codes of 8 bits"),
        (VNNI, 8, None),
        (NEON_ALONE, 4, "i8mm"),
        (I8MM, 8, None),
        (processor.restricted(AVX2_ALONE, "plain"), 4, "no kernels"),
    ],
)
def test_says_which_processors_round(
    present: processor.Processor, bits: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pallas_kernels.native.processor.current", lambda: present)
    refused = refusal(WeightFormat(bits, 32))
    assert refused is None if reason is None else reason in str(refused)
