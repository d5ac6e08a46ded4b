"""The tiny checkpoints with states and latents as GGUF files, as llama.cpp's converter names and changes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.loading.files import gguf_bytes, gguf_f32
from tests.models.tiny import read_hf_config, read_tensors

ARCHITECTURES = {
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_next": "qwen3next",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "granite4": "granitehybrid",
    "granite4_dense": "granitehybrid",
    "granite_moe": "granitemoe",
    "nemotron_h": "nemotron_h",
    "nemotron3": "nemotron_h_moe",
    "mamba": "mamba",
    "falcon_mamba": "mamba",
    "mamba2": "mamba2",
    "deepseek_v2": "deepseek2",
    "deepseek_v2_lite": "deepseek2",
    "deepseek_v3": "deepseek2",
    "kimi_k2": "deepseek2",
}
_KINDS = ("gate", "up", "down")
_OF_MIXER = {
    "in_proj": "ssm_in",
    "conv1d": "ssm_conv1d",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "backbone.embeddings": "token_embd",
    "backbone.norm_f": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "norm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "ffn_norm": "ffn_norm",
    **{f"{mixer}.{name}_proj": f"attn_{name}" for mixer in ("self_attn", "mixer") for name in "qkv"},
    **dict.fromkeys(("self_attn.o_proj", "self_attn.out_proj", "mixer.o_proj"), "attn_output"),
    **{f"self_attn.{name}_{norm}": f"attn_{name}_norm" for name in "qk" for norm in ("norm", "layernorm")},
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    **{f"{mixer}.{name}": theirs for mixer in ("mamba", "mixer", "linear_attn") for name, theirs in _OF_MIXER.items()},
    "mixer.x_proj": "ssm_x",
    "mixer.dt_proj": "ssm_dt",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    **{f"conv.{name}": f"shortconv.{name}" for name in ("conv", "in_proj", "out_proj")},
    **{f"mlp.{kind}_proj": f"ffn_{kind}" for kind in _KINDS},
    **{f"mlp.shared_expert{s}.{kind}_proj": f"ffn_{kind}_shexp" for s in ("", "s") for kind in _KINDS},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"feed_forward.w{number}": f"ffn_{kind}" for number, kind in zip((1, 3, 2), _KINDS, strict=True)},
    **dict.fromkeys(("mlp.gate", "feed_forward.gate", "mixer.gate", "block_sparse_moe.router.layer"), "ffn_gate_inp"),
    **dict.fromkeys(("mlp.gate.e_score_correction_bias", "mixer.gate.e_score_correction_bias"), "exp_probs_b.bias"),
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
EXPERTS = {f"{kind}_proj": kind for kind in _KINDS} | {"w1": "gate", "w3": "up", "w2": "down"}
KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "shortconv.l_cache": "conv_L_cache",
}
ROPE_KEYS = {
    "rope.freq_base": "rope_theta",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
}


def hf_config(case: str) -> dict[str, Any]:
    """Return a case's config.json, without what is said of pictures."""
    hf = read_hf_config(case)
    return hf | hf.get("text_config", {}) | {"architectures": hf["architectures"]}


def metadata(case: str) -> dict[str, Any]:
    """Return what llama.cpp's converter writes of a config.json."""
    hf, arch = hf_config(case), ARCHITECTURES[case]
    values = {key: hf[name] for key, name in KEYS.items() if hf.get(name) is not None}
    rope = hf.get("rope_parameters", {})
    values |= {key: rope[name] for key, name in ROPE_KEYS.items() if name in rope}
    count = next((hf[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in hf), None)
    if count is not None:
        values["expert_count"] = count
    if case.startswith("qwen"):
        values |= _delta_metadata(hf)
    elif case.startswith("lfm2"):
        values |= _lfm2_metadata(hf)
    elif case.startswith("granite"):
        values |= _granite_metadata(hf)
    elif case.startswith("nemotron"):
        values |= _nemotron_metadata(hf)
    elif "mamba" in case:
        values |= _mamba_metadata(hf)
    else:
        values |= _deepseek_metadata(hf)
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in values.items()}


def _delta_metadata(hf: Mapping[str, Any]) -> dict[str, Any]:
    values = {
        "ssm.conv_kernel": hf["linear_conv_kernel_dim"],
        "ssm.state_size": hf["linear_key_head_dim"],
        "ssm.group_count": hf["linear_num_key_heads"],
        "ssm.time_step_rank": hf["linear_num_value_heads"],
        "ssm.inner_size": hf["linear_value_head_dim"] * hf["linear_num_value_heads"],
        "full_attention_interval": 4,
        "rope.dimension_count": int(hf["head_dim"] * hf["rope_parameters"]["partial_rotary_factor"]),
        "rope.dimension_sections": [11, 11, 10, 0],
    }
    if "shared_expert_intermediate_size" in hf:
        values["expert_shared_feed_forward_length"] = hf["shared_expert_intermediate_size"]
    return values


def _lfm2_metadata(hf: Mapping[str, Any]) -> dict[str, Any]:
    values = {
        "attention.head_count_kv": _where(hf["layer_types"], "full_attention", hf["num_key_value_heads"]),
        "attention.layer_norm_rms_epsilon": hf["norm_eps"],
    }
    if hf.get("block_auto_adjust_ff_dim"):
        values["feed_forward_length"] = 32  # two thirds of 48
    if "num_dense_layers" in hf:
        # Llama.cpp has no key for the factor of LFM2-MoE; no model has one.
        values |= {"leading_dense_block_count": hf["num_dense_layers"], "expert_gating_func": 2}
        values["expert_weights_scale"] = hf["routed_scaling_factor"]
    return values


def _granite_metadata(hf: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if hf.get("shared_intermediate_size"):
        values["expert_shared_feed_forward_length"] = hf["shared_intermediate_size"]
    if "mamba_n_heads" not in hf:
        return values
    return values | {
        "ssm.conv_kernel": hf["mamba_d_conv"],
        "ssm.state_size": hf["mamba_d_state"],
        "ssm.group_count": hf["mamba_n_groups"],
        "ssm.inner_size": hf["mamba_expand"] * hf["hidden_size"],
        "ssm.time_step_rank": hf["mamba_n_heads"],
        "attention.head_count_kv": _where(hf["layer_types"], "full_attention", hf["num_key_value_heads"]),
        "rope.scaling.finetuned": hf["position_embedding_type"] == "rope",
    }


def _nemotron_metadata(hf: Mapping[str, Any]) -> dict[str, Any]:
    kinds = hf["layers_block_type"]
    values = {
        "block_count": len(kinds),
        "attention.layer_norm_rms_epsilon": hf["layer_norm_epsilon"],
        "attention.head_count_kv": _where(kinds, "full_attention", hf["num_key_value_heads"]),
        "feed_forward_length": _where(kinds, "mlp", hf["intermediate_size"]),
        "ssm.conv_kernel": hf["conv_kernel"],
        "ssm.state_size": hf["ssm_state_size"],
        "ssm.group_count": hf["n_groups"],
        "ssm.inner_size": hf["mamba_num_heads"] * hf["mamba_head_dim"],
        "ssm.time_step_rank": hf["mamba_num_heads"],
        "rope.scaling.finetuned": False,
    }
    if "moe" not in kinds:
        return values
    return values | {
        "feed_forward_length": _where(kinds, "moe", hf["moe_intermediate_size"]),
        "expert_shared_feed_forward_length": hf["moe_shared_expert_intermediate_size"],
        "expert_shared_count": hf["n_shared_experts"],
        "expert_weights_norm": hf["norm_topk_prob"],
        "expert_weights_scale": hf["routed_scaling_factor"],
        "moe_latent_size": hf["moe_latent_size"],
    }


def _mamba_metadata(hf: Mapping[str, Any]) -> dict[str, Any]:
    num_inner = hf["expand"] * hf["hidden_size"]
    values = {
        "context_length": 1 << 20,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": hf["layer_norm_epsilon"],
        "ssm.conv_kernel": hf["conv_kernel"],
        "ssm.state_size": hf["state_size"],
        "ssm.inner_size": num_inner,
    }
    if "n_groups" in hf:
        return values | {"ssm.time_step_rank": num_inner // hf["head_dim"], "ssm.group_count": hf["n_groups"]}
    return values | {"ssm.time_step_rank": hf["time_step_rank"], "ssm.dt_b_c_rms": "mixer_rms_eps" in hf}


def _deepseek_metadata(hf: Mapping[str, Any]) -> dict[str, Any]:
    rank, rope_dim = hf["kv_lora_rank"], hf["qk_rope_head_dim"]
    values = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope_dim,
        "attention.value_length": rank,
        "attention.key_length_mla": hf["qk_nope_head_dim"] + rope_dim,
        "attention.value_length_mla": hf["v_head_dim"],
        "rope.dimension_count": rope_dim,
        "leading_dense_block_count": hf["first_k_dense_replace"],
        "expert_shared_count": hf["n_shared_experts"],
        "expert_weights_scale": hf["routed_scaling_factor"],
        "expert_gating_func": 2 if hf["architectures"] == ["DeepseekV3ForCausalLM"] else 1,
        "rope.scaling.type": "yarn",
    }
    if hf["q_lora_rank"] is not None:
        values["attention.q_lora_rank"] = hf["q_lora_rank"]
    if hf["norm_topk_prob"]:
        values["expert_weights_norm"] = True
    if "mscale_all_dim" in hf["rope_parameters"]:
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * hf["rope_parameters"]["mscale_all_dim"]
    return values


def _where(kinds: list[str], kind: str, number: int) -> list[int]:
    """Return a number for each layer: 0 for those of another kind."""
    return [number if each == kind else 0 for each in kinds]


def hf_tensors(case: str) -> dict[str, np.ndarray]:
    """Return a case's text tensors by the names that HF has without a wrapper."""
    return {
        name.replace("model.language_model.", "model."): tensor.astype(np.float32)
        for name, tensor in read_tensors(case).items()
        if ".visual." not in name
    }


def stored(case: str) -> dict[str, np.ndarray]:
    """Return a case's tensors as the converter stores them."""
    hf, tensors = hf_config(case), dict[str, np.ndarray]()
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in hf_tensors(case).items():
        layer = re.fullmatch(r"(?:model|backbone)\.layers\.(\d+)\.(.*)", name)
        prefix, suffix = (f"blk.{layer[1]}.", layer[2]) if layer else ("", name)
        if expert := re.fullmatch(r".*\.experts\.(\d+)\.(\w+)\.weight", suffix):
            experts.setdefault(f"{prefix}ffn_{EXPERTS[expert[2]]}_exps.weight", {})[int(expert[1])] = tensor
            continue
        for theirs, part in _changed(case, hf, suffix, tensor).items():
            tensors[prefix + theirs] = part
    stacked = {name: np.stack([part[number] for number in range(len(part))]) for name, part in experts.items()}
    return {name: np.ascontiguousarray(tensor) for name, tensor in (tensors | stacked).items()}


def _changed(case: str, hf: Mapping[str, Any], suffix: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Return what the converter makes of a tensor, by name within its layer."""
    stem, _, kind = suffix.rpartition(".")
    is_qwen, is_granite = case.startswith("qwen"), case.startswith("granite")
    if suffix in NAMES:
        if suffix.endswith("A_log"):
            tensor = -np.exp(tensor)
        if is_qwen and case != "qwen3_next":
            tensor = _taking_turns(hf, stem.partition(".")[2], suffix, tensor)
        if not is_qwen and suffix.endswith(("A_log", ".D")) and ARCHITECTURES[case] != "mamba":
            tensor = tensor[:, None]
        return {NAMES[suffix]: tensor}
    if suffix.endswith("input_linear.weight"):
        gate, up = np.split(tensor, 2, axis=-2)
        end = "_exps" if tensor.ndim == 3 else "_shexp" if hf["num_local_experts"] else ""
        return {f"ffn_gate{end}.weight": gate, f"ffn_up{end}.weight": up}
    if suffix == "shared_mlp.output_linear.weight":
        return {"ffn_down_shexp.weight" if hf["num_local_experts"] else "ffn_down.weight": tensor}
    if stem.endswith(("conv1d", "conv.conv")) and kind == "weight":
        tensor = tensor[:, 0]
    if stem in ("mamba.norm", "mixer.norm"):
        tensor = tensor.reshape(hf.get("mamba_n_groups", hf.get("n_groups")), -1)
    if is_granite and stem in ("self_attn.q_proj", "self_attn.k_proj"):
        half = hf["hidden_size"] // hf["num_attention_heads"] // 2
        tensor = tensor.reshape(-1, 2, half, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    if stem == "self_attn.kv_b_proj":
        heads = tensor.reshape(hf["num_attention_heads"], -1, tensor.shape[-1])
        keys, values = np.split(heads, [hf["qk_nope_head_dim"]], axis=1)
        return {"attn_k_b.weight": keys.swapaxes(1, 2), "attn_v_b.weight": values}
    if not is_qwen:
        return {f"{NAMES[stem]}.{kind}": tensor}
    if stem == "post_attention_layernorm":
        return {"post_attention_norm.weight": tensor + 1}
    if stem.endswith("norm") and stem != "linear_attn.norm":
        tensor = tensor + 1
    if stem == "linear_attn.in_proj_qkvz":
        return _split_by_head(hf, tensor)
    if case != "qwen3_next":
        tensor = _taking_turns(hf, stem.partition(".")[2], suffix, tensor)
    return {f"{NAMES[stem]}.{kind}": tensor}


def _split_by_head(hf: Mapping[str, Any], tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Return all queries, keys and values, and the gates, of a matrix that has them by key head."""
    num_keys, width = hf["linear_num_key_heads"], hf["linear_key_head_dim"]
    value_width = hf["linear_value_head_dim"] * hf["linear_num_value_heads"] // num_keys
    heads = tensor.reshape(num_keys, -1, tensor.shape[-1])
    *parts, gates = np.split(heads, np.cumsum([width, width, value_width]), axis=1)
    rows = [part.reshape(-1, tensor.shape[-1]) for part in parts]
    return {"attn_qkv.weight": np.concatenate(rows), "attn_gate.weight": gates.reshape(-1, tensor.shape[-1])}


def _taking_turns(hf: Mapping[str, Any], module: str, suffix: str, tensor: np.ndarray) -> np.ndarray:
    """Return a tensor of a gated delta net with value heads that take turns with the key heads."""
    num_keys, num_values = hf["linear_num_key_heads"], hf["linear_num_value_heads"]

    def turned(part: np.ndarray, size: int) -> np.ndarray:
        heads = part.reshape(num_keys, num_values // num_keys, size, *part.shape[1:])
        return heads.swapaxes(0, 1).reshape(part.shape)

    size = hf["linear_value_head_dim"]
    if module in ("in_proj_qkv", "conv1d"):
        start = 2 * num_keys * hf["linear_key_head_dim"]
        return np.concatenate([tensor[:start], turned(tensor[start:], size)])
    if module == "out_proj":
        return turned(tensor.T, size).T
    if module == "in_proj_z":
        return turned(tensor, size)
    return (
        turned(tensor, 1) if module in ("in_proj_a", "in_proj_b") or suffix.endswith(("A_log", "dt_bias")) else tensor
    )


def layer_gguf(
    case: str, more: Mapping[str, Any] | None = None, extra: Mapping[str, np.ndarray] | None = None
) -> bytes:
    """Return a case as a GGUF file, with some metadata and tensors of its own."""
    return gguf_bytes(metadata(case) | dict(more or {}), gguf_f32(stored(case) | dict(extra or {})))
