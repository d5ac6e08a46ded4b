"""The TPU's grouped matmul equals the float64 reference in the TPU interpreter, which also detects races."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul import GroupedMatmul, Groups, MatmulShape, capacity, pick
from pallas_kernels.grouped_matmul.cases import CASES
from pallas_kernels.grouped_matmul.tpu import tpu_grouped_matmul
from pallas_kernels.grouped_matmul.tpu.sizes import VMEM_LIMIT, Sizes, choose_sizes, round_up
from pallas_kernels.linear.cases import FORMATS
from pallas_kernels.weights import INT8, WeightFormat
from pallas_kernels.weights.held import Quantized
from tests.pallas_kernels.grouped_calls import COUNTS, LAYER, Call, make, reference
from tests.pallas_kernels.quantized_linear import random_weights

FP8_BLOCKS = FORMATS["fp8-block"]
pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]
# A ring shorter than the list of tiles, spans shorter than the largest group.
SMALL = Sizes(parts=1, columns=128, num_tiles=2, num_buffers=3, span=32, is_transposed=False)


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    pltpu.reset_tpu_interpret_mode_state()


@cache
def compiled(sizes: Sizes | None, activation: str | None, out_dtype: Any = None) -> Any:
    def function(call: Call, layer: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"activation": activation, "out_dtype": out_dtype or call.x.dtype, "sizes": sizes}
        return tpu_grouped_matmul(call.x, call.w, layer, call.groups, **options)

    # Most of the time goes into compiling the interpreter's program.
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def run(call: Call, sizes: Sizes | None = SMALL, activation: str | None = None) -> np.ndarray:
    return np.asarray(compiled(sizes, activation)(call, jnp.int32(LAYER)), np.float64)


@pytest.mark.parametrize(
    ("num_in", "num_out", "activation", "sizes"),
    [
        (256, 256, None, SMALL),
        (256, 2 * 192, "silu", SMALL._replace(parts=2)),  # the last tile of each half is not whole
        (256, 2 * 192, "gelu_pytorch_tanh", SMALL._replace(parts=2, num_buffers=2)),
        (72, 256, None, SMALL._replace(is_transposed=True)),
        (72, 512, "silu", SMALL._replace(parts=2, is_transposed=True)),
        (72, 200, None, None),  # transposed, and one tile
        (256, 512, None, None),
    ],
)
def test_matches_reference(num_in: int, num_out: int, activation: str | None, sizes: Sizes | None) -> None:
    call = make(COUNTS, num_in, num_out, jnp.float32)
    expected, got = reference(call, activation), run(call, sizes, activation)
    np.testing.assert_allclose(got[call.rows], expected[call.rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [None, INT8])
@pytest.mark.parametrize(
    ("num_in", "num_out", "activation", "sizes"),
    [
        (256, 2 * 192, "silu", SMALL._replace(parts=2)),
        (96, 256, None, SMALL._replace(is_transposed=True)),
    ],
)
def test_bfloat16_is_rounded_once(
    form: WeightFormat | None, num_in: int, num_out: int, activation: str | None, sizes: Sizes
) -> None:
    call = make(COUNTS, num_in, num_out, jnp.bfloat16, form)
    expected, got = reference(call, activation), run(call, sizes, activation)
    np.testing.assert_allclose(got[call.rows], expected[call.rows], rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "num_in", "num_out", "activation", "sizes"),
    [
        (FP8_BLOCKS, 384, 2 * 256, "silu", SMALL._replace(parts=2)),
        (FP8_BLOCKS, 256, 3 * 128, None, SMALL._replace(num_tiles=3, num_buffers=2)),
        (WeightFormat(8, 256, scale_dtype="float32"), 512, 512, "gelu_pytorch_tanh", None),
        (FORMATS["fp8"], 256, 256, None, SMALL),
    ],
)
def test_quantized_weights_are_not_rounded(
    form: WeightFormat, num_in: int, num_out: int, activation: str | None, sizes: Sizes | None
) -> None:
    """Sums of exact products are scaled; scales of other layers and experts are NaN."""
    call = make(COUNTS, num_in, num_out, jnp.bfloat16)
    weight, numbers = random_weights(form, call.w.shape)
    is_wanted = np.zeros((*call.w.shape[:2], 1, 1), bool)
    is_wanted[LAYER] = np.array(COUNTS)[:, None, None] > 0
    scales = jnp.where(is_wanted, weight.scales, jnp.nan)
    expected = reference(call._replace(w=jnp.asarray(numbers * is_wanted)), activation)
    call = call._replace(w=Quantized({"codes": weight.codes, "scales": scales}, form))
    got = np.asarray(compiled(sizes, activation, jnp.float32)(call, jnp.int32(LAYER)), np.float64)
    np.testing.assert_allclose(got[call.rows], expected[call.rows], rtol=1e-5, atol=1e-5 * np.nanmax(abs(expected)))


def test_every_number_of_float8() -> None:
    """Each code, -0 and the smallest among them, times 1."""
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    codes = np.where(np.isfinite(codes.astype(np.float32)), codes, 0).astype(codes.dtype)
    parts = {"codes": np.tile(codes, (1, 1, 128, 1)), "scales": np.ones((1, 1, 128, 2), np.float32)}
    eye = jnp.eye(256, dtype=jnp.bfloat16)
    groups = Groups(jnp.zeros(1, jnp.int32), jnp.full(1, 256, jnp.int32))
    got = tpu_grouped_matmul(eye, Quantized(parts, FP8_BLOCKS), 0, groups, out_dtype=jnp.float32)
    np.testing.assert_array_equal(got, np.tile(codes.astype(np.float32)[:, None], (1, 128)))


def test_rows_of_several_matmuls() -> None:
    """A span of more rows than one matmul takes, and less than two."""
    call = make((300, 1), 128, 128, jnp.float32)
    got = run(call, SMALL._replace(num_tiles=1, span=512))
    np.testing.assert_allclose(got[call.rows], reference(call, None)[call.rows], rtol=1e-5, atol=1e-5)


def test_no_rows() -> None:
    """Nothing is read or written, and nothing waits."""
    call = make(COUNTS, 256, 256, jnp.float32)
    run(call._replace(groups=call.groups._replace(counts_e=jnp.zeros_like(call.groups.counts_e))))


def test_a_group_alone_is_bitwise_the_same() -> None:
    call = make(COUNTS, 256, 256, jnp.bfloat16)
    whole = run(call)
    for expert in (1, 4, 5):
        counts = jnp.zeros_like(call.groups.counts_e).at[expert].set(COUNTS[expert])
        alone = call._replace(groups=call.groups._replace(counts_e=counts))
        np.testing.assert_array_equal(run(alone)[alone.rows], whole[alone.rows])


def test_weights_that_would_be_copied_are_refused() -> None:
    """XLA lays them out with their outputs in the lanes; a tile then takes whole lanes, or all outputs."""
    assert pick([MatmulShape(8, 5800, 1440, jnp.bfloat16, None, jnp.bfloat16)], "tpu") == (
        GroupedMatmul("xla"),
        "the result must have a multiple of 128 columns, since weights with 1440 inputs lie transposed, not 5800",
    )


@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("form", [None, INT8])
def test_a_share_of_narrow_experts_is_a_tile(num_devices: int, form: WeightFormat | None) -> None:
    """gpt-oss' 2880 columns are no multiple of 128, and its experts' width on several devices lets them lie transposed.

    Two tiles, the rows of a span and their results fit into VMEM.
    """
    shape = MatmulShape(32, 2880, 2880 // num_devices, jnp.bfloat16, form, jnp.float32)
    assert pick([shape], "tpu") == (GroupedMatmul("tpu"), None)
    sizes = choose_sizes(8672, shape.num_inputs, 2880, 1, jnp.bfloat16, shape.weight_dtype)
    assert (sizes.is_transposed, sizes.columns, sizes.num_tiles) == (True, 2880, 1)
    depth, width = round_up(shape.num_inputs, 32), round_up(2880, 128)
    weights = sizes.num_buffers * depth * width * jnp.dtype(shape.weight_dtype).itemsize
    assert weights + 2 * sizes.span * (2 * round_up(depth, 128) + 4 * width) < VMEM_LIMIT


def test_dtypes_may_be_names() -> None:
    shape = MatmulShape(8, 256, 256, "bfloat16", INT8, "bfloat16")
    assert pick([shape], "tpu") == (GroupedMatmul("tpu"), None)


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("tokens", [1, 64, 2048])
def test_sizes_of_float8_blocks_fit(num_devices: int, tokens: int) -> None:
    """Tiles are whole, and VMEM holds them with their scales, the rows of two spans and their results."""
    case = CASES["deepseek-v3"]
    shapes = case._replace(intermediate_size=case.intermediate_size // num_devices).shapes(form=FP8_BLOCKS)
    assert pick(shapes, "tpu") == (GroupedMatmul("tpu"), None)
    rows = capacity(tokens * case.num_choices, case.num_experts, 16)
    for shape in shapes:
        parts, depth = shape.num_outputs // shape.num_columns, shape.num_inputs
        counts = (rows, depth, shape.num_columns, parts)
        sizes = choose_sizes(*counts, shape.dtype, shape.weight_dtype, has_groups=True)
        assert sizes.padded_columns == shape.num_columns
        tile = parts * sizes.columns * (depth + 4 * round_up(depth // 128, 8))
        assert sizes.num_buffers * tile + 2 * sizes.span * (2 * depth + 4 * sizes.columns) < VMEM_LIMIT


def test_which_groups_are_refused() -> None:
    shape = MatmulShape(8, 512, 256, jnp.bfloat16, FP8_BLOCKS, jnp.bfloat16, "silu")
    assert pick([shape], "tpu") == (GroupedMatmul("tpu"), None)
    for refused, said in [
        (shape._replace(format=FORMATS["awq"]), "without mins or zeros"),
        (shape._replace(format=FORMATS["q8_0"]), "scales of groups must be float32, not float16"),
        (shape._replace(format=WeightFormat(8, 64, "e4m3", scale_dtype="float32")), "a multiple of 128 inputs"),
        (shape._replace(num_outputs=2 * 192), "a multiple of 128 columns, not 192"),
        (shape._replace(num_inputs=2**14), "scales of 128 groups"),
    ]:
        reason = pick([refused], "tpu")[1]
        assert reason is not None
        assert said in reason


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"tiny"}))
@pytest.mark.parametrize("form", [None, INT8])
@pytest.mark.parametrize("tokens", [1, 64, 2048])
def test_sizes_of_real_models_fit(case: str, form: WeightFormat | None, tokens: int) -> None:
    shapes = CASES[case].shapes(form=form)
    op, reason = pick(shapes, "tpu")
    assert (op.implementation, reason) == ("tpu", None)
    num_choices = tokens * CASES[case].num_choices
    rows = capacity(num_choices, shapes[0].num_experts, op.row_alignment)
    for shape in shapes:
        parts = shape.num_outputs // shape.num_columns
        sizes = choose_sizes(rows, shape.num_inputs, shape.num_columns, parts, shape.dtype, shape.weight_dtype)
        depth = round_up(shape.num_inputs, 128)
        weights = sizes.num_buffers * parts * sizes.columns * depth * jnp.dtype(shape.weight_dtype).itemsize
        assert weights + 2 * 2 * sizes.span * (depth + sizes.columns) < VMEM_LIMIT
        assert sizes.padded_columns >= shape.num_columns
