"""The tiny checkpoints with experts as GGUF files, as llama.cpp's converter names and stacks them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tests.loading.files import gguf_bytes
from tests.loading.mxfp4_files import encode, read_tensors
from tests.models.tiny import folder, read_hf_config

BF16, MXFP4 = 30, 39
Stored = tuple[int, Sequence[int], bytes]

ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
    "llama4": "llama4",
    "ernie4_5_moe": "ernie4_5-moe",
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    **{f"feed_forward.{kind}_proj": f"ffn_{kind}" for kind in ("gate", "up", "down")},
    **{f"feed_forward.shared_expert.{kind}_proj": f"ffn_{kind}_shexp" for kind in ("gate", "up", "down")},
    "feed_forward.router": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert{s}.{kind}_proj": f"ffn_{kind}_shexp" for s in ("", "s") for kind in ("gate", "up", "down")},
}
BARE = {
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
}
EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}


def hf_config(case: str) -> dict[str, Any]:
    """Return a case's config.json, but for what a GGUF file does not say, which is that of the real models."""
    hf = read_hf_config(case)
    if case == "gpt_oss":
        hf["swiglu_limit"] = 7.0
    if case == "llama4":
        hf |= {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
        hf |= {"no_rope_layers": [1, 1, 1, 0], "layer_types": ["chunked_attention"] * 3 + ["full_attention"]}
        hf["rope_parameters"]["original_max_position_embeddings"] = 8192
    return hf


def metadata(case: str) -> dict[str, Any]:
    """Return what the converter writes of a config.json."""
    hf, arch = hf_config(case), ARCHITECTURES[case]
    values = {key: hf[name] for key, name in KEYS.items() if hf.get(name) is not None}
    if case.startswith("qwen"):
        del values["expert_weights_norm"]
    rope = hf["rope_parameters"]
    values["expert_count"] = next(
        hf[key] for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") if key in hf
    )
    values["rope.freq_base"] = rope["rope_theta"]
    values["rope.dimension_count"] = int(
        hf.get("head_dim", hf["hidden_size"] // hf["num_attention_heads"]) * rope.get("partial_rotary_factor", 1)
    )
    if case in ("glm4_moe", "minimax_m2"):
        values["expert_gating_func"] = 2
    if case == "minimax_m2":
        values["expert_feed_forward_length"] = hf["intermediate_size"]
    if case == "llama4":
        values |= {
            "feed_forward_length": hf["intermediate_size_mlp"],
            "expert_feed_forward_length": hf["intermediate_size"],
            "interleave_moe_layer_step": hf["interleave_moe_layer_step"],
        }
    if case == "ernie4_5_moe":
        values |= {
            "expert_used_count": hf["moe_k"],
            "expert_shared_count": hf["moe_num_shared_experts"],
            "leading_dense_block_count": hf["moe_layer_start_index"],
            "interleave_moe_layer_step": hf["moe_layer_interval"],
        }
    if case == "gpt_oss":
        values |= {
            "attention.sliding_window": hf["sliding_window"],
            "expert_feed_forward_length": hf["intermediate_size"],
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        }
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in values.items()}


def stacked(case: str) -> dict[str, np.ndarray]:
    """Return a case's tensors under the converter's names."""
    hf = read_tensors(folder(case))
    post_norm = "post_attention_norm" if case in ("glm4_moe", "gpt_oss") else "ffn_norm"
    names = NAMES | {"post_attention_layernorm": post_norm}
    tensors: dict[str, Any] = {}
    for name, tensor in hf.items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        prefix, suffix = (f"blk.{layer[1]}.", layer[2]) if layer else ("", name)
        expert = re.fullmatch(r".*\.experts\.(\d+)\.(\w+)\.weight", suffix)
        if expert:
            tensors.setdefault(f"{prefix}ffn_{EXPERTS[expert[2]]}_exps.weight", {})[int(expert[1])] = tensor
        elif ".experts." in suffix:
            tensors |= {prefix + theirs: part for theirs, part in fused_experts(case, suffix, tensor).items()}
        elif suffix in BARE:
            tensors[prefix + BARE[suffix]] = tensor
        else:
            stem, _, kind = suffix.rpartition(".")
            if case == "mixtral" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = tensor.reshape(-1, 2, hf_config(case)["head_dim"] // 2, tensor.shape[-1])
                tensor = heads.swapaxes(1, 2).reshape(tensor.shape)
            tensors[f"{prefix}{names[stem]}.{kind}"] = tensor
    if case == "llama4":
        # The wavelengths of 8 frequencies that are longer than 8192 are those of the last alone.
        factors = [1.0] * 7 + [hf_config(case)["rope_parameters"]["factor"]]
        tensors["rope_freqs.weight"] = np.array(factors, ml_dtypes.bfloat16)
    return {
        name: np.stack([part[expert] for expert in range(len(part))]) if isinstance(part, dict) else part
        for name, part in tensors.items()
    }


def fused_experts(case: str, name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Return tensors of all experts, which have inputs last in GGUF, and gates and ups apart."""
    kind = "bias" if name.endswith("_bias") else "weight"
    rows_last = tensor if kind == "bias" else tensor.swapaxes(1, 2)
    if "down_proj" in name:
        return {f"ffn_down_exps.{kind}": rows_last}
    if case == "gpt_oss":
        return {f"ffn_gate_exps.{kind}": rows_last[:, 0::2], f"ffn_up_exps.{kind}": rows_last[:, 1::2]}
    gate, up = np.split(rows_last, 2, axis=1)
    return {f"ffn_gate_exps.{kind}": gate, f"ffn_up_exps.{kind}": up}


def bf16(tensor: np.ndarray) -> Stored:
    return BF16, tensor.shape, tensor.tobytes()


def mxfp4(tensor: np.ndarray) -> Stored:
    """Round a tensor to GGUF's MXFP4: a scale, then the first 16 numbers in low halves and the others in high ones."""
    codes, scales = encode(tensor)
    stored = np.concatenate([scales[..., None], codes[..., :16] | codes[..., 16:] << 4], axis=-1)
    return MXFP4, tensor.shape, stored.tobytes()


def moe_gguf(case: str, more: Mapping[str, Any] | None = None, extra: Mapping[str, Stored] | None = None) -> bytes:
    """Return a case as a GGUF file, with some metadata and tensors of its own."""
    return gguf_bytes(
        metadata(case) | dict(more or {}),
        {name: bf16(tensor) for name, tensor in stacked(case).items()} | dict(extra or {}),
    )
