"""Draw random configurations of each family, and write HF Transformers' outputs with random weights.

    PYTHON scripts/make.py random_configs OUT [--families llama qwen3 ...] [--count 20] [--seed 0]

PYTHON is that of an environment with torch and transformers 5.23; `scripts/check.py configs` runs this with it. Each
case is one JSON file: config.json, the shapes of the tensors, and log-probabilities in float32 of some tokens at each
position of a prompt and of greedy decodes. The weights are made of names, shapes and a seed: see
tests/models/random_weights.py.

A configuration is drawn again if HF refuses it or fails, or if HF's cached decodes differ from its uncached outputs.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.models.random_weights import draw_weights

NUM_DECODES = 6
NUM_SHOWN = 12
"""The number of tokens with a saved log-probability at each position."""
MAX_DOUBT = 3e-5
MAX_DRAWS = 30
ACTS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")

Draw = dict[str, Any]  # HF's Python may be older than ours


class Dice:
    """A source of choices."""

    def __init__(self, seed: list[int]) -> None:
        self.rng = np.random.default_rng(seed)

    def of(self, *choices: Any) -> Any:
        """Return one of the choices."""
        return choices[int(self.rng.integers(len(choices)))]

    def maybe(self, chance: float = 0.5) -> bool:
        """Return True with this chance."""
        return bool(self.rng.random() < chance)

    def int(self, low: int, high: int) -> int:
        """Return a number from `low` to `high`."""
        return int(self.rng.integers(low, high + 1))

    def number(self, low: float, high: float) -> float:
        """Return a number between two, with four digits."""
        return round(float(self.rng.uniform(low, high)), 4)

    def some(self, values: Draw, chance: float = 0.5) -> Draw:
        """Return each of the values with this chance."""
        return {name: value for name, value in values.items() if self.maybe(chance)}


class Kind(NamedTuple):
    """A family: HF's model class and config class, and how to draw a config."""

    model: str
    config: str
    draw: Callable[[Dice], Draw]
    is_plain: bool = True
    """Its checkpoints may have an output head that the config does not mention."""


def sizes(dice: Dice, *, has_head_dim: bool = True, max_positions: tuple[int, ...] = (64, 128, 256)) -> Draw:
    """Return the sizes that most decoders have."""
    num_kv_heads, head_dim = dice.of(1, 1, 2, 3), dice.of(8, 16, 16, 24, 32)
    num_heads = num_kv_heads * dice.of(1, 2, 2, 3, 4)
    drawn: Draw = {
        "vocab_size": dice.of(96, 128, 131),
        "hidden_size": dice.of(32, 48, 64) if has_head_dim else num_heads * head_dim,
        "intermediate_size": dice.of(24, 48, 64, 80),
        "num_hidden_layers": dice.int(1, 4),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": dice.of(*max_positions),
        "rms_norm_eps": dice.of(1e-6, 1e-5, 1e-3),
        "tie_word_embeddings": dice.maybe(0.4),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return drawn | ({"head_dim": head_dim} if has_head_dim else {})


def rope(dice: Dice, kinds: tuple[str, ...] = ("default", "linear", "yarn", "llama3"), **more: Any) -> Draw:
    """Return RoPE parameters of one of some kinds."""
    kind = dice.of("default", *kinds)
    parameters: Draw = {"rope_type": kind, "rope_theta": dice.of(100.0, 10_000.0, 1_000_000.0)}
    trained = {"original_max_position_embeddings": dice.of(16, 32, 64)}
    if kind != "default":
        parameters["factor"] = dice.of(1.5, 2.0, 4.0, 8.0)
    if kind == "yarn":
        parameters |= trained | dice.some({"attention_factor": dice.number(0.7, 1.4)}, 0.3)
        parameters |= dice.some({"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}, 0.4)
        parameters |= {"mscale": 0.7, "mscale_all_dim": 1.0} if dice.maybe(0.3) else {}
    if kind == "llama3":
        parameters |= trained | {"low_freq_factor": 1.0, "high_freq_factor": dice.of(2.0, 4.0)}
    return {"rope_parameters": parameters | more}


def act(dice: Dice, name: str = "hidden_act") -> Draw:
    """Return an activation, most often the usual one."""
    return {name: dice.of("silu", "silu", *ACTS)}


def biases(dice: Dice, *names: str) -> Draw:
    """Return truth values for some names."""
    return {name: dice.maybe(0.4) for name in names}


def types(dice: Dice, count: int, *kinds: str) -> list[str]:
    """Return a random kind of layer for each."""
    return [dice.of(*kinds) for _ in range(count)]


def windows(dice: Dice, drawn: Draw, *, always: bool = False) -> Draw:
    """Return types of layers with a window and without."""
    kinds = "sliding_attention", "full_attention"
    chosen = {"layer_types": types(dice, drawn["num_hidden_layers"], *kinds), "sliding_window": dice.of(3, 16, 24)}
    return chosen if always or dice.maybe() else {"sliding_window": None}


def llama(dice: Dice) -> Draw:
    """Return a Llama config; RoPE ignores `partial_rotary_factor`."""
    drawn = sizes(dice) | rope(dice) | act(dice) | biases(dice, "attention_bias", "mlp_bias")
    if drawn["rope_parameters"]["rope_type"] == "default" and dice.maybe(0.2):
        drawn["rope_parameters"]["partial_rotary_factor"] = 0.5
    return drawn


def mistral(dice: Dice) -> Draw:
    """Return a Mistral config."""
    return sizes(dice) | rope(dice) | act(dice) | {"sliding_window": dice.of(None, 5, 24)}


def ministral3(dice: Dice) -> Draw:
    """Return a Ministral 3 config."""
    beta = {"llama_4_scaling_beta": dice.of(0.1, 0.5)}
    drawn = rope(dice, ("yarn",) * 3)
    drawn["rope_parameters"] = {"original_max_position_embeddings": 16} | drawn["rope_parameters"] | beta
    return sizes(dice) | drawn | act(dice) | {"sliding_window": dice.of(None, 24)}


def qwen2(dice: Dice) -> Draw:
    """Return a Qwen2 config, with windows by number or by type."""
    drawn = sizes(dice, has_head_dim=False) | rope(dice) | act(dice)
    if dice.maybe():
        return drawn | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": dice.int(0, 3)}
    return drawn


def qwen3(dice: Dice) -> Draw:
    """Return a Qwen3 config."""
    drawn = sizes(dice) | rope(dice) | act(dice) | biases(dice, "attention_bias")
    return drawn | ({"use_sliding_window": True} | windows(dice, drawn, always=True) if dice.maybe() else {})


def experts(dice: Dice, count: str, width: str | None = "moe_intermediate_size") -> Draw:
    """Return the number of experts, how many a token takes, and their width."""
    number = dice.of(1, 4, 6, 8)
    chosen = {count: number, "num_experts_per_tok": min(number, dice.int(1, 3))}
    return chosen | ({width: dice.of(8, 16, 24)} if width else {})


def mixtral(dice: Dice) -> Draw:
    """Return a Mixtral config."""
    window = {"sliding_window": dice.of(None, 24)}
    return sizes(dice) | rope(dice) | act(dice) | experts(dice, "num_local_experts", None) | window


def qwen2_moe(dice: Dice) -> Draw:
    """Return a Qwen2-MoE config."""
    drawn = sizes(dice, has_head_dim=False) | rope(dice) | act(dice) | experts(dice, "num_experts")
    drawn |= biases(dice, "qkv_bias", "norm_topk_prob") | {"shared_expert_intermediate_size": dice.of(16, 40)}
    return drawn | dice.some({"mlp_only_layers": [0], "decoder_sparse_step": 2})


def qwen3_moe(dice: Dice) -> Draw:
    """Return a Qwen3-MoE config."""
    drawn = sizes(dice) | rope(dice) | act(dice) | experts(dice, "num_experts")
    drawn |= biases(dice, "attention_bias", "norm_topk_prob") | dice.some({"mlp_only_layers": [0]}, 0.3)
    return drawn | ({"use_sliding_window": True, "sliding_window": 16} if dice.maybe(0.3) else {})


def minimax_m2(dice: Dice) -> Draw:
    """Return a MiniMax M2 config."""
    part = {"partial_rotary_factor": dice.of(0.5, 1.0)}
    return sizes(dice) | rope(dice, ("default",), **part) | act(dice) | experts(dice, "num_local_experts", None)


def gpt_oss(dice: Dice) -> Draw:
    """Return a gpt-oss config."""
    drawn = sizes(dice) | rope(dice, ("yarn",) * 3) | experts(dice, "num_local_experts", None)
    return (
        drawn
        | {"attention_bias": dice.maybe(0.8), "swiglu_limit": dice.of(1.5, 7.0)}
        | windows(dice, drawn, always=True)
    )


def groups(dice: Dice) -> Draw:
    """Return experts in groups, with shared ones."""
    number = dice.of(4, 8)
    num_groups = dice.of(1, 2)
    return {
        "n_routed_experts": number,
        "num_experts_per_tok": dice.int(1, 2),
        "moe_intermediate_size": dice.of(8, 16),
        "n_shared_experts": dice.int(1, 2),
        "n_group": num_groups,
        "topk_group": dice.int(1, num_groups),
        "routed_scaling_factor": dice.of(1.0, 1.5),
        "norm_topk_prob": dice.maybe(),
    }


def glm4_moe(dice: Dice) -> Draw:
    """Return a GLM-4.5 config."""
    drawn = sizes(dice) | rope(dice, ("default",), partial_rotary_factor=dice.of(0.5, 1.0)) | act(dice) | groups(dice)
    return drawn | biases(dice, "attention_bias", "use_qk_norm") | {"first_k_dense_replace": dice.int(0, 2)}


def latent(dice: Dice) -> Draw:
    """Return a config with attention over latents."""
    drawn = sizes(dice, has_head_dim=False)
    drawn |= {"num_key_value_heads": drawn["num_attention_heads"], "kv_lora_rank": dice.of(16, 32)}
    drawn |= {"qk_nope_head_dim": dice.of(8, 16), "qk_rope_head_dim": dice.of(8, 16), "v_head_dim": dice.of(8, 16, 24)}
    return drawn | act(dice) | groups(dice) | {"q_lora_rank": dice.of(16, 24), "first_k_dense_replace": dice.int(0, 1)}


def deepseek_v2(dice: Dice) -> Draw:
    """Return a DeepSeek-V2 config."""
    drawn = latent(dice) | rope(dice, ("yarn", "yarn")) | biases(dice, "attention_bias")
    method = {"topk_method": "greedy" if drawn["n_group"] == 1 else "group_limited_greedy"}
    # HF ignores norm_topk_prob, which jaxllm refuses.
    return drawn | method | {"norm_topk_prob": False} | dice.some({"q_lora_rank": None})


def deepseek_v3(dice: Dice) -> Draw:
    """Return a DeepSeek-V3 config."""
    return latent(dice) | rope(dice, ("yarn", "yarn")) | biases(dice, "attention_bias", "rope_interleave")


def mistral4(dice: Dice) -> Draw:
    """Return a Mistral 4 config."""
    drawn = rope(dice, ("yarn",) * 3)
    parameters = {"original_max_position_embeddings": 16} | drawn["rope_parameters"]
    return latent(dice) | {"rope_parameters": parameters | {"llama_4_scaling_beta": 0.3}}


def delta(dice: Dice) -> Draw:
    """Return the sizes of a hybrid with gated delta nets."""
    num_key_heads = dice.of(1, 2)
    drawn = sizes(dice) | rope(dice, ("default",), partial_rotary_factor=dice.of(0.25, 0.5, 1.0)) | act(dice)
    kinds = types(dice, drawn["num_hidden_layers"], "linear_attention", "full_attention")
    drawn |= {"head_dim": dice.of(16, 32), "layer_types": [*kinds, "linear_attention", "full_attention"]}
    return drawn | {
        "num_hidden_layers": len(kinds) + 2,
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_key_heads * dice.of(1, 2, 3),
        "linear_key_head_dim": dice.of(8, 16),
        "linear_value_head_dim": dice.of(8, 16, 24),
        "linear_conv_kernel_dim": dice.of(2, 4),
    }


def qwen3_next(dice: Dice) -> Draw:
    """Return a Qwen3-Next config."""
    drawn = delta(dice) | experts(dice, "num_experts") | {"shared_expert_intermediate_size": dice.of(16, 24)}
    return drawn | dice.some({"mlp_only_layers": [0], "decoder_sparse_step": 2}, 0.3) | biases(dice, "norm_topk_prob")


def qwen3_5_moe(dice: Dice) -> Draw:
    """Return a Qwen3.5 config with experts."""
    drawn = delta(dice) | experts(dice, "num_experts") | {"shared_expert_intermediate_size": dice.of(16, 24)}
    del drawn["intermediate_size"]
    return drawn


def lfm2(dice: Dice) -> Draw:
    """Return an LFM2 config."""
    drawn = sizes(dice, has_head_dim=False) | rope(dice, ("linear", "yarn"))
    count = drawn.pop("num_hidden_layers")
    drawn |= {"layer_types": [*types(dice, count, "conv", "full_attention"), "conv", "full_attention"]}
    drawn |= {"norm_eps": drawn.pop("rms_norm_eps"), "num_hidden_layers": count + 2, "conv_L_cache": dice.of(2, 3, 4)}
    return drawn | biases(dice, "conv_bias", "block_auto_adjust_ff_dim") | {"block_multiple_of": 8}


def lfm2_moe(dice: Dice) -> Draw:
    """Return an LFM2 config with experts."""
    drawn = lfm2(dice) | experts(dice, "num_experts") | biases(dice, "norm_topk_prob", "use_expert_bias")
    del drawn["block_auto_adjust_ff_dim"], drawn["block_multiple_of"]
    return drawn | {"num_dense_layers": dice.int(0, 2), "routed_scaling_factor": dice.of(1.0, 1.5)}


def granite(dice: Dice) -> Draw:
    """Return a Granite 4 config."""
    drawn = sizes(dice, has_head_dim=False) | rope(dice, ("default",))
    count = drawn["num_hidden_layers"]
    has_experts = dice.maybe()
    return drawn | {
        "layer_types": [*types(dice, count, "linear_attention", "full_attention"), "full_attention"],
        "num_hidden_layers": count + 1,
        "mamba_n_heads": dice.of(2, 4),
        "mamba_d_head": "auto",
        "mamba_n_groups": dice.of(1, 2),
        "mamba_d_state": dice.of(8, 16),
        "mamba_d_conv": dice.of(2, 4),
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
        "shared_intermediate_size": dice.of(16, 24),
        "num_local_experts": dice.of(4, 6) if has_experts else 0,
        "num_experts_per_tok": 2 if has_experts else 0,
        "position_embedding_type": dice.of("rope", None),
        **factors(dice),
        **biases(dice, "attention_bias", "mamba_proj_bias", "mamba_conv_bias"),
    }


def nemotron_h(dice: Dice) -> Draw:
    """Return a Nemotron-H config."""
    drawn = sizes(dice)
    del drawn["num_hidden_layers"]
    kinds = types(dice, dice.int(1, 4), "linear_attention", "mlp", "moe", "full_attention")
    with_bias = biases(dice, "use_bias", "use_conv_bias") | ({} if "moe" in kinds else biases(dice, "mlp_bias"))
    return drawn | {
        "layers_block_type": [*kinds, "linear_attention", "full_attention"],
        "layer_norm_epsilon": drawn.pop("rms_norm_eps"),
        "mamba_num_heads": 4,
        "mamba_head_dim": dice.of(8, 16),
        "n_groups": dice.of(1, 2, 4),
        "ssm_state_size": dice.of(8, 16),
        "conv_kernel": dice.of(2, 4),
        "chunk_size": 16,
        "time_step_min": 1e-9,
        "moe_shared_expert_intermediate_size": dice.of(16, 24),
        "moe_latent_size": dice.of(None, 24),
        **{name: value for name, value in groups(dice).items() if name != "n_shared_experts"},
        "n_shared_experts": 1,
        "mlp_hidden_act": dice.of("relu2", "relu2", "silu"),
        **with_bias,
    }


def smollm3(dice: Dice) -> Draw:
    """Return a SmolLM3 config."""
    drawn = sizes(dice, has_head_dim=False) | rope(dice) | act(dice) | biases(dice, "attention_bias", "mlp_bias")
    return (
        drawn
        | {"no_rope_layer_interval": dice.of(2, 3, 4)}
        | dice.some({"use_sliding_window": True, "sliding_window": 24}, 0.0)
    )


def phi3(dice: Dice) -> Draw:
    """Return a Phi-3 config; prompts are within the length it was trained for."""
    drawn = sizes(dice, has_head_dim=False) | act(dice) | {"sliding_window": dice.of(None, 24)}
    part = dice.of(0.5, 1.0)
    drawn |= {"partial_rotary_factor": part, "original_max_position_embeddings": 128, "max_position_embeddings": 256}
    count = int(drawn["hidden_size"] // drawn["num_attention_heads"] * part) // 2
    factors = {name: [dice.number(1, 2) for _ in range(count)] for name in ("short_factor", "long_factor")}
    kind = dice.of("default", "longrope")
    parameters = {"rope_type": kind, "rope_theta": 10_000.0, "partial_rotary_factor": part}
    return drawn | {"rope_parameters": parameters | (factors if kind == "longrope" else {})}


def olmo2(dice: Dice) -> Draw:
    """Return an OLMo 2 config."""
    return sizes(dice, has_head_dim=False) | rope(dice) | act(dice) | biases(dice, "attention_bias")


def olmo3(dice: Dice) -> Draw:
    """Return an OLMo 3 config."""
    drawn = sizes(dice, has_head_dim=False) | act(dice) | biases(dice, "attention_bias")
    scaled, plain = rope(dice, ("yarn", "linear"))["rope_parameters"], rope(dice, ())["rope_parameters"]
    scaled.pop("truncate", None)  # jaxllm refuses what HF ignores
    tables = {"rope_parameters": {"full_attention": scaled, "sliding_attention": plain}}
    return drawn | windows(dice, drawn, always=True) | tables


def gemma2(dice: Dice) -> Draw:
    """Return a Gemma 2 config."""
    drawn = sizes(dice) | rope(dice, ("linear",)) | biases(dice, "attention_bias")
    drawn |= {"hidden_activation": dice.of("gelu_pytorch_tanh", "gelu_pytorch_tanh", "silu")}
    caps = {"attn_logit_softcapping": dice.of(None, 2.0, 50.0), "final_logit_softcapping": dice.of(None, 5.0)}
    return drawn | caps | windows(dice, drawn, always=True) | {"query_pre_attn_scalar": dice.of(8, 16, 32)}


def gemma3(dice: Dice) -> Draw:
    """Return a Gemma 3 config."""
    drawn = gemma2(dice)
    return drawn | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": dice.of(1.0, 8.0), "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": dice.of(100.0, 10_000.0)},
        }
    }


def gemma4(dice: Dice) -> Draw:
    """Return a Gemma 4 config."""
    drawn = sizes(dice) | biases(dice, "attention_bias", "attention_k_eq_v")
    count = drawn["num_hidden_layers"]
    drawn |= {
        "layer_types": [
            *types(dice, count, "sliding_attention", "full_attention"),
            "sliding_attention",
            "full_attention",
        ],
        "num_hidden_layers": count + 2,
        "sliding_window": dice.of(16, 24),
        "head_dim": dice.of(8, 16),
        "global_head_dim": dice.of(16, 32),
        "final_logit_softcapping": dice.of(None, 5.0),
        "hidden_size_per_layer_input": dice.of(0, 8),
        "vocab_size_per_layer_input": drawn["vocab_size"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": dice.of(0.25, 0.5),
                "rope_theta": 100.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }
    if dice.maybe(0.3):
        drawn |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    if dice.maybe(0.2):
        drawn |= {"per_layer_config": {}}
    return drawn | dice.some({"num_global_key_value_heads": 1}, 0.5)


def llama4(dice: Dice) -> Draw:
    """Return a Llama 4 config."""
    drawn = sizes(dice) | rope(dice, ("llama3", "yarn")) | act(dice) | biases(dice, "attention_bias", "use_qk_norm")
    return drawn | {
        "attention_chunk_size": dice.of(16, 32),
        "no_rope_layer_interval": dice.of(2, 3, 4),
        "floor_scale": 16,
        "attn_scale": dice.of(0.1, 0.5),
        "num_local_experts": dice.of(1, 4, 6),
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": dice.of(24, 48),
        "interleave_moe_layer_step": dice.int(1, 2),
        "attn_temperature_tuning": dice.maybe(0.7),
    }


def opt(dice: Dice) -> Draw:
    """Return an OPT config."""
    drawn = sizes(dice, has_head_dim=False)
    drawn |= {"ffn_dim": drawn.pop("intermediate_size"), "do_layer_norm_before": dice.maybe(0.7)}
    del drawn["num_key_value_heads"], drawn["rms_norm_eps"]
    drawn |= {"word_embed_proj_dim": dice.of(drawn["hidden_size"], 24), "activation_function": dice.of("relu", "gelu")}
    return drawn | {"enable_bias": True, "layer_norm_elementwise_affine": True}


def gpt2(dice: Dice) -> Draw:
    """Return a GPT-2 config."""
    num_heads = dice.of(1, 2, 3)
    drawn = {"vocab_size": 128, "n_embd": num_heads * dice.of(8, 16), "n_layer": dice.int(1, 3), "n_head": num_heads}
    drawn |= {"n_positions": 128, "n_inner": dice.of(None, 40), "activation_function": dice.of("gelu_new", "relu")}
    drawn |= {"bos_token_id": 1, "eos_token_id": 2, "layer_norm_epsilon": dice.of(1e-5, 1e-3)}
    return drawn | biases(dice, "scale_attn_by_inverse_layer_idx", "tie_word_embeddings")


def seed_oss(dice: Dice) -> Draw:
    """Return a Seed-OSS config."""
    return sizes(dice) | rope(dice) | act(dice) | biases(dice, "attention_bias", "attention_out_bias", "mlp_bias")


def gemma(dice: Dice) -> Draw:
    """Return a Gemma 1 config."""
    chosen = {"hidden_act": dice.of("gelu_pytorch_tanh", "gelu", "silu")}
    return sizes(dice) | rope(dice, ("linear",)) | biases(dice, "attention_bias") | chosen


def layer_normed(dice: Dice, epsilon: str = "layer_norm_eps") -> Draw:
    """Return a config of a decoder with LayerNorms."""
    drawn = sizes(dice, has_head_dim=False) | act(dice)
    return drawn | {epsilon: drawn.pop("rms_norm_eps")}


def part(dice: Dice) -> Draw:
    """Return RoPE on a part of a head."""
    return rope(dice, partial_rotary_factor=dice.of(0.25, 0.5, 1.0))


def phi(dice: Dice) -> Draw:
    """Return a Phi-2 config."""
    return layer_normed(dice) | part(dice) | biases(dice, "qk_layernorm") | {"tie_word_embeddings": False}


def stablelm(dice: Dice) -> Draw:
    """Return a StableLM config."""
    return layer_normed(dice) | part(dice) | biases(dice, "use_qkv_bias", "use_parallel_residual")


def gpt_neox(dice: Dice) -> Draw:
    """Return a GPT-NeoX config."""
    drawn = layer_normed(dice) | part(dice) | biases(dice, "use_parallel_residual", "attention_bias")
    del drawn["num_key_value_heads"]
    return drawn


def starcoder2(dice: Dice) -> Draw:
    """Return a StarCoder 2 config."""
    window = {"sliding_window": dice.of(None, 5, 24)}
    return layer_normed(dice, "norm_epsilon") | rope(dice) | biases(dice, "use_bias") | window


def glm4(dice: Dice) -> Draw:
    """Return a GLM-4 config, of 2024 or of 2025."""
    return sizes(dice) | part(dice) | act(dice) | biases(dice, "attention_bias")


def exaone4(dice: Dice) -> Draw:
    """Return an EXAONE 4 config."""
    drawn = sizes(dice) | rope(dice) | act(dice)
    return drawn | {"layer_types": ["full_attention"] * drawn["num_hidden_layers"]} | windows(dice, drawn)


def cohere(dice: Dice) -> Draw:
    """Return a Command R config."""
    return layer_normed(dice) | rope(dice) | biases(dice, "attention_bias", "use_qk_norm") | logit_scale(dice)


def cohere2(dice: Dice) -> Draw:
    """Return a Command R7B config."""
    drawn = layer_normed(dice) | rope(dice) | biases(dice, "attention_bias") | logit_scale(dice)
    return drawn | windows(dice, drawn, always=True)


def logit_scale(dice: Dice) -> Draw:
    """Return Cohere's factor on logits."""
    return {"logit_scale": dice.number(0.05, 1)}


def apertus(dice: Dice) -> Draw:
    """Return an Apertus config."""
    return sizes(dice) | rope(dice) | biases(dice, "attention_bias")


def arcee(dice: Dice) -> Draw:
    """Return an AFM config."""
    chosen = {"hidden_act": dice.of("relu2", "relu2", "silu")}
    return sizes(dice) | rope(dice) | biases(dice, "attention_bias", "mlp_bias") | chosen


def olmoe(dice: Dice) -> Draw:
    """Return an OLMoE config."""
    drawn = sizes(dice, has_head_dim=False) | rope(dice) | act(dice) | experts(dice, "num_experts", None)
    return drawn | biases(dice, "attention_bias", "norm_topk_prob")


def ernie4_5(dice: Dice) -> Draw:
    """Return an ERNIE 4.5 config."""
    return sizes(dice) | rope(dice) | act(dice) | biases(dice, "use_bias")


def ernie4_5_moe(dice: Dice) -> Draw:
    """Return the config of an ERNIE 4.5 with experts."""
    drawn, number = sizes(dice, has_head_dim=False) | rope(dice) | act(dice), dice.of(4, 6, 8)
    return drawn | {
        "moe_num_experts": number,
        "moe_k": dice.int(1, 3),
        "moe_intermediate_size": dice.of(8, 16),
        "moe_num_shared_experts": dice.int(0, 2),
        "moe_layer_start_index": dice.int(0, 2),
        "moe_layer_end_index": dice.of(-1, 1),
        "moe_layer_interval": dice.of(1, 1, 2),
    }


def hunyuan(dice: Dice) -> Draw:
    """Return a HunYuan config."""
    drawn = sizes(dice) | rope(dice) | act(dice) | biases(dice, "attention_bias")
    if dice.maybe():
        scaled = {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": dice.of(50.0, 1000.0), "factor": 1.0}
        drawn["rope_parameters"] = scaled
    return drawn


def hunyuan_moe(dice: Dice) -> Draw:
    """Return the config of a HunYuan with experts."""
    drawn, number = hunyuan(dice), dice.of(4, 6, 8)
    top_k = [dice.int(1, 3) for _ in range(drawn["num_hidden_layers"])]
    return drawn | {"num_experts": number, "moe_topk": dice.of(2, top_k)}


def afmoe(dice: Dice) -> Draw:
    """Return an AFMoE config."""
    drawn = sizes(dice) | rope(dice) | act(dice) | experts(dice, "num_experts")
    return (
        drawn
        | windows(dice, drawn, always=True)
        | {
            "num_dense_layers": dice.int(0, 2),
            "num_shared_experts": dice.int(1, 2),
            "route_scale": dice.of(1.0, 2.5),
            **biases(dice, "mup_enabled"),
        }
    )


def granite3(dice: Dice) -> Draw:
    """Return a Granite 3 config."""
    drawn = sizes(dice, has_head_dim=False) | rope(dice) | act(dice) | biases(dice, "attention_bias", "mlp_bias")
    return drawn | factors(dice)


def granite_moe(dice: Dice) -> Draw:
    """Return the config of a Granite 3 with experts, and maybe a shared one."""
    drawn = sizes(dice, has_head_dim=False) | rope(dice) | experts(dice, "num_local_experts", None)
    shared = {"shared_intermediate_size": dice.of(0, 16)}
    return drawn | biases(dice, "attention_bias") | factors(dice) | shared


def factors(dice: Dice) -> Draw:
    """Return Granite's factors."""
    return {
        "embedding_multiplier": dice.number(1, 4),
        "attention_multiplier": dice.number(0.2, 0.6),
        "residual_multiplier": dice.number(0.3, 1),
        "logits_scaling": dice.number(1, 3),
    }


KINDS = {
    "llama": Kind("LlamaForCausalLM", "LlamaConfig", llama),
    "llama4": Kind("Llama4ForCausalLM", "Llama4TextConfig", llama4),
    "mistral": Kind("MistralForCausalLM", "MistralConfig", mistral),
    "ministral3": Kind("Ministral3ForCausalLM", "Ministral3Config", ministral3),
    "qwen2": Kind("Qwen2ForCausalLM", "Qwen2Config", qwen2),
    "qwen3": Kind("Qwen3ForCausalLM", "Qwen3Config", qwen3),
    "mixtral": Kind("MixtralForCausalLM", "MixtralConfig", mixtral),
    "qwen2_moe": Kind("Qwen2MoeForCausalLM", "Qwen2MoeConfig", qwen2_moe),
    "qwen3_moe": Kind("Qwen3MoeForCausalLM", "Qwen3MoeConfig", qwen3_moe),
    "minimax_m2": Kind("MiniMaxM2ForCausalLM", "MiniMaxM2Config", minimax_m2),
    "gpt_oss": Kind("GptOssForCausalLM", "GptOssConfig", gpt_oss),
    "glm4_moe": Kind("Glm4MoeForCausalLM", "Glm4MoeConfig", glm4_moe),
    "deepseek_v2": Kind("DeepseekV2ForCausalLM", "DeepseekV2Config", deepseek_v2),
    "deepseek_v3": Kind("DeepseekV3ForCausalLM", "DeepseekV3Config", deepseek_v3),
    "glm4_moe_lite": Kind("Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", deepseek_v3),
    "mistral4": Kind("Mistral4ForCausalLM", "Mistral4Config", mistral4),
    "qwen3_next": Kind("Qwen3NextForCausalLM", "Qwen3NextConfig", qwen3_next),
    "qwen3_5": Kind("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", delta),
    "qwen3_5_moe": Kind("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", qwen3_5_moe),
    "lfm2": Kind("Lfm2ForCausalLM", "Lfm2Config", lfm2),
    "lfm2_moe": Kind("Lfm2MoeForCausalLM", "Lfm2MoeConfig", lfm2_moe),
    "granite": Kind("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", granite),
    # HF never ties its tables.
    "nemotron_h": Kind("NemotronHForCausalLM", "NemotronHConfig", nemotron_h, is_plain=False),
    "smollm3": Kind("SmolLM3ForCausalLM", "SmolLM3Config", smollm3),
    "phi3": Kind("Phi3ForCausalLM", "Phi3Config", phi3),
    "olmo2": Kind("Olmo2ForCausalLM", "Olmo2Config", olmo2),
    "olmo3": Kind("Olmo3ForCausalLM", "Olmo3Config", olmo3),
    "gemma2": Kind("Gemma2ForCausalLM", "Gemma2Config", gemma2),
    "gemma3": Kind("Gemma3ForCausalLM", "Gemma3TextConfig", gemma3),
    "gemma4": Kind("Gemma4ForCausalLM", "Gemma4TextConfig", gemma4),
    "opt": Kind("OPTForCausalLM", "OPTConfig", opt),
    "gpt2": Kind("GPT2LMHeadModel", "GPT2Config", gpt2),
    "seed_oss": Kind("SeedOssForCausalLM", "SeedOssConfig", seed_oss),
    "gemma": Kind("GemmaForCausalLM", "GemmaConfig", gemma),
    "phi": Kind("PhiForCausalLM", "PhiConfig", phi, is_plain=False),
    "stablelm": Kind("StableLmForCausalLM", "StableLmConfig", stablelm),
    # Its head has another name.
    "gpt_neox": Kind("GPTNeoXForCausalLM", "GPTNeoXConfig", gpt_neox, is_plain=False),
    "starcoder2": Kind("Starcoder2ForCausalLM", "Starcoder2Config", starcoder2),
    "glm": Kind("GlmForCausalLM", "GlmConfig", glm4),
    "glm4": Kind("Glm4ForCausalLM", "Glm4Config", glm4),
    "exaone4": Kind("Exaone4ForCausalLM", "Exaone4Config", exaone4),
    "cohere": Kind("CohereForCausalLM", "CohereConfig", cohere),
    "cohere2": Kind("Cohere2ForCausalLM", "Cohere2Config", cohere2),
    "apertus": Kind("ApertusForCausalLM", "ApertusConfig", apertus),
    "arcee": Kind("ArceeForCausalLM", "ArceeConfig", arcee),
    "olmoe": Kind("OlmoeForCausalLM", "OlmoeConfig", olmoe),
    "ernie4_5": Kind("Ernie4_5ForCausalLM", "Ernie4_5Config", ernie4_5),
    "ernie4_5_moe": Kind("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig", ernie4_5_moe),
    "hunyuan": Kind("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", hunyuan),
    "hunyuan_moe": Kind("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config", hunyuan_moe),
    "afmoe": Kind("AfmoeForCausalLM", "AfmoeConfig", afmoe),
    "granite3": Kind("GraniteForCausalLM", "GraniteConfig", granite3),
    "granite_moe": Kind("GraniteMoeSharedForCausalLM", "GraniteMoeSharedConfig", granite_moe),
}


def make(family: str, number: int, seed: int, folder: Path) -> None:
    """Write one case of a family."""
    problems: list[str] = []
    for attempt in range(MAX_DRAWS):
        dice = Dice([seed, number, attempt, *family.encode()])
        try:
            case = draw_case(KINDS[family], dice, seed + number)
        except Exception as error:  # noqa: BLE001 (HF checks few configs, and fails inside of torch)
            problems.append(f"{type(error).__name__}: {error}"[:120])
            continue
        if case["doubt"] <= MAX_DOUBT:
            (folder / f"{family}-{number:03}.json").write_text(json.dumps(case, indent=None) + "\n")
            return
        problems.append(f"{case['doubt']:.0e} in doubt")
    print(f"{family} {number}: nothing after {MAX_DRAWS} draws: {problems[-3:]}", flush=True)


def draw_case(kind: Kind, dice: Dice, seed: int) -> Draw:
    """Return a case: a config, the shapes of the tensors, and what HF computes."""
    config_class = getattr(transformers, kind.config)
    config = config_class(**kind.draw(dice), architectures=[kind.model])
    model = getattr(transformers, kind.model)(config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder)
        hf = json.loads((folder / "config.json").read_text())
        dtype = dice.of("float32", "bfloat16")
        hf = without_defaults(dice, hf, config_class) | {"dtype": dtype}
        with safe_open(folder / "model.safetensors", "np") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        hf = with_old_keys(dice, hf)
        vary_head(dice, kind, shapes, model)
        save_file(draw_weights(shapes, seed, hf["model_type"], dtype), folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(hf))
        case = run(folder, getattr(transformers, kind.model), dice)
    return {"seed": seed, "config": hf, "shapes": shapes, **case}


def without_defaults(dice: Dice, hf: Draw, config_class: Any) -> Draw:
    """Leave out HF's defaults in half of the configs: files on the hub differ in that."""
    if dice.maybe():
        return hf
    defaults = json.loads(json.dumps(config_class().to_dict(), default=str))
    kept = ("architectures", "model_type")
    return {name: value for name, value in hf.items() if name in kept or defaults.get(name, "none") != value}


def with_old_keys(dice: Dice, hf: Draw) -> Draw:
    """Now and then, write the settings of RoPE in the form before `rope_parameters`."""
    settings = hf.get("rope_parameters")
    if settings is None or any(isinstance(value, dict) for value in settings.values()) or dice.maybe(0.7):
        return hf
    moved = {name: settings[name] for name in ("rope_theta", "partial_rotary_factor") if name in settings}
    scaling = {name: value for name, value in settings.items() if name not in (*moved, "rope_type")}
    kept = {name: value for name, value in hf.items() if name != "rope_parameters"}
    if settings["rope_type"] == "default":
        return kept | moved
    return kept | moved | {"rope_scaling": scaling | {dice.of("type", "rope_type"): settings["rope_type"]}}


def vary_head(dice: Dice, kind: Kind, shapes: dict[str, list[int]], model: Any) -> None:
    """Now and then, store an output head although the config ties it to the embedding, or store the head alone."""
    if not kind.is_plain or "lm_head.weight" in shapes or dice.maybe(0.6):
        return
    embedding = next(name for name, each in model.named_parameters() if each is model.get_input_embeddings().weight)
    shapes["lm_head.weight"] = shapes[embedding]
    if dice.maybe():
        del shapes[embedding]


@torch.no_grad()
def run(folder: Path, model_class: Any, dice: Dice) -> Draw:
    """Return a prompt, the tokens that follow, and log-probabilities of some tokens of each position."""
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    vocab = model.config.get_text_config().vocab_size
    prompt = dice.rng.integers(3, vocab, dice.int(20, 52)).tolist()
    shown = sorted(dice.rng.choice(vocab, NUM_SHOWN, replace=False).tolist())
    ids, cache, rows, tokens = torch.tensor([prompt]), None, [], []
    for _ in range(NUM_DECODES):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        rows += list(torch.log_softmax(out.logits[0].float(), dim=-1))
        tokens.append(int(rows[-1].argmax()))
        ids, cache = torch.tensor([[tokens[-1]]]), out.past_key_values
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    whole = torch.log_softmax(model(input_ids=torch.tensor([prompt + tokens[:-1]])).logits[0].float(), dim=-1)
    scores = torch.stack(rows)
    if not torch.isfinite(scores).all():
        raise ValueError("numbers that are not finite")
    best = scores[-NUM_DECODES:].topk(2).values
    return {
        "prompt": prompt,
        "tokens": tokens,
        "gaps": [round(float(each), 6) for each in best[:, 0] - best[:, 1]],
        "shown": shown,
        "logprobs": [[round(float(each), 6) for each in row[shown]] for row in scores],
        "doubt": float((whole - scores).abs().max()),
    }


def main() -> None:
    """Write the cases of all families, or of some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--families", nargs="+", choices=KINDS, default=list(KINDS), metavar="FAMILY")
    parser.add_argument("--count", type=int, default=1, help="cases of each family")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    args.out.mkdir(parents=True, exist_ok=True)
    for family in args.families:
        for number in range(args.count):
            make(family, number, args.seed, args.out)


if __name__ == "__main__":
    main()
