"""GGUF files of models with experts: every tensor and the config are those of the HF checkpoint they were made of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.gguf.checkpoint import GGUFCheckpoint
from jaxllm.loading.names import check_names
from jaxllm.models import ModelSpecs, get_family
from tests.loading.files import gguf_bytes
from tests.loading.gguf_moe_files import ARCHITECTURES, Stored, bf16, hf_config, metadata, moe_gguf, mxfp4, stacked
from tests.loading.mxfp4_files import quantized, read_tensors
from tests.models.tiny import folder

ONES = np.ones((32,), ml_dtypes.bfloat16)


def open_gguf(path: Path, data: bytes) -> GGUFCheckpoint:
    (path / "x.gguf").write_bytes(data)
    return GGUFCheckpoint(path / "x.gguf")


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_config_and_tensors_are_hf(tmp_path: Path, case: str):
    checkpoint, expected, hf = open_gguf(tmp_path, moe_gguf(case)), read_tensors(folder(case)), hf_config(case)
    assert checkpoint.config["architectures"] == hf["architectures"]
    family = get_family(hf["architectures"][0])
    config = family.read_config(checkpoint.config)
    # A file holds float32.
    assert config == family.read_config(hf | {"rms_norm_eps": float(np.float32(hf["rms_norm_eps"]))})
    check_names(ModelSpecs(config, "float32").param_specs(checkpoint.tensors), checkpoint)
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        info, result = checkpoint.tensors[name], checkpoint.read(name)
        assert (info.shape, info.dtype, info.num_bytes) == (tensor.shape, "bfloat16", tensor.nbytes), name
        assert result.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(result, tensor, err_msg=name)
        np.testing.assert_array_equal(checkpoint.read(name, 1 % len(tensor)), tensor[1 % len(tensor)], err_msg=name)
        checkpoint.release(name)


@pytest.mark.parametrize("mixed", [False, True], ids=["all", "not the gates"])
def test_gpt_oss_in_mxfp4(tmp_path: Path, mixed: bool):
    """Its experts are those of the same weights stored in MXFP4 as on the hub; gates may have another type."""
    ours = {name: tensor for name, tensor in stacked("gpt_oss").items() if name.endswith("_exps.weight")}
    rounded = {name: mxfp4(tensor) for name, tensor in ours.items() if not (mixed and "gate" in name)}
    checkpoint = open_gguf(tmp_path, moe_gguf("gpt_oss", extra=rounded))
    original = read_tensors(folder("gpt_oss"))
    _, widened = quantized(original)
    for name, tensor in widened.items():
        result, expected = checkpoint.read(name), tensor.copy()
        if mixed and name.endswith("gate_up_proj"):
            expected[..., 0::2] = original[name][..., 0::2]
        assert (result.shape, result.dtype.name) == (checkpoint.tensors[name].shape, checkpoint.tensors[name].dtype)
        np.testing.assert_array_equal(result, expected.astype(result.dtype), err_msg=name)
        np.testing.assert_array_equal(checkpoint.read(name, 0), result[0])


def test_llama4_without_norms(tmp_path: Path):
    """Maverick's queries and keys have none; a file says who it is by its experts alone."""
    assert open_gguf(tmp_path, moe_gguf("llama4")).config["use_qk_norm"]
    assert not open_gguf(tmp_path, moe_gguf("llama4", {"llama4.expert_count": 128})).config["use_qk_norm"]


def test_layers_that_draft_are_left_out(tmp_path: Path):
    extra = {"blk.2.attn_norm.weight": bf16(ONES), "blk.2.nextn.enorm.weight": bf16(ONES)}
    more = {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    checkpoint = open_gguf(tmp_path, moe_gguf("glm4_moe", more, extra))
    assert checkpoint.config["num_hidden_layers"] == 2
    assert set(checkpoint.tensors) == set(read_tensors(folder("glm4_moe")))
    more["glm4moe.block_count"] = 1
    with pytest.raises(VLLMValidationError, match="nextn_predict_layers leaves no layer"):
        open_gguf(tmp_path, moe_gguf("glm4_moe", more, extra))


def test_a_shared_gate_may_be_a_vector(tmp_path: Path):
    name = "blk.0.ffn_gate_inp_shexp.weight"
    gate = stacked("qwen2_moe")[name]
    checkpoint = open_gguf(tmp_path, moe_gguf("qwen2_moe", extra={name: bf16(gate[0])}))
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.mlp.shared_expert_gate.weight"), gate)


def test_gpt_oss_without_scaled_rope(tmp_path: Path):
    plain = {name: value for name, value in metadata("gpt_oss").items() if ".rope.scaling." not in name}
    tensors = {name: bf16(tensor) for name, tensor in stacked("gpt_oss").items()}
    config = open_gguf(tmp_path, gguf_bytes(plain, tensors)).config
    [rope] = get_family("GptOssForCausalLM").read_config(config).ropes
    assert (rope.rope_type, rope.theta) == ("default", 10000)


@pytest.mark.parametrize(
    ("case", "tensors"),
    [
        ("qwen3_moe", {"blk.0.ffn_up_exps.weight": bf16(ONES)}),
        ("qwen3_moe", {"blk.0.ffn_up_exps.bias": bf16(ONES[None])}),
        ("qwen3_moe", {"blk.0.ffn_gate_exps.weight": (30, (2**40, 0, 32), b"")}),
        ("gpt_oss", {"blk.0.ffn_up_exps.weight": bf16(ONES.reshape(1, 1, 32))}),
        ("gpt_oss", {"blk.0.ffn_down_exps.weight": bf16(ONES)}),
    ],
)
def test_experts_that_do_not_fit_are_left_to_be_reported(tmp_path: Path, case: str, tensors: Mapping[str, Stored]):
    assert set(tensors) <= set(open_gguf(tmp_path, moe_gguf(case, extra=tensors)).tensors)


@pytest.mark.parametrize(
    ("case", "more", "message"),
    [
        ("glm4_moe", {"glm4moe.expert_gating_func": 1}, "expert_gating_func is 1"),
        ("glm4_moe", {"glm4moe.leading_dense_block_count": -1}, r"leading_dense_block_count.*negative"),
        ("qwen3_moe", {"qwen3moe.expert_used_count": 0}, r"expert_used_count.*not positive"),
        ("gpt_oss", {"gpt-oss.attention.sliding_window": "x"}, "sliding_window"),
        ("llama4", {"llama4.attention.sliding_window": 0}, "sliding_window is 0"),
        ("llama4", {"llama4.interleave_moe_layer_step": 0}, r"interleave_moe_layer_step.*not positive"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, case: str, more: Mapping[str, Any], message: str):
    with pytest.raises(VLLMValidationError, match=message):
        open_gguf(tmp_path, moe_gguf(case, more))
