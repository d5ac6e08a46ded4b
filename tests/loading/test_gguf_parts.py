"""The parts of quantized GGUF tensors stand for the numbers of the format's own reference, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxllm.loading.folder import DummyCheckpoint
from jaxllm.loading.gguf.checkpoint import GGUFCheckpoint
from jaxllm.loading.gguf.dequant import dequantize as widen
from jaxllm.loading.gguf.file import TENSOR_TYPES, TensorType
from jaxllm.loading.gguf.parts import CHUNK_NUMBERS, FORMATS, read_part
from pallas_kernels.weights import dequantize
from tests.loading.files import Q8_0, gguf_bytes, gguf_f32, llama_metadata
from tests.loading.gguf_moe_files import moe_gguf, mxfp4, stacked

BY_NAME = {kind.name: kind for kind in TENSOR_TYPES.values()}
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "MXFP4": [],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
}
"""Where a block of each type has float16 numbers, in bytes."""


def random_rows(kind: TensorType, num_rows: int, num_blocks: int) -> np.ndarray:
    """Return stored rows of any bytes, with float16 numbers from 0 and the least to the largest."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 255, (num_rows, num_blocks, kind.num_bytes), np.uint8)
    for at in HALVES[kind.name]:
        halves = rng.standard_normal((num_rows, num_blocks, 1)).astype(np.float16)
        halves.flat[:5] = 0, -0.0, 6e-8, 65504, -65504
        blocks[..., at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def bits(numbers: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(numbers).view(np.uint32)


@pytest.mark.parametrize("name", FORMATS)
def test_parts_are_the_reference_s_numbers(repository: Path, name: str):
    with np.load(repository / "tests/data/gguf/quants.npz") as goldens:
        data, values = goldens[f"{name}_data"], goldens[f"{name}_values"]
    form = FORMATS[name]
    parts = {part: read_part(BY_NAME[name], data, part) for part in form.parts}
    for part, array in parts.items():
        assert (array.dtype, array.shape) == (form.dtype(part), (3, form.width(part, 512))), part
    np.testing.assert_array_equal(bits(dequantize(parts, form)), bits(values))
    assert form.num_bytes(3, 512) >= data.nbytes  # scales of 4 and 6 bits have bytes of their own


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 7])
def test_any_bytes_in_more_than_one_chunk(name: str, num_rows: int):
    kind = BY_NAME[name]
    data = random_rows(kind, num_rows, CHUNK_NUMBERS // kind.block_size // num_rows + 3)
    parts = {part: read_part(kind, data, part) for part in FORMATS[name].parts}
    with np.errstate(over="ignore"):
        result, expected = dequantize(parts, FORMATS[name]), widen(kind, data)
    np.testing.assert_array_equal(bits(result), bits(expected))


def whole(checkpoint: GGUFCheckpoint, name: str, index: int | None = None) -> np.ndarray:
    """Return the numbers that a tensor's parts stand for."""
    form = checkpoint.format_of(name)
    assert form is not None, name
    return dequantize({part: checkpoint.read_part(name, part, index) for part in form.parts}, form)


def open_gguf(path: Path, data: bytes) -> GGUFCheckpoint:
    (path / "x.gguf").write_bytes(data)
    return GGUFCheckpoint(path / "x.gguf")


def test_rows_are_in_hf_s_order(tmp_path: Path):
    """The converter changes the order of a Llama's queries and keys."""
    stored = random_rows(BY_NAME["Q8_0"], 8, 1).tobytes()
    tensors = gguf_f32({"token_embd.weight": np.ones((6, 8)), "blk.0.attn_norm.weight": np.ones(8)})
    tensors |= {f"blk.0.attn_{kind}.weight": (Q8_0, (8, 32), stored) for kind in "qkv"}
    checkpoint = open_gguf(tmp_path, gguf_bytes(llama_metadata(), tensors))
    read = {kind: whole(checkpoint, f"model.layers.0.self_attn.{kind}_proj.weight") for kind in "qkv"}
    for kind, numbers in read.items():
        np.testing.assert_array_equal(numbers, checkpoint.read(f"model.layers.0.self_attn.{kind}_proj.weight"))
    np.testing.assert_array_equal(read["q"][[0, 2, 1, 3, 4, 6, 5, 7]], read["v"])
    np.testing.assert_array_equal(whole(checkpoint, "model.layers.0.self_attn.v_proj.weight", 3), read["v"][3])
    for name in ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "nothing"):
        assert checkpoint.format_of(name) is None
        with pytest.raises(ValueError, match=f"no part 'codes' of '{name}'"):
            checkpoint.read_part(name, "codes")


@pytest.mark.parametrize("case", ["gpt_oss", "mixtral"])
def test_experts(tmp_path: Path, case: str):
    """Each expert's rows are its outputs, also where HF has inputs first."""
    experts = {name: tensor for name, tensor in stacked(case).items() if name.endswith("_exps.weight")}
    checkpoint = open_gguf(tmp_path, moe_gguf(case, extra={name: mxfp4(tensor) for name, tensor in experts.items()}))
    names = [name for name in checkpoint.tensors if ".experts." in name and not name.endswith("bias")]
    assert len(names) > 1
    for name in names:
        is_turned = case == "gpt_oss"
        expected = checkpoint.read(name)
        expected = expected.swapaxes(-1, -2) if is_turned else expected
        np.testing.assert_array_equal(whole(checkpoint, name), expected)
        if is_turned:
            np.testing.assert_array_equal(whole(checkpoint, name, 1), expected[1])


def test_what_cannot_be_kept_has_no_format(tmp_path: Path):
    """Gates and ups of two types are one tensor of HF's."""
    experts = {name: tensor for name, tensor in stacked("gpt_oss").items() if name.endswith("_exps.weight")}
    extra = {name: mxfp4(tensor) for name, tensor in experts.items() if "gate" not in name}
    checkpoint = open_gguf(tmp_path, moe_gguf("gpt_oss", extra=extra))
    assert checkpoint.format_of("model.layers.0.mlp.experts.gate_up_proj") is None
    assert checkpoint.format_of("model.layers.0.mlp.experts.down_proj") == FORMATS["MXFP4"]


def test_matrices_that_hf_turns_are_widened(tmp_path: Path):
    metadata = llama_metadata("gpt2", {"embedding_length": 32})
    tensors = {
        "token_embd.weight": (Q8_0, (6, 32), random_rows(BY_NAME["Q8_0"], 6, 1).tobytes()),
        "blk.0.ffn_up.weight": (Q8_0, (64, 32), random_rows(BY_NAME["Q8_0"], 64, 1).tobytes()),
    }
    checkpoint = open_gguf(tmp_path, gguf_bytes(metadata, tensors))
    assert checkpoint.format_of("transformer.wte.weight") == FORMATS["Q8_0"]
    assert DummyCheckpoint(checkpoint).format_of("transformer.wte.weight") == FORMATS["Q8_0"]
    assert checkpoint.format_of("transformer.h.0.mlp.c_fc.weight") is None
    assert checkpoint.read("transformer.h.0.mlp.c_fc.weight").shape == (32, 64)
