"""The GPUs' matmuls by quantized weights equal float64's in the interpreter, which detects races.

In it a thread block of `gpu_mma` is one thread, see test_linear_gpu_mma.py.
"""

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
from pallas_kernels.linear.gpu.sizes import WIDENED_ROWS, WORKERS, choose_sizes
from pallas_kernels.weights import WeightFormat
from tests.pallas_kernels.gpu import traced
from tests.pallas_kernels.gpu_linear import HOPPER, INPUTS, OUTPUTS, RARE_THAT_RUN, Kernel, both, check, multiplied, run
from tests.pallas_kernels.quantized_linear import LAYER, exact, make, sizes_of_sums

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]


@both
@pytest.mark.parametrize("name", [*FORMATS, *RARE_THAT_RUN])
def test_few_rows_match_float64(kernel: Kernel, name: str) -> None:
    call = make((FORMATS | RARE)[name], 5, OUTPUTS, INPUTS)
    check(call, run(kernel, call, kernel.few))


@both
@pytest.mark.parametrize("name", ["q4_k", "int4-g64", "fp8"])
def test_many_rows_match_float64(kernel: Kernel, name: str) -> None:
    call = make(FORMATS[name], 19, OUTPUTS, INPUTS)
    check(call, run(kernel, call, kernel.many))


@pytest.mark.parametrize(
    ("name", "num_inputs"),
    [("mxfp4", 320), ("q4_1", 576), ("q8_0", 480), ("int4-g64", 448), ("fp8", 352), ("q4_0", 320), ("mxfp8", 160)],
)
def test_the_last_piece_is_not_whole(name: str, num_inputs: int) -> None:
    """The remainders of gpt-oss (2,880), SmolLM2 (576), DeepSeek-V2's dense layer (10,944) and others."""
    call = make((FORMATS | RARE)[name], 5, OUTPUTS, num_inputs)
    check(call, run(HOPPER, call, HOPPER.few))


def test_no_part_of_a_sum_is_empty() -> None:
    sizes = choose_sizes(1, 1024, 137 * 128, FORMATS["awq"])
    per_part = -(-137 // sizes.parts)
    assert (sizes.parts - 1) * per_part < 137


@both
def test_bfloat16_is_rounded_once(kernel: Kernel) -> None:
    call = make(FORMATS["awq"], 19, OUTPUTS, INPUTS)
    for sizes in (kernel.few, kernel.many):
        np.testing.assert_allclose(run(kernel, call, sizes, jnp.bfloat16), multiplied(call), rtol=2**-8, atol=1e-4)


@both
@pytest.mark.parametrize("name", ["q4_k", "fp8"])
def test_many_rows_widen_the_matrix_first(kernel: Kernel, name: str) -> None:
    """No kernel of this project runs then."""
    call = make(FORMATS[name], WIDENED_ROWS, 64, 256)
    multiply = jax.jit(partial(kernel.multiply, layer=LAYER, out_dtype=jnp.float32))
    assert "quantized_linear" not in traced(multiply, call.x, call.weight)
    assert "quantized_linear" in traced(multiply, call.x[:-1], call.weight)
    error = abs(np.asarray(multiply(call.x, call.weight), np.float64) - exact(call))
    assert (error <= 2e-6 * sizes_of_sums(call)).all()


@both
@pytest.mark.parametrize("name", ["gptq", "int8"])
def test_a_row_does_not_depend_on_the_others(kernel: Kernel, name: str) -> None:
    """Few rows, with sums that XLA adds up, have the same bits as many rows."""
    call = make(FORMATS[name], 19, OUTPUTS, INPUTS)
    whole = run(kernel, call, kernel.many)
    few = kernel.few._replace(rows=kernel.many.rows)  # the interpreter's own matmul rounds depending on the shape
    np.testing.assert_array_equal(run(kernel, call._replace(x=call.x[3:8]), few), whole[3:8])


@both
def test_what_is_added(kernel: Kernel) -> None:
    call = make(FORMATS["gptq"], 5, OUTPUTS, INPUTS)
    plus, bias = np.full((5, OUTPUTS), 2, np.float32), np.arange(OUTPUTS, dtype=np.float32)
    got = run(kernel, call, kernel.few, plus_to=jnp.asarray(plus), bias_o=jnp.asarray(bias))
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
