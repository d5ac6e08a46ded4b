"""What only the matmul for GPUs from Ampere on has; test_linear_gpu.py compares it with float64.

A thread block is one thread in the interpreter, which knows neither `mma` nor copies of a thread: a product of operands
stands for the first, in the same order of inputs, and the layouts of what threads hold are checked by themselves.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.linear import LinearShape, pick
from pallas_kernels.linear.cases import FORMATS, RARE
from pallas_kernels.linear.gpu.sizes import DEPTH, WIDENED_ROWS, WORD_BYTES, depth_of_rows
from pallas_kernels.linear.gpu.words import words_layout
from pallas_kernels.linear.gpu_mma import choose_sizes
from pallas_kernels.linear.gpu_mma.copies import copy_steps
from pallas_kernels.linear.gpu_mma.fragments import as_fragments, fragments_shape, load_operand
from pallas_kernels.weights import WeightFormat
from tests.pallas_kernels.gpu_linear import INPUTS, MMA, run
from tests.pallas_kernels.quantized_linear import make
from tests.pallas_kernels.test_gpu_mma import numbers_of_threads

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]


def test_tiles_of_128_outputs() -> None:
    call = make(FORMATS["awq"], 5, 128, INPUTS)
    narrow, wide = (run(MMA, call, MMA.few._replace(outputs=outputs)) for outputs in (64, 128))
    np.testing.assert_array_equal(narrow, wide)


@pytest.mark.parametrize("side_by_side", [1, 2, 4])
def test_a_thread_has_the_words_of_its_group(side_by_side: int) -> None:
    """The first thread has the first words of a row, as many as `side_by_side`, and the next thread the next ones."""
    words = numbers_of_threads(words_layout(side_by_side).to_mgpu(), (64, 16))
    for thread in range(4):
        rows = words[0, thread].reshape(-1, 2, side_by_side)  # of each four threads, two rows of each
        first = side_by_side * (thread + 4 * np.arange(4 // side_by_side))
        expected = first[:, None, None] + np.array([0, 8 * 16])[:, None] + np.arange(side_by_side)
        np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_fragments_are_what_threads_hold_of_the_right_operand(rows: int) -> None:
    x = np.arange(rows * 32).reshape(rows, 32)
    fragments = np.asarray(as_fragments(jnp.asarray(x), rows, 32))[0, 0]
    by_lane = fragments.reshape(len(fragments), 32, -1)
    # Registers hold 8 rows and 16 inputs, the inputs last, as `load_operand` puts them in order.
    held = numbers_of_threads(mgpu.MMALayouts(jnp.bfloat16).rhs, (32, rows)).reshape(32, -1)  # the same in all warps
    want = x.T.reshape(-1)[held]
    np.testing.assert_array_equal(by_lane.transpose(1, 0, 2).reshape(32, -1), want)
    np.testing.assert_array_equal(load_operand(jnp.asarray(fragments), rows, None, interpret=True), x.T)


def test_operands_of_both_kinds_of_matmuls_are_held_alike() -> None:
    """Widened words become operands of an mma as they become those of a wgmma."""
    warps, warpgroup = mgpu.MMALayouts(jnp.bfloat16).lhs, mgpu.WGMMA_LAYOUT
    of_warps, of_warpgroup = (numbers_of_threads(layout, (64, 64)) for layout in (warps, warpgroup))
    np.testing.assert_array_equal(of_warps, of_warpgroup)


@pytest.mark.parametrize("form", (FORMATS | RARE).values(), ids=FORMATS | RARE)
def test_copies_end_with_the_matrix(form: WeightFormat) -> None:
    """Each 16 bytes of a stage are copied once, by one of 128 threads, and nothing beyond the stage or its source."""
    shapes = [(outputs, DEPTH * WORD_BYTES) for outputs in (64, 128)]
    for rows in (8, 16, 32, 64):
        fragments, numbers = fragments_shape(rows, depth_of_rows(form))
        assert fragments * numbers == rows * depth_of_rows(form)
        shapes.append((fragments, numbers * jnp.dtype(jnp.bfloat16).itemsize))
    for num_rows, row_bytes in shapes:
        assert row_bytes % 16 == 0
        steps = copy_steps(num_rows * row_bytes)
        copied = [first + thread for first, num_threads in steps for thread in range(num_threads)]
        assert copied == list(range(num_rows * row_bytes // 16))
        assert all(num_threads <= 128 for _, num_threads in steps)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(6144, 4096), (4096, 14336), (1024, 2048), (51200, 5120)])
def test_parts_of_sums_depend_on_the_weight_alone(num_outputs: int, num_inputs: int, form: WeightFormat) -> None:
    few = choose_sizes(1, num_outputs, num_inputs, form)
    for num_rows in (1, 9, 64, 200, WIDENED_ROWS - 1):
        op, _ = pick("gpu", architecture="8.6")
        assert op.refusal(LinearShape(num_outputs, num_inputs, jnp.bfloat16, jnp.bfloat16, form)) is None
        sizes = choose_sizes(num_rows, num_outputs, num_inputs, form)
        assert sizes.parts == few.parts
        # What parts take in memory is less than 16 MiB.
        parts = 1 if sizes.is_whole else sizes.parts
        assert parts == 1 or parts * num_outputs * (num_rows + 63) * 4 < 2**24


def test_each_gpu_has_its_kernel() -> None:
    names = {capability: pick("gpu", architecture=capability)[0].implementation for capability in ("7.5", "8.0", "9.0")}
    assert names == {"7.5": "xla", "8.0": "gpu_mma", "9.0": "gpu"}
    for capability in ("8.6", "8.9", "10.0", "10.3", "12.0"):
        assert pick("gpu", architecture=capability)[0].implementation == "gpu_mma"
    assert "Ampere" in str(pick("gpu", architecture="7.5")[1])


def test_what_does_not_run() -> None:
    op, _ = pick("gpu", architecture="8.9")
    shape = LinearShape(256, 512, jnp.bfloat16, jnp.bfloat16, FORMATS["awq"])
    for refused, said in [
        (shape._replace(format=None), "widening"),
        (shape._replace(dtype=jnp.float16), "bfloat16"),
        (shape._replace(num_inputs=64, format=FORMATS["mxfp4"]), "128 at least"),
        (shape._replace(format=WeightFormat(4, 32, offset=8, scale_dtype="float32")), "float32"),
        (shape._replace(format=RARE["nf4"]), "nf4"),
    ]:
        assert said in str(op.refusal(refused))
