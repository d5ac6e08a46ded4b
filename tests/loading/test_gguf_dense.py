"""GGUF files of families near Llama: every tensor and the config are those of the HF checkpoint they were made of."""

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
from tests.loading.files import gguf_bytes, gguf_f32
from tests.models.tiny import read_hf_config, read_tensors

ARCHITECTURES = {
    "seed_oss": "seed_oss",
    "gemma": "gemma",
    "phi": "phi2",
    "stablelm": "stablelm",
    "stablelm_parallel": "stablelm",
    "starcoder2": "starcoder2",
    "glm4": "glm4",
    "exaone4": "exaone4",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "arcee": "arcee",
    "ernie4_5": "ernie4_5",
    "hunyuan": "hunyuan-dense",
    "hunyuan_moe": "hunyuan-moe",
    "granite": "granite",
    "olmoe": "olmoe",
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.dense": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    **{f"mlp.shared_mlp.{kind}_proj": f"ffn_{kind}_shexp" for kind in ("gate", "up", "down")},
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up",
    "mlp.fc1": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.c_proj": "ffn_down",
    "mlp.fc2": "ffn_down",
}
KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "use_parallel_residual": "use_parallel_residual",
}
NOT_IN_FILES: dict[str, dict[str, Any]] = {
    "phi": {"qk_layernorm": False},
    "starcoder2": {"sliding_window": 4096},
    "hunyuan_moe": {
        "moe_topk": 3,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
"""What files do not hold, and the models that people run have."""


def hf_config(case: str) -> dict[str, Any]:
    """Return a case's config.json as a file can say it, with numbers in float32."""
    hf = read_hf_config(case) | NOT_IN_FILES.get(case, {})
    if case == "cohere2":
        hf |= {"layer_types": None, "sliding_window_pattern": 4}
    return {key: float(np.float32(value)) if isinstance(value, float) else value for key, value in hf.items()}


def metadata(case: str) -> dict[str, Any]:
    """Return what llama.cpp's converter writes of a config.json."""
    hf, arch = hf_config(case), ARCHITECTURES[case]
    values = {key: hf[name] for key, name in KEYS.items() if hf.get(name) is not None}
    rope, head_dim = hf["rope_parameters"], hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    values["rope.freq_base"] = rope["rope_theta"] * rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2))
    values["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1))
    epsilon = hf.get("layer_norm_eps") or hf.get("norm_epsilon")
    if epsilon:
        values["attention.layer_norm_epsilon"] = epsilon
    scale = hf.get("logit_scale") or hf.get("logits_scaling")
    if scale:
        values["logit_scale"] = scale
    if case == "exaone4":
        values["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in hf["layer_types"]]
    for key in {"phi": ["attention.key_length"], "starcoder2": ["attention.sliding_window"]}.get(case, []):
        del values[key]
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in values.items()}


def hf_tensors(case: str) -> dict[str, np.ndarray]:
    """Return a case's tensors by HF name, without the norms of q and k that no Phi has."""
    tensors = {name: tensor.astype(np.float32) for name, tensor in read_tensors(case).items()}
    return {name: tensor for name, tensor in tensors.items() if not re.search(r"\.[qk]_layernorm\.", name)}


def stored(case: str) -> dict[str, np.ndarray]:
    """Return a case's tensors as the converter stores them."""
    names = dict(NAMES)
    if case in ("seed_oss", "exaone4"):
        names["post_attention_layernorm"] = "post_attention_norm"
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in hf_tensors(case).items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        prefix, suffix = (f"blk.{layer[1]}.", layer[2]) if layer else ("", name)
        if expert := re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)_proj\.weight", suffix):
            experts.setdefault(f"{prefix}ffn_{expert[2]}_exps.weight", {})[int(expert[1])] = tensor
            continue
        stem, _, kind = suffix.rpartition(".")
        if case == "gemma" and stem.endswith("norm"):
            tensor = tensor + 1
        if case in ("arcee", "granite") and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            hf = hf_config(case)
            half = hf.get("head_dim", hf["hidden_size"] // hf["num_attention_heads"]) // 2
            tensor = tensor.reshape(-1, 2, half, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        tensors[f"{prefix}{names[stem]}.{kind}"] = tensor
    return tensors | {name: np.stack([part[number] for number in range(len(part))]) for name, part in experts.items()}


def open_gguf(path: Path, case: str, more: Mapping[str, Any] | None = None) -> GGUFCheckpoint:
    """Open a case as a GGUF file, with some metadata of its own."""
    (path / "x.gguf").write_bytes(gguf_bytes(metadata(case) | dict(more or {}), gguf_f32(stored(case))))
    return GGUFCheckpoint(path / "x.gguf")


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_config_and_tensors_are_hf(tmp_path: Path, case: str):
    checkpoint, expected, hf = open_gguf(tmp_path, case), hf_tensors(case), hf_config(case)
    assert checkpoint.config["architectures"] == hf["architectures"]
    family = get_family(hf["architectures"][0])
    config = family.read_config(checkpoint.config)
    if case == "hunyuan":  # a file holds the base that `alpha` gives
        theta = metadata(case)["hunyuan-dense.rope.freq_base"]
        hf["rope_parameters"] = {"rope_type": "default", "rope_theta": float(np.float32(theta))}
    assert config == family.read_config(hf)
    check_names(ModelSpecs(config, "float32").param_specs(checkpoint.tensors), checkpoint)
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_allclose(checkpoint.read(name), tensor, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("case", "more", "message"),
    [
        ("glm4", {"glm4.rope.dimension_sections": [4, 2, 2]}, "a GLM that sees"),
        ("granite", {"granite.rope.scaling.finetuned": False}, "without positions"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, case: str, more: Mapping[str, Any], message: str):
    with pytest.raises(VLLMValidationError, match=message):
        open_gguf(tmp_path, case, more)


def test_a_small_exaone_has_no_window(tmp_path: Path):
    (tmp_path / "x.gguf").write_bytes(
        gguf_bytes(
            {key: value for key, value in metadata("exaone4").items() if "sliding_window" not in key},
            gguf_f32(stored("exaone4")),
        )
    )
    config = get_family("Exaone4ForCausalLM").read_config(GGUFCheckpoint(tmp_path / "x.gguf").config)
    assert {(layer.window, layer.rope) for layer in config.layers} == {(None, 0)}
