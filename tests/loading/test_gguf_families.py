"""GGUF files of Gemma 4 and GPT-2: every tensor and the config are those of the HF checkpoint they were made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.gguf.checkpoint import GGUFCheckpoint
from jaxllm.loading.names import check_names
from jaxllm.models import ModelSpecs, get_family
from tests.loading.files import F32, gguf_bytes
from tests.loading.gguf_moe_files import Stored, bf16
from tests.models.tiny import read_hf_config, read_tensors

GEMMA4 = ("gemma4_dense", "gemma4_moe", "gemma4_e2b")
GEMMA4_NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "norm.weight": "output_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
}
GPT2_NAMES = {
    "wte.weight": "token_embd.weight",
    "wpe.weight": "position_embd.weight",
    **{f"ln_f.{kind}": f"output_norm.{kind}" for kind in ("weight", "bias")},
    **{f"ln_1.{kind}": f"attn_norm.{kind}" for kind in ("weight", "bias")},
    **{f"ln_2.{kind}": f"ffn_norm.{kind}" for kind in ("weight", "bias")},
    **{f"attn.c_attn.{kind}": f"attn_qkv.{kind}" for kind in ("weight", "bias")},
    **{f"attn.c_proj.{kind}": f"attn_output.{kind}" for kind in ("weight", "bias")},
    **{f"mlp.c_fc.{kind}": f"ffn_up.{kind}" for kind in ("weight", "bias")},
    **{f"mlp.c_proj.{kind}": f"ffn_down.{kind}" for kind in ("weight", "bias")},
}


def text_config(case: str) -> dict[str, Any]:
    """Return the config.json of a case, of a multimodal one the text part's, as a text model of its own."""
    hf = read_hf_config(case)
    return {"architectures": ["Gemma4ForCausalLM"]} | hf["text_config"] if "text_config" in hf else hf


def text_tensors(case: str) -> dict[str, np.ndarray]:
    """Return a case's tensors by HF name, of a multimodal one the text part's, as a text model has them."""
    names = {name: name.replace("model.language_model.", "model.") for name in read_tensors(case)}
    return {
        ours: tensor
        for (name, ours), tensor in zip(names.items(), read_tensors(case).values(), strict=True)
        if not re.search(r"vision|audio", name)
    }


def converted(case: str) -> dict[str, Stored]:
    """Return a case's tensors as llama.cpp's converter stores them."""
    names = GPT2_NAMES if case == "gpt2" else GEMMA4_NAMES
    tensors = {}
    for name, tensor in text_tensors(case).items():
        layer = re.fullmatch(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.*)", name)
        suffix = layer[2] if layer else name.split(".", 1)[1]
        if case == "gpt2" and re.search(r"c_\w+\.weight$", name):
            tensor = np.ascontiguousarray(tensor.T)
        tensors[(f"blk.{layer[1]}." if layer else "") + names[suffix]] = bf16(tensor)
    if case != "gpt2":
        factors = np.array([1.0] * 4 + [1e30] * 12, np.float32)  # a quarter of a global head of 32
        tensors["rope_freqs.weight"] = F32, factors.shape, factors.tobytes()
    return tensors


def gemma4_metadata(case: str) -> dict[str, Any]:
    """Return what llama.cpp's converter writes of a Gemma 4's config.json."""
    hf = text_config(case)
    layers, borrowers = range(hf["num_hidden_layers"]), hf["num_kv_shared_layers"]
    configs = {int(layer): each for layer, each in hf["per_layer_config"].items()}
    slides = [kind == "sliding_attention" for kind in hf["layer_types"]]
    doubled = [hf["use_double_wide_mlp"] and layer >= len(layers) - borrowers for layer in layers]
    values = {
        "block_count": len(layers),
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "feed_forward_length": [hf["intermediate_size"] * (2 if each else 1) for each in doubled],
        "attention.head_count": hf["num_attention_heads"],
        "attention.head_count_kv": [
            configs.get(layer, {}).get("num_key_value_heads", hf["num_key_value_heads"]) for layer in layers
        ],
        "attention.layer_norm_rms_epsilon": hf["rms_norm_eps"],
        "attention.key_length": next(each["head_dim"] for each in configs.values()),
        "attention.key_length_swa": hf["head_dim"],
        "attention.sliding_window": hf["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "attention.shared_kv_layers": borrowers,
        "embedding_length_per_layer_input": hf["hidden_size_per_layer_input"] or 0,
        "rope.freq_base": hf["rope_parameters"]["full_attention"]["rope_theta"],
        "rope.freq_base_swa": hf["rope_parameters"]["sliding_attention"]["rope_theta"],
    }
    if hf["final_logit_softcapping"] is not None:
        values["final_logit_softcapping"] = hf["final_logit_softcapping"]
    if hf["enable_moe_block"]:
        values |= {
            "expert_count": hf["num_experts"],
            "expert_used_count": hf["top_k_experts"],
            "expert_feed_forward_length": hf["moe_intermediate_size"],
        }
    return {"general.architecture": "gemma4"} | {f"gemma4.{key}": value for key, value in values.items()}


def gpt2_metadata() -> dict[str, Any]:
    """Return what llama.cpp's converter writes of a GPT-2's config.json."""
    hf = text_config("gpt2")
    values = {
        "block_count": hf["n_layer"],
        "context_length": hf["n_positions"],
        "embedding_length": hf["n_embd"],
        "feed_forward_length": 4 * hf["n_embd"],
        "attention.head_count": hf["n_head"],
        "attention.layer_norm_epsilon": hf["layer_norm_epsilon"],
    }
    return {"general.architecture": "gpt2"} | {f"gpt2.{key}": value for key, value in values.items()}


def open_gguf(path: Path, case: str, more: Mapping[str, Any] | None = None, without: str = "") -> GGUFCheckpoint:
    """Open a case as a GGUF file with some metadata of its own, and without one tensor."""
    metadata = gpt2_metadata() if case == "gpt2" else gemma4_metadata(case)
    tensors = {name: stored for name, stored in converted(case).items() if name != without}
    (path / "x.gguf").write_bytes(gguf_bytes(metadata | dict(more or {}), tensors))
    return GGUFCheckpoint(path / "x.gguf")


@pytest.mark.parametrize("case", [*GEMMA4, "gpt2"])
def test_config_and_tensors_are_hf(tmp_path: Path, case: str):
    checkpoint, expected, hf = open_gguf(tmp_path, case), text_tensors(case), text_config(case)
    family = get_family(hf["architectures"][0])
    config = family.read_config(checkpoint.config)
    # A file holds float32, and does not say that scores are divided by the layer's number.
    epsilon = {"rms_norm_eps": 1e-6, "layer_norm_epsilon": 1e-5}
    rounded = {name: float(np.float32(value)) for name, value in epsilon.items() if name in hf}
    assert config == family.read_config(hf | rounded | {"scale_attn_by_inverse_layer_idx": False})
    check_names(ModelSpecs(config, "float32").param_specs(checkpoint.tensors), checkpoint)
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        info, result = checkpoint.tensors[name], checkpoint.read(name)
        assert (info.shape, info.dtype, info.num_bytes) == (tensor.shape, "bfloat16", tensor.nbytes), name
        np.testing.assert_array_equal(result, tensor, err_msg=name)
        np.testing.assert_array_equal(checkpoint.read(name, 0), tensor[0], err_msg=name)


def test_one_number_may_stand_for_all_layers(tmp_path: Path):
    width = text_config("gemma4_moe")["intermediate_size"]
    expected = open_gguf(tmp_path, "gemma4_moe").config
    assert open_gguf(tmp_path, "gemma4_moe", {"gemma4.feed_forward_length": width}).config == expected


@pytest.mark.parametrize(
    ("more", "without", "message"),
    [
        ({}, "rope_freqs.weight", "no rope_freqs.weight"),
        ({"gemma4.feed_forward_length": [32, 32, 64, 32, 32, 64]}, "", "feed_forward_length.*differs between layers"),
        ({"gemma4.attention.head_count_kv": [1, 1]}, "", "head_count_kv.*for each layer"),
        ({"gemma4.attention.sliding_window_pattern": [True]}, "", "sliding_window_pattern.*for each layer"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, more: Mapping[str, Any], without: str, message: str):
    with pytest.raises(VLLMValidationError, match=message):
        open_gguf(tmp_path, "gemma4_e2b", more, without)
