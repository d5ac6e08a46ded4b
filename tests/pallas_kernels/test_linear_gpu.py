"""The GPU's matmul by quantized weights equals float64's in its interpreter, which detects races."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear import LinearShape, pick
from pallas_kernels.linear.cases import FORMATS, RARE
from pallas_kernels.linear.gpu import gpu_linear
from pallas_kernels.linear.gpu.sizes import WIDENED_ROWS, WORKERS, Sizes, choose_sizes
from pallas_kernels.linear.gpu.widen import Widening
from pallas_kernels.weights import WeightFormat
from pallas_kernels.weights.held import Quantized
from tests.pallas_kernels.gpu import interpreted, traced
from tests.pallas_kernels.quantized_linear import LAYER, Call, exact, make, sizes_of_sums

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]
# A ring shorter than a part of a sum; the last tiles of rows and of outputs are not whole.
FEW = Sizes(rows=8, parts=2, is_whole=False, stages=2)
MANY = Sizes(rows=16, parts=2, is_whole=True, stages=3)
OUTPUTS, INPUTS = 192, 512


RARE_THAT_RUN = ("q5_k", "q3_k", "gptq-8", "mxfp8")


def run(call: Call, sizes: Sizes | None, out_dtype: Any = jnp.float32, **options: Any) -> np.ndarray:
    def function(call: Call, layer: jax.Array, options: dict[str, Any]) -> jax.Array:
        settings: dict[str, Any] = {"out_dtype": out_dtype, "sizes": sizes, "interpret": True}
        return gpu_linear(call.x, call.weight, layer, **settings, **options)

    return np.asarray(interpreted(jax.jit(function), poisoned(call), jnp.int32(LAYER), options), np.float64)


def poisoned(call: Call) -> Call:
    """Return a call where the scales of other layers are NaN."""

    def poison(part: jax.Array) -> jax.Array:
        return part.at[:LAYER].set(jnp.nan) if jnp.issubdtype(part.dtype, jnp.floating) else part

    return call._replace(weight=call.weight.map(poison))


def multiplied(call: Call) -> np.ndarray:
    """Return the product in float64 by the numbers that the kernel multiplies by."""
    form = call.weight.format
    layer = call.weight.map(lambda part: part[LAYER])
    if form.group is None:
        return exact(call)
    numbers = np.asarray(layer.values(), np.float64).reshape(call.weight.shape[1], -1, form.group)
    parts = {name: np.asarray(part, np.float64) for name, part in layer.parts.items() if name != "codes"}
    spread = {
        name: np.repeat(part, numbers.shape[1] // part.shape[1], axis=1)[..., None] for name, part in parts.items()
    }
    numbers = (numbers - spread.get("zeros", 0)) * spread["scales"]
    if Widening(form).scales_numbers:
        numbers = numbers.astype(jnp.bfloat16).astype(np.float64)
    numbers = numbers * spread.get("scale_factors", 1) - spread.get("mins", 0) * spread.get("min_factors", 1)
    return np.asarray(call.x, np.float64) @ numbers.reshape(len(numbers), -1).T


def sizes_with_mins(call: Call) -> np.ndarray:
    """Return the sums of the magnitudes of products, those of mins apart."""
    layer = call.weight.map(lambda part: part[LAYER])
    parts = dict(layer.parts)
    mins = np.zeros((call.weight.shape[1], 1))
    if "mins" in parts:
        mins = np.asarray(layer.scales_and_mins()[1], np.float64)
        parts["mins"] = jnp.zeros_like(parts["mins"])
    length = call.x.shape[1] // mins.shape[1]
    spread = np.repeat(mins, length, axis=1)
    weight = Quantized({name: part[None].repeat(LAYER + 1, 0) for name, part in parts.items()}, layer.format)
    return sizes_of_sums(call._replace(weight=weight)) + abs(np.asarray(call.x, np.float64)) @ spread.T


def check(call: Call, got: np.ndarray) -> None:
    """Check a product: numbers are rounded once where they have scales, and the rest is exact but for float32 sums."""
    form, sizes = call.weight.format, sizes_with_mins(call)
    # Products of codes of 8 bits and scales of 11 are rounded once but for a few that are nearly between two numbers.
    tolerance = 1e-4 if form.bits == 8 and form.scale_dtype == "float16" else 4e-6
    assert (abs(got - multiplied(call)) <= tolerance * sizes).all()
    assert (abs(got - exact(call, rounded=False)) <= 2**-9 * sizes).all()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [*((name, FEW) for name in FORMATS), *((name, FEW) for name in RARE_THAT_RUN), ("q4_k", MANY), ("fp8", MANY)],
)
def test_matches_float64(name: str, sizes: Sizes) -> None:
    call = make((FORMATS | RARE)[name], 5 if sizes is FEW else 19, OUTPUTS, INPUTS)
    check(call, run(call, sizes))


@pytest.mark.parametrize(
    ("name", "num_inputs"),
    [("mxfp4", 320), ("q4_1", 576), ("q8_0", 480), ("int4-g64", 448), ("fp8", 352), ("q4_0", 320), ("mxfp8", 160)],
)
def test_the_last_piece_is_not_whole(name: str, num_inputs: int) -> None:
    """The remainders of gpt-oss (2,880), SmolLM2 (576), DeepSeek-V2's dense layer (10,944) and others."""
    call = make((FORMATS | RARE)[name], 5, OUTPUTS, num_inputs)
    check(call, run(call, FEW))


def test_no_part_of_a_sum_is_empty() -> None:
    sizes = choose_sizes(1, 1024, 137 * 128, FORMATS["awq"])
    per_part = -(-137 // sizes.parts)
    assert (sizes.parts - 1) * per_part < 137


def test_bfloat16_is_rounded_once() -> None:
    call = make(FORMATS["awq"], 19, OUTPUTS, INPUTS)
    for sizes in (FEW, MANY):
        np.testing.assert_allclose(run(call, sizes, jnp.bfloat16), multiplied(call), rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("name", ["q4_k", "fp8"])
def test_many_rows_widen_the_matrix_first(name: str) -> None:
    """No kernel of this project runs then."""
    call = make(FORMATS[name], WIDENED_ROWS, 64, 256)
    multiply = jax.jit(partial(gpu_linear, layer=LAYER, out_dtype=jnp.float32))
    assert "quantized_linear" not in traced(multiply, call.x, call.weight)
    assert "quantized_linear" in traced(multiply, call.x[:-1], call.weight)
    error = abs(np.asarray(multiply(call.x, call.weight), np.float64) - exact(call))
    assert (error <= 2e-6 * sizes_of_sums(call)).all()


@pytest.mark.parametrize("name", ["gptq", "int8"])
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    """Few rows, with sums that XLA adds up, have the same bits as many rows."""
    call = make(FORMATS[name], 19, OUTPUTS, INPUTS)
    whole = run(call, MANY)
    few = FEW._replace(rows=MANY.rows)  # the interpreter's own matmul rounds depending on the shape
    np.testing.assert_array_equal(run(call._replace(x=call.x[3:8]), few), whole[3:8])


def test_what_is_added() -> None:
    call = make(FORMATS["gptq"], 5, OUTPUTS, INPUTS)
    plus, bias = np.full((5, OUTPUTS), 2, np.float32), np.arange(OUTPUTS, dtype=np.float32)
    got = run(call, FEW, plus_to=jnp.asarray(plus), bias_o=jnp.asarray(bias))
    np.testing.assert_allclose(got, multiplied(call) + plus + bias, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(6144, 4096), (4096, 14336), (5120, 25600), (51200, 5120)])
def test_real_models_run_and_keep_all_processors_busy(num_outputs: int, num_inputs: int, form: Any) -> None:
    op, _ = pick("gpu", architecture="9.0")
    assert op.refusal(LinearShape(num_outputs, num_inputs, jnp.bfloat16, jnp.bfloat16, form)) is None
    for num_rows in (1, 64, WIDENED_ROWS - 1):
        sizes = choose_sizes(num_rows, num_outputs, num_inputs, form)
        assert sizes.stages >= (4 if num_rows <= 64 else 3)
        tiles = -(-num_outputs // 128) * -(-num_rows // sizes.rows) * (1 if sizes.is_whole else sizes.parts)
        assert 2 * tiles >= WORKERS
        assert sizes.parts == choose_sizes(1, num_outputs, num_inputs, form).parts


def test_what_does_not_run() -> None:
    op, _ = pick("gpu", architecture="9.0")
    shape = LinearShape(256, 512, jnp.bfloat16, jnp.bfloat16, FORMATS["awq"])
    for refused, said in [
        (shape._replace(format=None), "widening"),
        (shape._replace(dtype=jnp.float32), "bfloat16"),
        (shape._replace(num_outputs=96), "64"),
        (shape._replace(num_inputs=416), "64"),
        (shape._replace(format=WeightFormat(4, 16, offset=8)), "32 numbers at least"),
        (shape._replace(format=WeightFormat(4, 128, zero_dtype="float16")), "zeros"),
        (shape._replace(format=WeightFormat(4, 128, has_mins=True)), "mins"),
        (shape._replace(format=WeightFormat(4, 32, values="e2m1")), "e2m1"),
    ]:
        reason = op.refusal(refused)
        assert reason is not None
        assert said in reason


def test_codes_must_be_held_as_a_gpu_takes_them() -> None:
    call = make(FORMATS["awq"], 5, OUTPUTS, INPUTS)
    wrong = call.weight.map(lambda part: part.astype(jnp.uint8) if part.dtype == jnp.uint4 else part)
    with pytest.raises(ValueError, match="uint4"):
        gpu_linear(call.x, wrong, LAYER, out_dtype=jnp.float32)
