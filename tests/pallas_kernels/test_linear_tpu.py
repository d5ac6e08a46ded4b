"""The TPU's matmul by quantized weights equals float64's in Pallas' simulation of a TPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear import Linear, LinearShape, pick
from pallas_kernels.linear.cases import FORMATS
from pallas_kernels.linear.tpu import tpu_linear
from pallas_kernels.linear.tpu.sizes import FEW_ROWS, Sizes
from tests.pallas_kernels.quantized_linear import LAYER, Call, exact, make, sizes_of_sums

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]
GROUPED = [name for name, form in FORMATS.items() if form.group is not None]
# The last blocks of rows and of outputs are not whole.
SIZES = Sizes(rows=16, outputs=128)
OUTPUTS, INPUTS = 192, 512


def run(call: Call, sizes: Sizes | None, **options: Any) -> np.ndarray:
    settings: dict[str, Any] = {"out_dtype": jnp.float32, "sizes": sizes, "interpret": True}
    return np.asarray(tpu_linear(call.x, call.weight, LAYER, **settings, **options), np.float64)


@pytest.mark.parametrize("name", GROUPED)
def test_many_rows_match_float64(name: str) -> None:
    """Every number is the bfloat16 of its float32; products of bfloat16 are exact, and added up in float32."""
    call = make(FORMATS[name], 19, OUTPUTS, INPUTS)
    assert (abs(run(call, SIZES) - exact(call)) <= 2e-6 * sizes_of_sums(call)).all()


@pytest.mark.parametrize("name", GROUPED)
def test_few_rows_match_float64(name: str) -> None:
    """Few rows are multiplied by weights without rounding."""
    call = make(FORMATS[name], 5, OUTPUTS, INPUTS)
    assert (abs(run(call, None) - exact(call, rounded=False)) <= 2e-6 * sizes_of_sums(call)).all()


def test_float32_rows() -> None:
    call = make(FORMATS["awq"], 5, OUTPUTS, INPUTS)
    call = call._replace(x=call.x.astype(jnp.float32))
    assert (abs(run(call, None) - exact(call, rounded=False)) <= 2e-6 * sizes_of_sums(call)).all()


def test_what_is_added() -> None:
    call = make(FORMATS["gptq"], FEW_ROWS, OUTPUTS, INPUTS)
    bias = np.arange(OUTPUTS, dtype=np.float32)
    got = run(call, None, bias_o=jnp.asarray(bias))
    np.testing.assert_allclose(got, exact(call, rounded=False) + bias, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("num_rows", [FEW_ROWS, 256])
def test_it_lowers_without_a_tpu(name: str, num_rows: int) -> None:
    """`jaxllm check` compiles on hosts without one, where JAX knows no TPU to ask."""
    x, weight = make(FORMATS[name], num_rows, OUTPUTS, INPUTS)
    traced = jax.jit(lambda x, weight: tpu_linear(x, weight, LAYER, out_dtype=jnp.float32)).trace(x, weight)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_what_plain_xla_runs() -> None:
    """Plain XLA widens weights without groups in the matmul itself."""
    op, reason = pick("tpu")
    assert (op, reason) == (Linear("tpu"), None)
    shape = LinearShape(256, 512, jnp.bfloat16, jnp.bfloat16, FORMATS["awq"])
    assert op.refusal(shape) is None
    for refused, said in [
        (shape._replace(format=None), "plain XLA"),
        (shape._replace(format=FORMATS["int8"]), "plain XLA"),
        (shape._replace(num_inputs=192), "128"),
        (shape._replace(num_outputs=96), "64"),
    ]:
        reason = op.refusal(refused)
        assert reason is not None
        assert said in reason
