"""The GPU's grouped matmul equals the float64 reference in its interpreter, which detects races."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import MatmulShape, capacity, pick
from pallas_kernels.grouped_matmul.cases import CASES
from pallas_kernels.grouped_matmul.gpu import gpu_grouped_matmul
from pallas_kernels.grouped_matmul.gpu.quantized import multiply_quantized
from pallas_kernels.grouped_matmul.gpu.sizes import WORKERS, Sizes, choose_sizes
from pallas_kernels.grouped_matmul.reference import reference_grouped_matmul
from pallas_kernels.grouped_matmul.xla import finish
from pallas_kernels.linear.cases import FORMATS
from pallas_kernels.linear.gpu import sizes as linear_sizes
from pallas_kernels.weights.held import Quantized
from tests.pallas_kernels.gpu import interpreted
from tests.pallas_kernels.grouped_calls import COUNTS, LAYER, NUM_LAYERS, Call, make, reference
from tests.pallas_kernels.quantized_linear import random_weights

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]
# A ring shorter than the depth of a tile, and groups of several tiles; the last columns are not a whole tile.
SMALL = Sizes(rows=16, columns=32, stages=2)
TALL = Sizes(rows=128, columns=64, stages=3)


@cache
def compiled(sizes: Sizes, activation: str | None, out_dtype: Any) -> Any:
    def function(call: Call, layer: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"activation": activation, "out_dtype": out_dtype, "sizes": sizes}
        return gpu_grouped_matmul(call.x, call.w, layer, call.groups, interpret=True, **options)

    return jax.jit(function)


def run(call: Call, sizes: Sizes, activation: str | None = None, out_dtype: Any = jnp.bfloat16) -> np.ndarray:
    return np.asarray(interpreted(compiled(sizes, activation, out_dtype), call, jnp.int32(LAYER)), np.float64)


@pytest.mark.parametrize(
    ("num_out", "activation", "sizes"),
    [
        (96, None, SMALL),
        (2 * 72, "silu", SMALL),
        (2 * 72, "gelu_pytorch_tanh", TALL),
        (136, None, TALL),
    ],
)
def test_matches_reference(num_out: int, activation: str | None, sizes: Sizes) -> None:
    """Products of bfloat16 are exact, and added up in float32."""
    call = make(COUNTS, 192, num_out, jnp.bfloat16)
    expected, got = reference(call, activation), run(call, sizes, activation, jnp.float32)
    np.testing.assert_allclose(got[call.rows], expected[call.rows], rtol=1e-5, atol=1e-5)


def test_bfloat16_is_rounded_once() -> None:
    call = make(COUNTS, 128, 64, jnp.bfloat16)
    np.testing.assert_allclose(run(call, SMALL)[call.rows], reference(call, None)[call.rows], rtol=2**-8, atol=1e-5)


def test_no_rows() -> None:
    """Nothing is read or written, and nothing waits."""
    call = make(COUNTS, 128, 64, jnp.bfloat16)
    run(call._replace(groups=call.groups._replace(counts_e=jnp.zeros_like(call.groups.counts_e))), SMALL)


def test_a_group_alone_is_bitwise_the_same() -> None:
    call = make(COUNTS, 128, 64, jnp.bfloat16)
    whole = run(call, SMALL)
    counts = jnp.zeros_like(call.groups.counts_e).at[5].set(COUNTS[5])
    alone = call._replace(groups=call.groups._replace(counts_e=counts))
    np.testing.assert_array_equal(run(alone, SMALL)[alone.rows], whole[alone.rows])


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"tiny"}))
def test_real_models_run_and_keep_all_processors_busy(case: str) -> None:
    shapes = CASES[case].shapes()
    op, reason = pick(shapes, "gpu", architecture="9.0")
    assert (op.implementation, reason) == ("gpu", None)
    for tokens in (1, 64, 2048):
        num_choices, num_experts = tokens * CASES[case].num_choices, shapes[0].num_experts
        rows = capacity(num_choices, num_experts, op.row_alignment)
        for shape in shapes:
            sizes = choose_sizes(rows, num_experts, shape.num_columns, shape.out_dtype)
            assert sizes.stages >= 4
            most_tiles = min(num_experts, num_choices) * -(-shape.num_columns // sizes.columns)
            assert case == "small" or most_tiles >= WORKERS // 2 or sizes.columns == 32


@pytest.mark.parametrize(
    ("name", "num_in", "activation"),
    [("mxfp4", 320, None), ("awq", 384, "silu"), ("q4_k", 256, None), ("fp8", 288, None)],
)
def test_quantized_weights(name: str, num_in: int, activation: str | None) -> None:
    """The last piece of inputs, the last tile of outputs and the last tile of rows are not whole."""
    form = FORMATS[name]
    num_out = 192
    call = make(COUNTS, num_in, num_out, jnp.bfloat16)
    weight, numbers = random_weights(form, (NUM_LAYERS, len(COUNTS), num_out, num_in))
    # Numbers of Q4_K are rounded before their mins, those of MXFP4 once, and of the others only sums are scaled.
    w = np.asarray(jnp.asarray(numbers, jnp.bfloat16 if form.values == "e2m1" else jnp.float32), np.float64)
    x = np.nan_to_num(np.asarray(call.x, np.float64))
    expected = reference_grouped_matmul(x, w, LAYER, call.groups, activation=activation)
    sizes = linear_sizes.Sizes(rows=32, parts=1, is_whole=True, stages=2)

    def function(call: Call, weight: Quantized, layer: jax.Array) -> jax.Array:
        product = multiply_quantized(call.x, weight, layer, call.groups, interpret=True, sizes=sizes)
        return finish(product.astype(jnp.float32), None, activation, jnp.float32)

    got = np.asarray(interpreted(jax.jit(function), call, weight, jnp.int32(LAYER)), np.float64)
    # Products are bfloat16; before an activation two of them are rounded.
    tolerance: dict[str, Any] = {"rtol": 2**-6 if activation else 2**-8, "atol": 1e-3 * abs(expected[call.rows]).max()}
    np.testing.assert_allclose(got[call.rows], expected[call.rows], **tolerance)


def test_what_does_not_run() -> None:
    shape = MatmulShape(8, 256, 128, jnp.bfloat16, None, jnp.bfloat16)
    for refused, architecture, reason in [
        (shape, "8.0", "Hopper"),
        (shape._replace(dtype=jnp.float32), "9.0", "bfloat16"),
        (shape._replace(num_inputs=96), "9.0", "64"),
        (shape._replace(format=FORMATS["int8"], num_outputs=200), "9.0", "64"),
    ]:
        op, said = pick([refused], "gpu", architecture=architecture)
        assert op.implementation == "xla"
        assert said is not None
        assert reason in said
