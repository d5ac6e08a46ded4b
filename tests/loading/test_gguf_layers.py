"""GGUF files of models with states and latents: tensors, config and log-probabilities are those of HF."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.gguf.checkpoint import GGUFCheckpoint
from jaxllm.loading.names import check_names
from jaxllm.models import Model, ModelSpecs, get_family
from pallas_kernels.weights import dequantize
from tests.loading.files import Q8_0, gguf_bytes, gguf_f32
from tests.loading.gguf_layer_files import ARCHITECTURES, hf_config, hf_tensors, layer_gguf, metadata, stored
from tests.models.running import Runner, load
from tests.models.tiny import read_goldens

TOLERANCE = 1e-4


def open_gguf(path: Path, data: bytes) -> GGUFCheckpoint:
    (path / "x.gguf").write_bytes(data)
    return GGUFCheckpoint(path / "x.gguf")


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_config_and_tensors_are_hf(tmp_path: Path, case: str):
    checkpoint, hf, expected = open_gguf(tmp_path, layer_gguf(case)), hf_config(case), hf_tensors(case)
    architecture = hf["architectures"][0].replace("ConditionalGeneration", "CausalLM")
    assert checkpoint.config["architectures"] == [architecture]
    family = get_family(architecture)
    if case in ("qwen3_5_moe", "nemotron3"):  # no layer has this width
        hf["intermediate_size"] = hf["moe_intermediate_size"]
    rounded = {key: float(np.float32(value)) if isinstance(value, float) else value for key, value in hf.items()}
    rounded.pop("mixer_rms_eps", None)  # no file has it, and no model another than HF's default
    config = family.read_config(checkpoint.config)
    assert config == family.read_config(rounded)
    check_names(ModelSpecs(config, "float32").param_specs(checkpoint.tensors), checkpoint)
    if case == "qwen3_next":  # a file has the projections of Qwen3.5
        projections = {name for name in expected if name.endswith("in_proj_qkvz.weight")}
        split = {name.replace("qkvz", part) for name in projections for part in ("qkv", "z")}
        assert set(checkpoint.tensors) == set(expected) - projections | split
        expected = {name: tensor for name, tensor in expected.items() if name not in projections}
    else:
        assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        info, result = checkpoint.tensors[name], checkpoint.read(name)
        assert (info.shape, result.shape, info.dtype) == (tensor.shape, tensor.shape, "float32"), name
        np.testing.assert_allclose(result, tensor, rtol=0, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(checkpoint.read(name, len(tensor) - 1), result[-1], err_msg=name)
        checkpoint.release(name)


@pytest.mark.models
@pytest.mark.parametrize("case", ARCHITECTURES)
def test_greedy_decoding_matches_hf(tmp_path: Path, case: str):
    checkpoint = open_gguf(tmp_path, layer_gguf(case))
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    config = get_family(checkpoint.config["architectures"][0]).read_config(checkpoint.config, tensors)
    model = Model(ModelSpecs(config, jnp.float32))
    golden = read_goldens(case)[0]
    logprobs, tokens = Runner(model, load(model, tensors)).incremental(golden, 64)
    np.testing.assert_array_equal(tokens, golden.tokens)
    np.testing.assert_allclose(logprobs, golden.logprobs, rtol=0, atol=TOLERANCE)


def test_layers_that_draft_are_left_out(tmp_path: Path):
    extra = {"blk.4.attn_norm.weight": np.ones(32), "blk.4.nextn.eh_proj.weight": np.ones((32, 64))}
    more = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    checkpoint = open_gguf(tmp_path, layer_gguf("qwen3_5", more, extra))
    assert checkpoint.config["num_hidden_layers"] == 4
    assert set(checkpoint.tensors) == set(hf_tensors("qwen3_5"))


def test_deepseek_from_before_latents(tmp_path: Path):
    """Older files have keys and values of all heads as one matrix, and a head's sizes under the common keys."""
    old = {name: tensor for name, tensor in stored("deepseek_v2_lite").items() if "_b.weight" not in name}
    old |= {
        f"blk.{layer}.attn_kv_b.weight": hf_tensors("deepseek_v2_lite")[
            f"model.layers.{layer}.self_attn.kv_b_proj.weight"
        ]
        for layer in (0, 1)
    }
    keys = {key: value for key, value in metadata("deepseek_v2_lite").items() if not key.endswith("_mla")}
    del keys["deepseek2.expert_gating_func"]
    keys |= {"deepseek2.attention.key_length": 32, "deepseek2.attention.value_length": 32}
    checkpoint = open_gguf(tmp_path, gguf_bytes(keys, gguf_f32(old)))
    config = get_family("DeepseekV2ForCausalLM").read_config(checkpoint.config)
    hf = hf_config("deepseek_v2_lite")
    assert config == get_family("DeepseekV2ForCausalLM").read_config(hf | {"rms_norm_eps": float(np.float32(1e-6))})
    assert set(checkpoint.tensors) == set(hf_tensors("deepseek_v2_lite"))
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    np.testing.assert_array_equal(checkpoint.read(name), hf_tensors("deepseek_v2_lite")[name])


WIDENED = {
    "qwen3_5": ["linear_attn.out_proj.weight"],
    "qwen3_next": [],
    "lfm2_moe": [],
    "granite4": [],
    "deepseek_v3": ["self_attn.kv_b_proj.weight"],
}
"""Matrices that cannot be kept as they are stored, by name within a layer."""


@pytest.mark.parametrize("case", WIDENED)
def test_quantized_matrices_are_kept_in_hf_s_order(tmp_path: Path, case: str):
    rng, tensors = np.random.default_rng(), gguf_f32(stored(case))
    for name, tensor in stored(case).items():
        if tensor.ndim > 1 and tensor.shape[-1] % 32 == 0 and "norm" not in name:
            blocks = np.zeros((tensor.size // 32, 34), np.uint8)
            blocks[:, :2] = rng.uniform(0.01, 0.1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
            blocks[:, 2:] = rng.integers(0, 256, (len(blocks), 32))
            tensors[name] = (Q8_0, tensor.shape, blocks.tobytes())
    checkpoint = open_gguf(tmp_path, gguf_bytes(metadata(case), tensors))
    kept = 0
    for name, info in checkpoint.tensors.items():
        form, numbers = checkpoint.format_of(name), checkpoint.read(name)
        assert numbers.shape == info.shape
        if form is None:
            is_small = numbers.ndim < 2 or numbers.shape[-1] % 32 or "norm" in name
            assert is_small or any(name.endswith(suffix) for suffix in WIDENED[case]), name
            continue
        kept += 1
        parts = {part: checkpoint.read_part(name, part) for part in form.parts}
        np.testing.assert_array_equal(dequantize(parts, form), numbers, err_msg=name)
    assert kept > 5


@pytest.mark.parametrize(
    ("case", "more", "message"),
    [
        ("qwen3_5", {"ssm.time_step_rank": 3}, r"ssm\.inner_size is 64, not a multiple of ssm\.time_step_rank, 3"),
        ("qwen3_5", {"ssm.group_count": 3}, r"ssm\.time_step_rank is 4, not a multiple of ssm\.group_count, 3"),
        ("qwen3_5", {"ssm.state_size": 8}, r"blk\.0\.\w+\.weight: its shape \(128, \d+\) does not fit 2 key heads"),
        ("lfm2", {"attention.head_count_kv": [0, 0]}, r"lfm2\.attention\.head_count_kv.*no positive integer"),
        ("deepseek_v3", {"expert_gating_func": 3}, "expert_gating_func is 3"),
        ("deepseek_v3", {"rope.dimension_count": 32}, "a key has 32 numbers and rope.dimension_count is 32"),
        ("granite4", {"attention.head_count": 64}, r"blk\.2\.attn_q\.weight: 32 rows are not 64 heads"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, case: str, more: Mapping[str, Any], message: str):
    keys = {f"{ARCHITECTURES[case]}.{key}": value for key, value in more.items()}
    with pytest.raises(VLLMValidationError, match=message):
        open_gguf(tmp_path, layer_gguf(case, keys))
