"""A CPU's matmul by packed weights equals, to the bit, the matmul by the numbers that they represent."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear import LinearShape
from pallas_kernels.linear.cpu import can_multiply, cpu_linear, cpu_refusal
from pallas_kernels.native import processor
from pallas_kernels.weights import WeightFormat, dequantize
from pallas_kernels.weights.held import Quantized
from tests.pallas_kernels.quantized import FORMATS, HALVES, make_parts, packed

pytestmark = pytest.mark.cpu_kernels

DTYPES = [jnp.bfloat16, jnp.float32]
GROUPED = {name: form for name, form in FORMATS.items() if form.group}
WHOLE = {name: form for name, form in FORMATS.items() if not form.group}
LAYER = 1


def inputs_of(form: WeightFormat, least: int) -> int:
    """Return a row's number of inputs: at least `least`, in whole groups."""
    per = np.lcm.reduce([64, form.group or 1, form.factor_group or 1])
    return int(-(-least // per) * per)


def rounded(parts: dict[str, np.ndarray], form: WeightFormat, dtype: Any) -> jax.Array:
    return jnp.asarray(dequantize(parts, form)).astype(dtype)


def stacked(parts: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Return the parts as the middle one of three layers; the bits of the others are all ones."""
    arrays = {}
    for name, part in parts.items():
        stack = np.full((3, *part.shape), 0xFF, np.uint8) if part.dtype.itemsize == 1 else None
        if stack is None:
            stack = np.full((3, part.nbytes), 0xFF, np.uint8)
            stack = stack.view(part.dtype).reshape(3, *part.shape)
        else:
            stack = stack.view(part.dtype)
        stack[LAYER] = part
        arrays[name] = jnp.asarray(stack)
    return arrays


def multiply(x: jax.Array, weight: Any, form: WeightFormat | None, layer: int, out_dtype: Any, **options: Any) -> Any:
    held = weight if form is None else Quantized(weight, form, is_packed=True)
    program = jax.jit(partial(cpu_linear, out_dtype=out_dtype, **options))
    return np.asarray(program(x, held, layer=jnp.int32(layer)))


def check(
    form: WeightFormat,
    t: int,
    n: int,
    k: int,
    dtype: Any,
    out_dtype: Any = None,
    num_rows: int | None = None,
    **options: Any,
) -> None:
    rng = np.random.default_rng(t)
    x = jnp.asarray(rng.standard_normal((t, k)), dtype)
    parts = make_parts(form, n, k)
    out_dtype = out_dtype or dtype
    if num_rows is not None:
        x = x.at[num_rows:].set(jnp.nan)
        options["num_rows"] = num_rows
    plain = rounded(parts, form, dtype)[None]
    expected = multiply(x, plain, None, 0, out_dtype, **options)[:num_rows]
    got = multiply(x, stacked(packed(parts, form)), form, LAYER, out_dtype, **options)[:num_rows]
    assert np.isfinite(expected.astype(np.float32)).all()
    assert abs(expected.astype(np.float32)).max() > 1e-3
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", GROUPED.values(), ids=GROUPED)
def test_equals_plain_weights(form: WeightFormat, dtype: Any) -> None:
    for t, n, least in ((1, 4, 64), (7, 21, 192), (9, 18, 576), (100, 33, 1200)):
        check(form, t, n, inputs_of(form, least), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q8_0", "Q6_K", "NVFP4", "AWQ"])
def test_gates_and_sums_equal_those_of_plain_weights(name: str, dtype: Any) -> None:
    form = FORMATS[name]
    k = inputs_of(form, 192)
    for t, num_rows in ((1, None), (9, 2), (64, 33)):
        check(form, t, 36, k, dtype, num_rows=num_rows, activation="silu")
    rng = np.random.default_rng(0)
    bias = jnp.asarray(rng.standard_normal(21), jnp.float32)
    for t, num_rows in ((1, 1), (9, 1), (64, 33)):
        plus = jnp.asarray(rng.standard_normal((t, 21)), jnp.float32)
        options: dict[str, Any] = {"activation": "gelu", "is_gated": False, "bias_o": bias, "plus_to": plus}
        check(form, t, 21, k, dtype, jnp.float32, num_rows, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [FORMATS["Q4_1"], FORMATS["Q6_K"], FORMATS["AWQ"]], ids=["Q4_1", "Q6_K", "AWQ"])
def test_long_rows(form: WeightFormat, dtype: Any) -> None:
    """Rows with more groups than the stack takes, and with more numbers than are unpacked for many rows."""
    for t in (1, 9):
        check(form, t, 8, 256 * 130, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", WHOLE.values(), ids=WHOLE)
def test_scales_of_outputs_multiply_sums(form: WeightFormat, dtype: Any) -> None:
    for t, n, k in ((1, 4, 32), (5, 21, 96), (70, 33, 160)):
        x = jnp.asarray(np.random.default_rng(t).standard_normal((t, k)), dtype)
        parts = make_parts(form, n, k)
        values = jnp.asarray(parts["codes"].astype(np.float32), dtype)
        expected = multiply(x, values[None], None, 0, jnp.float32) * parts["scales"].astype(np.float32)[:, 0]
        got = multiply(x, stacked(parts), form, LAYER, jnp.float32)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("form", HALVES.values(), ids=HALVES)
def test_halves_equal_float32(form: WeightFormat) -> None:
    for t, n, k in ((1, 4, 16), (4, 5, 48), (5, 21, 80), (9, 18, 576), (100, 33, 1296)):
        check(form, t, n, k, jnp.float32)
    for t, num_rows in ((1, None), (9, 2), (64, 33)):
        check(form, t, 36, 80, jnp.float32, num_rows=num_rows, activation="silu")
    check(form, 1, 8, 80_000, jnp.float32)  # more than is unpacked for many rows
    check(form, 9, 8, 80_000, jnp.float32)


@pytest.mark.usefixtures("avx2")
@pytest.mark.parametrize("name", ["avx2", "plain"])
@pytest.mark.parametrize("form", HALVES.values(), ids=HALVES)
def test_halves_of_other_processors(form: WeightFormat, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    restricted = replace(processor.current(), name=name)
    monkeypatch.setattr("pallas_kernels.native.processor.current", lambda: restricted)
    monkeypatch.setattr("pallas_kernels.native.compiling.refuse", lambda: None)
    for t in (1, 9):
        check(form, t, 9, 80, jnp.float32)


def test_halves_are_for_float32() -> None:
    form = HALVES["float16"]
    assert can_multiply((8, 80), jnp.float32, form=form)
    assert not can_multiply((8, 80), jnp.bfloat16, form=form)


@pytest.mark.usefixtures("avx2")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", GROUPED.values(), ids=GROUPED)
def test_with_avx2_alone(form: WeightFormat, dtype: Any) -> None:
    for t in (1, 9):
        check(form, t, 9, inputs_of(form, 192), dtype, jnp.float32)


@pytest.mark.usefixtures("avx2")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q8_0", "Q6_K", "Q3_K", "NVFP4", "nf4", "AWQ", "FP8 in blocks"])
def test_without_instructions_for_tables(name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on other processors, for which the code is LLVM's own instructions alone."""
    form = FORMATS[name]
    restricted = replace(processor.current(), name="plain")
    monkeypatch.setattr("pallas_kernels.native.processor.current", lambda: restricted)
    monkeypatch.setattr("pallas_kernels.native.compiling.refuse", lambda: None)
    for t in (1, 9):
        check(form, t, 9, inputs_of(form, 192), dtype, jnp.float32)


@pytest.mark.parametrize(
    ("form", "k"),
    [
        (FORMATS["Q4_0"], 96),
        (FORMATS["AWQ"], 192),
        (FORMATS["Q4_K"], 128),
        (WeightFormat(4, 8), 64),
        (WeightFormat(4, 48), 192),
    ],
)
def test_says_what_it_cannot_unpack(form: WeightFormat, k: int) -> None:
    assert not can_multiply((8, k), jnp.bfloat16, form=form)
    assert can_multiply((8, 256), jnp.bfloat16, form=FORMATS["Q4_K"])


def test_what_kernels_do_not_take_is_refused() -> None:
    form = FORMATS["Q4_0"]
    parts = make_parts(form, 16, 64)
    loose = Quantized({name: jnp.asarray(part)[None] for name, part in parts.items()}, form)
    with pytest.raises(ValueError, match="take codes of 4 bits packed"):
        cpu_linear(jnp.ones((4, 64)), loose, 0, out_dtype=jnp.float32)
    for dtypes in ((jnp.float16, jnp.float32), (jnp.float32, jnp.float16)):
        refusal = cpu_refusal(LinearShape(16, 64, *dtypes))
        assert refusal is not None
        assert refusal.startswith("dtypes must be bfloat16 or float32")
