"""Matrices of twelve real models, shrunk by whole tiles, in the kernels of both kinds of GPUs."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import pytest

from pallas_kernels.linear import LinearShape, pick
from pallas_kernels.linear.cases import FORMATS
from tests.pallas_kernels.gpu_linear import Kernel, both, check, run
from tests.pallas_kernels.quantized_linear import make

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("quick_compilation")]

MODELS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "Llama-3-8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "Llama-3.2-1B": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    "Qwen3-0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "Qwen3-8B": ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
    "Qwen2.5-7B": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    "Gemma-3-4B": ((4096, 2560), (2560, 2048), (20480, 2560), (2560, 10240)),
    "Mistral-7B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "Phi-3-mini": ((9216, 3072), (3072, 3072), (16384, 3072), (3072, 8192)),
    "gpt-oss-20b": ((5120, 2880), (2880, 4096)),
    "SmolLM2-135M": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
    "Granite-3.1-2B": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    "DeepSeek-V2-Lite": ((3072, 2048), (576, 2048), (4096, 512), (2048, 2048), (21888, 2048), (2048, 10944)),
}
"""Outputs by inputs of the dense layers' matrices: q, k and v or their like, what follows attention, and the MLP."""
OUTPUT_TILE, INPUT_TILE = 128, 256
"""The outputs of a tile, and inputs that are whole pieces and whole groups in every format."""


def shrunk(num_outputs: int, num_inputs: int) -> tuple[int, int]:
    """Return a matrix of one tile and the remainders of another one."""
    return OUTPUT_TILE + num_outputs % OUTPUT_TILE, INPUT_TILE + num_inputs % INPUT_TILE


SHRUNK = sorted({shrunk(*matrix) for matrices in MODELS.values() for matrix in matrices})


def four_bits(num_inputs: int) -> str:
    """Return a format of 4 bits that rows of `num_inputs` numbers can have: groups of 128 do not divide them all."""
    return "mxfp4" if num_inputs % 128 else "awq"


@pytest.mark.parametrize("architecture", ["8.0", "9.0"])
@pytest.mark.parametrize("model", MODELS)
def test_no_matrix_is_refused(model: str, architecture: str) -> None:
    op, _ = pick("gpu", architecture=architecture)
    for num_outputs, num_inputs in MODELS[model]:
        for name in ("fp8", four_bits(num_inputs)):
            shape = LinearShape(num_outputs, num_inputs, jnp.bfloat16, jnp.bfloat16, FORMATS[name])
            assert op.refusal(shape) is None


@both
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHRUNK)
@pytest.mark.parametrize("bits", [4, 8])
def test_remainders_of_real_matrices(num_outputs: int, num_inputs: int, bits: int, kernel: Kernel) -> None:
    call = make(FORMATS[four_bits(num_inputs) if bits == 4 else "fp8"], 3, num_outputs, num_inputs)
    check(call, run(kernel, call, kernel.few))
