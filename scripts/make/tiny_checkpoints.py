"""Write tests/data/tiny: a tiny random checkpoint per family and RoPE type, with goldens from HF Transformers.

Needs an environment of its own with torch and transformers 5.23: `pip install torch transformers==5.23.0`, then
`python scripts/make.py tiny_checkpoints [CASE ...]`. Same versions, same bytes.

Each case is a folder with what `save_pretrained` writes (bfloat16) and golden.npz, computed in float32 with eager
attention: whole-prompt prefill, then cached greedy decoding.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

VOCAB = 256
PROMPT_LENS = (5, 20, 60)
NUM_DECODES = 16
# Rounding could change a greedy choice as close as this; such a seed is not taken.
MIN_GAP = 5e-3
# HF may compute prompts and decodes differently; a seed with a larger difference is not taken.
MAX_DOUBT = 3e-5

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SMALL: dict[str, Any] = dict(SIZES, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1)
# Heads that are together as wide as the stream, in families that cannot have others.
OWN_HEADS: dict[str, Any] = {name: size for name, size in SMALL.items() if name != "head_dim"}
NEOX: dict[str, Any] = {name: size for name, size in OWN_HEADS.items() if name != "num_key_value_heads"}
SCALED: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ALPHA: dict[str, Any] = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 1000.0, "factor": 1.0}
}
MOE: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 3}
LATENT: dict[str, Any] = {
    **OWN_HEADS,
    "num_key_value_heads": SMALL["num_attention_heads"],
    "kv_lora_rank": 32,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    **MOE,
    "n_routed_experts": 16,
}
INDEXER: dict[str, Any] = {"index_topk": 12, "index_head_dim": 32, "index_n_heads": 16}
# Three layers with recurrent state to each that attends; two value heads to a key head.
DELTA: dict[str, Any] = dict(
    SMALL,
    num_hidden_layers=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
# Layers of Mamba-2, with fewer groups than heads.
FACTORS: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.5,
}
GRANITE: dict[str, Any] = dict(
    OWN_HEADS,
    **FACTORS,
    num_hidden_layers=4,
    mamba_n_heads=4,
    mamba_n_groups=2,
    mamba_d_state=16,
    mamba_chunk_size=16,
    shared_intermediate_size=24,
)
NEMOTRON: dict[str, Any] = dict(
    {name: size for name, size in SMALL.items() if name != "num_hidden_layers"},
    mamba_num_heads=4,
    mamba_head_dim=16,
    n_groups=2,
    ssm_state_size=16,
    chunk_size=16,
    # HF clips the time steps of prompts to this, and not those of decodes.
    time_step_min=1e-9,
)
# Layers of Mamba-2 and of Mamba without attention.
STATES: dict[str, Any] = {
    **{name: size for name, size in SMALL.items() if name in ("vocab_size", "hidden_size", "num_hidden_layers")},
    **{name: size for name, size in SMALL.items() if name.endswith("token_id")},
    "state_size": 16,
}
HYBRID: dict[str, Any] = dict(
    OWN_HEADS, mamba_n_heads=4, mamba_n_groups=2, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=16
)
FALCON_H1: dict[str, Any] = dict(
    HYBRID,
    mamba_d_ssm=64,
    embedding_multiplier=3.0,
    lm_head_multiplier=0.5,
    key_multiplier=0.4,
    attention_in_multiplier=1.5,
    attention_out_multiplier=0.7,
    ssm_in_multiplier=1.3,
    ssm_out_multiplier=0.6,
    ssm_multipliers=[0.8, 1.4, 0.7, 1.6, 0.5],
    mlp_multipliers=[1.7, 0.4],
)
SHARED_MOE: dict[str, Any] = {**MOE, "shared_expert_intermediate_size": 16, "num_experts": 8}
VISION: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}

# Parts of names.
EMBEDDINGS = (
    *("embed_tokens", "embed_positions", "embeddings", "wte", "wpe"),
    *("word_embeddings", "position_embeddings", "token_type_embeddings", "tok_embeddings"),
)
HEADS = ("lm_head", "score", "classifier")


class Case(NamedTuple):
    """An HF model class and its config."""

    model: str
    config: Callable[[], Any]
    publish: Callable[[Path], None] | None = None
    """Rewrite the folder as checkpoints are published, where HF cannot read those."""


def llama(**changes: Any) -> Case:
    """Return a Llama case."""
    return Case("LlamaForCausalLM", lambda: transformers.LlamaConfig(**(SIZES | changes)))


def llama_rope(max_positions: int = 256, **rope: Any) -> Case:
    """Return a Llama case, three query heads to a kv head, with RoPE scaling."""
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": max_positions}
    return llama(**sizes, tie_word_embeddings=True, rope_parameters={"rope_theta": 10_000.0, **rope})


def yarn(**changes: Any) -> dict[str, Any]:
    """Return RoPE scaling that a prompt outgrows."""
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 32}
    return rope | changes


def mistral_large4() -> Any:
    """Return a Mistral Large 4 config, with a tower that nothing reads."""
    text = {key: size for key, size in (LATENT | INDEXER).items() if key != "q_lora_rank"}
    text |= {
        "model_type": "mistral_large4_text",
        "num_hidden_layers": 5,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "no_rope_layers": [1, 0, 1, 0, 1],
        "kv_source_layers": [0, 1, 0, 1, 4],
        "indexer_types": ["full", "full", "shared", "full", "shared"],
        "rope_parameters": yarn(attention_factor=1.0),
    }
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 1, "head_dim": 16, "patch_size": 4, "image_size": 16}
    return transformers.MistralLarge4Config(text_config=text, vision_config=vision, image_token_index=5)


def mistral3() -> Any:
    """Return a multimodal config around a Mistral text model; its vision tower is as small as it gets."""
    text = transformers.MistralConfig(**(SIZES | {"num_key_value_heads": 1, "sliding_window": None}))
    return transformers.Mistral3Config(
        text_config=text,
        vision_config=transformers.PixtralVisionConfig(**VISION, head_dim=8, image_size=28, patch_size=14),
        image_token_index=3,
        tie_word_embeddings=False,
    )


def qwen3_5() -> Any:
    """Return a multimodal config around a Qwen3.5 text model; its vision tower is as small as it gets."""
    sizes = {name: size for name, size in VISION.items() if name in ("hidden_size", "intermediate_size")}
    return transformers.Qwen3_5Config(
        text_config=transformers.Qwen3_5TextConfig(**DELTA, tie_word_embeddings=True),
        vision_config=transformers.Qwen3_5VisionConfig(
            **sizes, depth=1, num_heads=1, out_hidden_size=32, patch_size=2, num_position_embeddings=16
        ),
        **{f"{name}_token_id": number for number, name in enumerate(("image", "video"), 3)},
        **{f"vision_{name}_token_id": number for number, name in enumerate(("start", "end"), 5)},
        tie_word_embeddings=True,
    )


def layers_of(pattern: str) -> list[str]:
    """Return the types of Nemotron-H's layers, one for each letter."""
    types = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return [types[letter] for letter in pattern]


def opt(**changes: Any) -> Case:
    """Return an OPT case."""
    others = ("intermediate_size", "num_key_value_heads", "head_dim")
    sizes = {name: size for name, size in SIZES.items() if name not in others}
    return Case("OPTForCausalLM", lambda: transformers.OPTConfig(**(sizes | {"ffn_dim": 80} | changes)))


def gpt2() -> Any:
    """Return a GPT-2 config whose layers scale scores differently."""
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
    ids = {name: SIZES[name] for name in SIZES if name.endswith("id")}
    return transformers.GPT2Config(**sizes, **ids, scale_attn_by_inverse_layer_idx=True)


def ministral3() -> Any:
    """Return a Ministral 3 config whose queries grow every 16 positions."""
    return transformers.Ministral3Config(
        **SIZES,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    )


def phi3() -> Any:
    """Return a Phi-3 config: the longest prompt is long for its RoPE, which rotates three quarters of a head."""
    return transformers.Phi3Config(
        **{**SIZES, "hidden_size": 64, "sliding_window": 24},
        original_max_position_embeddings=48,
        partial_rotary_factor=0.75,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
        },
    )


def qwen2_5_vl() -> Any:
    """Return a Qwen2.5-VL config; its vision tower is as small as it gets."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = SIZES | {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "patch_size": 2}
    return transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision | {"out_hidden_size": 32, "fullatt_block_indexes": [0]},
    )


def qwen3_vl() -> Any:
    """Return a Qwen3-VL config; its vision tower is as small as it gets."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "patch_size": 2}
    positions = {"num_position_embeddings": 4, "deepstack_visual_indexes": [0]}
    return transformers.Qwen3VLConfig(
        text_config=SIZES | {"rope_parameters": rope},
        vision_config=vision | positions | {"out_hidden_size": SIZES["hidden_size"]},
        tie_word_embeddings=True,
    )


def qwen3_vl_moe() -> Any:
    """Return a Qwen3-VL config with experts; its vision tower is as small as it gets."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "patch_size": 2}
    positions = {"num_position_embeddings": 4, "deepstack_visual_indexes": [0]}
    return transformers.Qwen3VLMoeConfig(
        text_config=SMALL
        | {"moe_intermediate_size": 24, "num_experts_per_tok": 3, "num_experts": 8, "rope_parameters": rope},
        vision_config=vision | positions | {"out_hidden_size": SMALL["hidden_size"]},
    )


def llava() -> Any:
    """Return a LLaVA config; its vision tower is as small as it gets."""
    return transformers.LlavaConfig(
        text_config=SMALL | {"model_type": "llama"},
        vision_config=VISION
        | {"model_type": "clip_vision_model", "num_hidden_layers": 2, "image_size": 4, "patch_size": 2},
        image_token_index=3,
    )


def internvl() -> Any:
    """Return an InternVL config; its vision tower is as small as it gets."""
    return transformers.InternVLConfig(
        text_config=OWN_HEADS | {"model_type": "qwen2"},
        vision_config=VISION | {"image_size": [4, 4], "patch_size": [2, 2]},
        image_token_id=3,
    )


def smolvlm() -> Any:
    """Return a SmolVLM config; its vision tower is as small as it gets."""
    return transformers.SmolVLMConfig(
        text_config=SMALL | {"model_type": "llama"},
        vision_config=VISION | {"image_size": 4, "patch_size": 2},
        image_token_id=3,
        tie_word_embeddings=True,
    )


def smollm3() -> Any:
    """Return a SmolLM3 config: every second layer knows no positions, and has a window."""
    sizes = SIZES | {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 24}
    return transformers.SmolLM3Config(**sizes, no_rope_layer_interval=2)


def olmo3() -> Any:
    """Return an OLMo 3 config: sliding layers with plain RoPE around a global one with a scaled table."""
    return transformers.Olmo3Config(
        **(SMALL | {"num_hidden_layers": 5, "num_attention_heads": 2, "sliding_window": 24}),
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.2,
                "rope_theta": 10_000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )


def gemma3_text() -> Any:
    """Return a Gemma 3 text config: five sliding layers and a global one, with a scaled RoPE table of its own."""
    return transformers.Gemma3TextConfig(
        **(SMALL | {"num_hidden_layers": 6, "sliding_window": 24, "query_pre_attn_scalar": 8}),
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )


def gemma3() -> Any:
    """Return a multimodal Gemma 3 config; its vision tower is as small as it gets."""
    return transformers.Gemma3Config(
        text_config=gemma3_text(),
        vision_config=transformers.SiglipVisionConfig(**VISION, image_size=28, patch_size=14),
        mm_tokens_per_image=4,
        image_token_index=3,
        boi_token_index=4,
        eoi_token_index=5,
    )


def gemma4_text(**changes: Any) -> Any:
    """Return a Gemma 4 text config, by default of a dense model: global layers' heads are wider and fewer."""
    sizes = dict(SIZES, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=2)
    sizes |= {
        "num_hidden_layers": 6,
        "sliding_window": 24,
        "final_logit_softcapping": 5.0,
    }
    sizes |= {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    return transformers.Gemma4TextConfig(
        **sizes
        | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCAB}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        }
        | changes
    )


def gemma4_moe() -> Any:
    """Return a Gemma 4 text config with experts beside the MLP."""
    experts = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 16}
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    return gemma4_text(num_hidden_layers=3, layer_types=types, **experts)


def gemma4_e2b() -> Any:
    """Return a multimodal Gemma 4 config like E2B's: each layer has its own input, and three borrow keys and values."""
    sliding, full = "sliding_attention", "full_attention"
    text = gemma4_text(
        num_key_value_heads=1,
        attention_k_eq_v=False,
        num_hidden_layers=6,
        layer_types=[sliding, sliding, full] * 2,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=8,
        intermediate_size=32,
    )
    vision = transformers.Gemma4VisionConfig(**VISION, num_key_value_heads=1, head_dim=8, position_embedding_size=4)
    return transformers.Gemma4Config(text_config=text, vision_config=vision)


def gpt_oss() -> Any:
    """Return a gpt-oss config whose gates reach the bound of its SwiGLU."""
    return transformers.GptOssConfig(
        **(SMALL | {"intermediate_size": 32, "num_hidden_layers": 4}),
        sliding_window=24,
        num_local_experts=6,
        num_experts_per_tok=2,
        swiglu_limit=1.5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    )


def llama4_text(**changes: Any) -> Any:
    """Return a Llama 4 text config: dense layers and some with experts; every third is global and knows no positions.

    Its RoPE is scaled as Scout's is: no wave is between the long ones and the short ones.
    """
    sizes = SIZES | {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 4}
    rope = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 32}
    chunks = {"attention_chunk_size": 32, "no_rope_layer_interval": 3, "floor_scale": 16, "attn_scale": 0.5}
    experts = {"num_local_experts": 6, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2}
    return transformers.Llama4TextConfig(
        **sizes | chunks | experts | changes,
        rope_parameters=rope | {"low_freq_factor": 1.0, "high_freq_factor": 1.0},
    )


def llama4() -> Any:
    """Return a multimodal Llama 4 config without norms of queries and keys; its vision tower is as small as it gets."""
    vision = dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 8)
    vision |= {"image_size": 28, "patch_size": 14, "intermediate_size": 4 * VISION["hidden_size"]}
    return transformers.Llama4Config(
        text_config=llama4_text(num_hidden_layers=2, no_rope_layer_interval=2, use_qk_norm=False),
        vision_config=transformers.Llama4VisionConfig(**VISION | vision),
        boi_token_index=3,
        eoi_token_index=4,
        image_token_index=5,
    )


def publish_step3p5(folder: Path) -> None:
    """Leave the text model of a saved Step 3.7, with Step 3.5's keys, as if there were a layer that predicts more."""
    path = folder / "config.json"
    text = json.loads(path.read_text())["text_config"]
    kinds = [*text["layer_types"], "full_attention"]
    ropes = [text["rope_parameters"][kind] for kind in kinds]
    scaling = {name: value for name, value in ropes[0].items() if name not in ("rope_theta", "partial_rotary_factor")}
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    same += ("max_position_embeddings", "rms_norm_eps", "moe_intermediate_size", "sliding_window", "share_expert_dim")
    same += ("moe_router_scaling_factor", "bos_token_id", "eos_token_id", "pad_token_id", "dtype")
    groups = text["num_key_value_heads"]
    heads = {"num_attention_heads": text["num_sliding_attention_heads"], "num_attention_groups": groups, "head_dim": 16}
    sparse = [str(layer) for layer, kind in enumerate(text["mlp_layer_types"]) if kind == "sparse"]
    config = {name: text[name] for name in same if name in text} | {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        "num_attention_groups": groups,
        "attention_other_setting": {"attention_type": "sliding_attention", **heads},
        "layer_types": kinds,
        "rope_theta": [rope["rope_theta"] for rope in ropes],
        "partial_rotary_factors": [rope["partial_rotary_factor"] for rope in ropes],
        "rope_scaling": scaling,
        "yarn_only_types": ["full_attention"],
        "moe_num_experts": text["n_routed_experts"],
        "moe_top_k": text["num_experts_per_tok"],
        "moe_layers_enum": ",".join(sparse),
        "swiglu_limits": [*text["swiglu_limits"], 0.0],
        "swiglu_limits_shared": [*text["swiglu_limits_shared"], 0.0],
        "num_nextn_predict_layers": 1,
    }
    path.write_text(json.dumps(config, indent=2) + "\n")
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: held for name, held in tensors.items() if name.startswith(("model.layers.", "lm_head."))} | {
        name: tensors[name] for name in ("model.embed_tokens.weight", "model.norm.weight")
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def publish_bailing(folder: Path) -> None:
    """Name a saved GLM-4.5, which has the same layers, as Ling 2.0 is published."""
    path, renamed = folder / "config.json", dict[str, torch.Tensor]()
    config = json.loads(path.read_text())
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    config = {names.get(name, name): value for name, value in config.items()} | {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "model_type": "bailing_moe_v2",
        "use_qkv_bias": config["attention_bias"],
        "use_bias": False,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "partial_rotary_factor": config["rope_parameters"]["partial_rotary_factor"],
    }
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    changes = {
        "embed_tokens": "word_embeddings",
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
        "e_score_correction_bias": "expert_bias",
    }
    tensors = load_file(folder / "model.safetensors")
    for name, held in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            renamed[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            for theirs, ours in changes.items():
                name = name.replace(theirs, ours)
            renamed[name] = held
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


def step3p7() -> Any:
    """Return a Step 3.7 with a small tower, which no golden runs."""
    text = dict(
        {name: value for name, value in SMALL.items() if name != "pad_token_id"},
        pad_token_id=0,
        num_hidden_layers=3,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        num_sliding_attention_heads=3,
        n_routed_experts=8,
        **MOE,
        share_expert_dim=24,
        sliding_window=24,
        moe_router_scaling_factor=1.5,
        swiglu_limits=[0.0, 0.0, 0.4],
        swiglu_limits_shared=[0.3, 0.4, 0.0],
        rope_parameters={
            "full_attention": SCALED | {"partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0},
        },
    )
    vision = dict(VISION, image_size=28, patch_size=14, mlp_ratio=1.0, max_position_embeddings=4)
    return transformers.Step3p7Config(text_config=text, vision_config=vision)


def mimo_v2() -> Any:
    """Return a MiMo V2 with a dense and two sparse layers; one has a window."""
    ropes = {"full_attention": 100_000.0, "sliding_attention": 1000.0}
    return transformers.MiMoV2FlashConfig(
        **SMALL | {"num_hidden_layers": 3, "head_dim": 24},
        **MOE,
        n_routed_experts=8,
        v_head_dim=12,
        sliding_window=24,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
            for kind, theta in ropes.items()
        },
    )


def cohere2_moe(**changes: Any) -> Any:
    """Return a Cohere 2 with experts after a dense layer."""
    sizes = SMALL | {"num_hidden_layers": 4, "intermediate_size": 16}
    return transformers.Cohere2MoeConfig(
        **sizes,
        first_k_dense_replace=1,
        prefix_dense_intermediate_size=48,
        sliding_window=24,
        sliding_window_pattern=3,
        num_experts=8,
        num_experts_per_tok=3,
        logit_scale=0.25,
        **changes,
    )


CASES = {
    "llama2": llama(num_key_value_heads=4),
    "llama3_tied": llama(num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True),
    "llama_bias": llama(attention_bias=True, mlp_bias=True),
    "llama_rope_linear": llama_rope(rope_type="linear", factor=4.0),
    "llama_rope_dynamic": llama_rope(32, rope_type="dynamic", factor=4.0),
    "llama_rope_yarn": llama_rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=32),
    "llama_rope_llama3": llama_rope(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "llama4": Case("Llama4ForCausalLM", llama4_text),
    "llama4_multimodal": Case("Llama4ForConditionalGeneration", llama4),
    "mistral": Case("MistralForCausalLM", lambda: transformers.MistralConfig(**SIZES, sliding_window=24)),
    "mistral3": Case("Mistral3ForConditionalGeneration", mistral3),
    "ministral3": Case("Ministral3ForCausalLM", ministral3),
    "qwen2": Case(
        "Qwen2ForCausalLM",
        lambda: transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=24, max_window_layers=1),
    ),
    "qwen3": Case("Qwen3ForCausalLM", lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "mixtral": Case(
        "MixtralForCausalLM",
        lambda: transformers.MixtralConfig(
            **SMALL | {"intermediate_size": 32}, num_local_experts=6, num_experts_per_tok=2
        ),
    ),
    "qwen2_moe": Case(
        "Qwen2MoeForCausalLM",
        lambda: transformers.Qwen2MoeConfig(
            **SMALL | {"num_hidden_layers": 3},
            **MOE,
            shared_expert_intermediate_size=48,
            num_experts=8,
            mlp_only_layers=[1],
        ),
    ),
    "qwen3_moe": Case(
        "Qwen3MoeForCausalLM",
        lambda: transformers.Qwen3MoeConfig(**SMALL, **MOE, num_experts=16, norm_topk_prob=True),
    ),
    "minimax_m2": Case(
        "MiniMaxM2ForCausalLM",
        lambda: transformers.MiniMaxM2Config(
            **SMALL | {"intermediate_size": 16},
            num_local_experts=8,
            num_experts_per_tok=3,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        ),
    ),
    "gpt_oss": Case("GptOssForCausalLM", gpt_oss),
    "glm4_moe": Case(
        "Glm4MoeForCausalLM",
        lambda: transformers.Glm4MoeConfig(
            **SMALL,
            **MOE,
            n_routed_experts=16,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
            attention_bias=True,
            use_qk_norm=True,
        ),
    ),
    # As V2-Lite: no latents for queries, experts in no groups.
    "deepseek_v2_lite": Case(
        "DeepseekV2ForCausalLM",
        lambda: transformers.DeepseekV2Config(
            **LATENT | {"q_lora_rank": None},
            first_k_dense_replace=1,
            rope_parameters=yarn(mscale=0.707, mscale_all_dim=0.707),
        ),
    ),
    "deepseek_v2": Case(
        "DeepseekV2ForCausalLM",
        lambda: transformers.DeepseekV2Config(
            **LATENT,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.5,
            first_k_dense_replace=1,
            attention_bias=True,
            rope_parameters=yarn(),
        ),
    ),
    "deepseek_v3": Case(
        "DeepseekV3ForCausalLM",
        lambda: transformers.DeepseekV3Config(
            **LATENT,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0),
        ),
    ),
    # Prompts are longer than the tokens that a token attends to; keys of indexers are rotated in part.
    "deepseek_v32": Case(
        "DeepseekV32ForCausalLM",
        lambda: transformers.DeepseekV32Config(
            **LATENT | INDEXER,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0),
        ),
    ),
    # Half the layers attend to what the layer before them has chosen.
    "glm_moe_dsa": Case(
        "GlmMoeDsaForCausalLM",
        lambda: transformers.GlmMoeDsaConfig(
            **LATENT | INDEXER | {"num_hidden_layers": 5},
            first_k_dense_replace=2,
            indexer_types=["full", "full", "shared", "full", "shared"],
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        ),
    ),
    # Two kinds of attention over latents, of other sizes; windows that prompts outgrow.
    "dots3_note": Case(
        "Dots3NoteForCausalLM",
        lambda: transformers.Dots3NoteTextConfig(
            **LATENT | INDEXER | {"num_hidden_layers": 4},
            head_dim=32,
            layer_types=["indexed_attention", "sliding_attention", "indexed_attention", "sliding_attention"],
            sliding_window=9,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=4,
            swa_q_lora_rank=24,
            swa_kv_lora_rank=48,
            swa_head_dim=48,
            swa_qk_nope_head_dim=32,
            swa_v_head_dim=16,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            shared_experts_intermediate_size=24,
            rope_theta=1000.0,
            swa_rope_theta=100.0,
        ),
    ),
    # Layers with and without RoPE, that borrow latents, or choices of tokens, or both.
    "mistral_large4": Case("MistralLarge4ForConditionalGeneration", mistral_large4),
    "kimi_k2": Case(
        "DeepseekV3ForCausalLM",
        lambda: transformers.DeepseekV3Config(
            **LATENT | {"num_attention_heads": 4, "num_key_value_heads": 4},
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.827,
            first_k_dense_replace=1,
            rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0, beta_fast=1.0, rope_theta=50_000.0),
        ),
    ),
    "glm4_moe_lite": Case(
        "Glm4MoeLiteForCausalLM",
        lambda: transformers.Glm4MoeLiteConfig(
            **LATENT | {"qk_nope_head_dim": 48},
            attention_bias=True,
            rope_interleave=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        ),
    ),
    "mistral4": Case(
        "Mistral4ForCausalLM",
        lambda: transformers.Mistral4Config(
            **LATENT,
            n_group=4,
            topk_group=2,
            rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3),
        ),
    ),
    "qwen3_next": Case("Qwen3NextForCausalLM", lambda: transformers.Qwen3NextConfig(**DELTA, **SHARED_MOE)),
    "kimi_linear": Case(
        "KimiLinearForCausalLM",
        lambda: transformers.KimiLinearConfig(
            **{name: size for name, size in LATENT.items() if name not in ("n_routed_experts", "num_hidden_layers")}
            | {"q_lora_rank": None},
            num_hidden_layers=4,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            linear_num_heads=4,
            linear_head_dim=16,
            num_experts=16,
            n_shared_experts=2,
        ),
    ),
    "bailing_hybrid": Case(
        "BailingHybridForCausalLM",
        lambda: transformers.BailingHybridConfig(
            **{name: size for name, size in LATENT.items() if name not in ("n_routed_experts", "q_lora_rank")}
            | {"num_hidden_layers": 4, "head_dim": 16},
            layer_group_size=4,
            first_k_dense_replace=1,
            num_local_experts=16,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            rms_norm_eps=1e-5,
            kda_lower_bound=-1.5,
        ),
    ),
    "qwen3_5": Case("Qwen3_5ForConditionalGeneration", qwen3_5),
    "qwen3_5_moe": Case(
        "Qwen3_5MoeForCausalLM",
        lambda: transformers.Qwen3_5MoeTextConfig(
            **{name: size for name, size in DELTA.items() if name != "intermediate_size"}, **SHARED_MOE
        ),
    ),
    "lfm2": Case(
        "Lfm2ForCausalLM",
        lambda: transformers.Lfm2Config(
            **SMALL | {"num_hidden_layers": 4},
            layer_types=["conv", "conv", "full_attention", "conv"],
            conv_bias=True,
            block_multiple_of=8,
        ),
    ),
    "lfm2_moe": Case(
        "Lfm2MoeForCausalLM",
        lambda: transformers.Lfm2MoeConfig(
            **SMALL | {"num_hidden_layers": 4},
            **MOE,
            layer_types=["conv", "full_attention", "conv", "full_attention"],
            num_dense_layers=1,
            num_experts=8,
            routed_scaling_factor=1.5,
        ),
    ),
    "lfm3": Case(
        "Lfm3ForCausalLM",
        lambda: transformers.Lfm3Config(**SMALL | {"num_hidden_layers": 5}, conv_bias=True, sliding_window=24),
    ),
    "bamba": Case(
        "BambaForCausalLM",
        lambda: transformers.BambaConfig(**HYBRID | {"num_hidden_layers": 4}, attn_layer_indices=[2]),
    ),
    "falcon_h1": Case("FalconH1ForCausalLM", lambda: transformers.FalconH1Config(**FALCON_H1)),
    "falcon_h1_norm": Case(
        "FalconH1ForCausalLM",
        lambda: transformers.FalconH1Config(
            **FALCON_H1, mamba_rms_norm=True, mamba_proj_bias=True, projectors_bias=True
        ),
    ),
    "jamba": Case(
        "JambaForCausalLM",
        lambda: transformers.JambaConfig(
            **OWN_HEADS | {"num_hidden_layers": 4},
            attn_layer_period=4,
            attn_layer_offset=2,
            num_experts=8,
            num_experts_per_tok=3,
            mamba_dt_rank=4,
        ),
    ),
    "mamba": Case("MambaForCausalLM", lambda: transformers.MambaConfig(**STATES, time_step_rank=4)),
    "falcon_mamba": Case(
        "FalconMambaForCausalLM",
        lambda: transformers.FalconMambaConfig(**STATES, time_step_rank=4, use_bias=True, use_conv_bias=False),
    ),
    "mamba2": Case(
        "Mamba2ForCausalLM",
        lambda: transformers.Mamba2Config(**STATES, num_heads=4, head_dim=16, n_groups=2, chunk_size=16),
    ),
    "granite4": Case(
        "GraniteMoeHybridForCausalLM",
        lambda: transformers.GraniteMoeHybridConfig(
            **GRANITE | {"intermediate_size": 16},
            layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            num_local_experts=8,
            num_experts_per_tok=3,
            tie_word_embeddings=True,
        ),
    ),
    "granite4_dense": Case(
        "GraniteMoeHybridForCausalLM",
        lambda: transformers.GraniteMoeHybridConfig(
            **GRANITE,
            layer_types=["full_attention", "linear_attention", "full_attention", "linear_attention"],
            num_local_experts=0,
            position_embedding_type="rope",
            attention_bias=True,
            mamba_proj_bias=True,
            mamba_conv_bias=False,
        ),
    ),
    "nemotron_h": Case(
        "NemotronHForCausalLM",
        lambda: transformers.NemotronHConfig(
            **NEMOTRON,
            layers_block_type=layers_of("M-MM-M*-M-"),
            use_bias=True,
            mlp_bias=True,
        ),
    ),
    "nemotron3": Case(
        "NemotronHForCausalLM",
        lambda: transformers.NemotronHConfig(
            **NEMOTRON | MOE,
            layers_block_type=layers_of("MEM*EME"),
            n_routed_experts=8,
            moe_shared_expert_intermediate_size=24,
            moe_latent_size=24,
            routed_scaling_factor=2.5,
        ),
    ),
    "opt": opt(num_attention_heads=3, tie_word_embeddings=False),
    "opt_350m": opt(
        hidden_size=32,
        num_attention_heads=2,
        do_layer_norm_before=False,
        word_embed_proj_dim=24,
        max_position_embeddings=96,
    ),
    "gpt2": Case("GPT2LMHeadModel", gpt2),
    "qwen2_5_vl": Case("Qwen2_5_VLForConditionalGeneration", qwen2_5_vl),
    "qwen3_vl": Case("Qwen3VLForConditionalGeneration", qwen3_vl),
    "qwen3_vl_moe": Case("Qwen3VLMoeForConditionalGeneration", qwen3_vl_moe),
    "llava": Case("LlavaForConditionalGeneration", llava),
    "internvl": Case("InternVLForConditionalGeneration", internvl),
    "smolvlm": Case("SmolVLMForConditionalGeneration", smolvlm),
    "smollm3": Case("SmolLM3ForCausalLM", smollm3),
    "phi3": Case("Phi3ForCausalLM", phi3),
    "olmo2": Case("Olmo2ForCausalLM", lambda: transformers.Olmo2Config(**(SIZES | {"attention_bias": True}))),
    "olmo3": Case("Olmo3ForCausalLM", olmo3),
    "gemma2": Case(
        "Gemma2ForCausalLM",
        lambda: transformers.Gemma2Config(
            **SIZES,
            sliding_window=24,
            query_pre_attn_scalar=8,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=5.0,
        ),
    ),
    "gemma3": Case("Gemma3ForCausalLM", gemma3_text),
    "gemma3_multimodal": Case("Gemma3ForConditionalGeneration", gemma3),
    "gemma4_dense": Case("Gemma4ForCausalLM", gemma4_text),
    "gemma4_moe": Case("Gemma4ForCausalLM", gemma4_moe),
    "gemma4_e2b": Case("Gemma4ForConditionalGeneration", gemma4_e2b),
    "seed_oss": Case("SeedOssForCausalLM", lambda: transformers.SeedOssConfig(**SMALL)),
    "gemma": Case("GemmaForCausalLM", lambda: transformers.GemmaConfig(**SMALL)),
    "phi": Case("PhiForCausalLM", lambda: transformers.PhiConfig(**SMALL, qk_layernorm=True)),
    "stablelm": Case("StableLmForCausalLM", lambda: transformers.StableLmConfig(**OWN_HEADS, use_qkv_bias=True)),
    "stablelm_parallel": Case(
        "StableLmForCausalLM",
        lambda: transformers.StableLmConfig(**OWN_HEADS, use_parallel_residual=True, partial_rotary_factor=0.5),
    ),
    "gpt_neox": Case("GPTNeoXForCausalLM", lambda: transformers.GPTNeoXConfig(**NEOX)),
    "gpt_neox_sequential": Case(
        "GPTNeoXForCausalLM",
        lambda: transformers.GPTNeoXConfig(**NEOX, use_parallel_residual=False, rotary_pct=1.0, attention_bias=False),
    ),
    "starcoder2": Case("Starcoder2ForCausalLM", lambda: transformers.Starcoder2Config(**SMALL, sliding_window=24)),
    "glm": Case("GlmForCausalLM", lambda: transformers.GlmConfig(**SMALL, attention_bias=False)),
    "glm4": Case("Glm4ForCausalLM", lambda: transformers.Glm4Config(**SMALL)),
    "exaone4": Case(
        "Exaone4ForCausalLM",
        lambda: transformers.Exaone4Config(
            **SMALL | {"num_hidden_layers": 3}, sliding_window=24, sliding_window_pattern=2
        ),
    ),
    "cohere": Case(
        "CohereForCausalLM",
        lambda: transformers.CohereConfig(**OWN_HEADS, use_qk_norm=True, attention_bias=True, logit_scale=0.25),
    ),
    "cohere2": Case(
        "Cohere2ForCausalLM",
        lambda: transformers.Cohere2Config(
            **OWN_HEADS | {"num_hidden_layers": 3}, sliding_window=24, sliding_window_pattern=2, logit_scale=0.25
        ),
    ),
    "apertus": Case("ApertusForCausalLM", lambda: transformers.ApertusConfig(**SMALL, rope_parameters=SCALED)),
    "arcee": Case("ArceeForCausalLM", lambda: transformers.ArceeConfig(**SMALL, mlp_bias=True)),
    "olmoe": Case(
        "OlmoeForCausalLM",
        lambda: transformers.OlmoeConfig(**OWN_HEADS | {"intermediate_size": 16}, num_experts=8, num_experts_per_tok=3),
    ),
    "ernie4_5": Case("Ernie4_5ForCausalLM", lambda: transformers.Ernie4_5Config(**SMALL, use_bias=True)),
    "ernie4_5_moe": Case(
        "Ernie4_5_MoeForCausalLM",
        lambda: transformers.Ernie4_5_MoeConfig(
            **OWN_HEADS, moe_intermediate_size=16, moe_num_experts=8, moe_k=3, moe_num_shared_experts=2
        ),
    ),
    "internlm3": Case(
        "LlamaForCausalLM",
        lambda: transformers.InternLM3Config(**SMALL, attention_bias=True, mlp_bias=True),
    ),
    "hunyuan": Case("HunYuanDenseV1ForCausalLM", lambda: transformers.HunYuanDenseV1Config(**SMALL, **ALPHA)),
    "hunyuan_moe": Case(
        "HunYuanMoEV1ForCausalLM",
        lambda: transformers.HunYuanMoEV1Config(
            **SMALL | {"intermediate_size": 16},
            num_experts=8,
            moe_topk=[3, 2],
            attention_bias=True,
            rope_parameters=yarn(),
        ),
    ),
    "mimo_v2": Case("MiMoV2FlashForCausalLM", mimo_v2),
    "cohere2_moe": Case("Cohere2MoeForCausalLM", lambda: cohere2_moe(num_shared_experts=2, attention_bias=True)),
    "north": Case(
        "Cohere2MoeForCausalLM",
        lambda: cohere2_moe(rms_norm_eps=1e-6, expert_selection_fn="sigmoid", norm_topk_prob=False),
    ),
    "step3p5": Case("Step3p7ForConditionalGeneration", step3p7, publish_step3p5),
    "bailing_moe_v2": Case(
        "Glm4MoeForCausalLM",
        lambda: transformers.Glm4MoeConfig(
            **SMALL,
            **MOE,
            n_routed_experts=8,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            first_k_dense_replace=1,
            use_qk_norm=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        ),
        publish_bailing,
    ),
    "stablelm_12b": Case(
        "StableLmForCausalLM",
        lambda: transformers.StableLmConfig(
            **OWN_HEADS | {"num_attention_heads": 4, "num_key_value_heads": 2},
            use_parallel_residual=True,
            qk_layernorm=True,
            partial_rotary_factor=0.5,
        ),
    ),
    "olmoe_clipped": Case(
        "OlmoeForCausalLM",
        lambda: transformers.OlmoeConfig(
            **OWN_HEADS | {"intermediate_size": 16}, num_experts=8, num_experts_per_tok=3, clip_qkv=0.7
        ),
    ),
    "hy_v3": Case(
        "HYV3ForCausalLM",
        lambda: transformers.HYV3Config(**SMALL, **MOE, num_experts=8, num_shared_experts=2, attention_bias=True),
    ),
    "afmoe": Case(
        "AfmoeForCausalLM",
        lambda: transformers.AfmoeConfig(
            **SMALL | {"num_hidden_layers": 3},
            **MOE,
            num_dense_layers=1,
            num_experts=8,
            num_shared_experts=2,
            route_scale=1.5,
            global_attn_every_n_layers=3,
            sliding_window=24,
            mup_enabled=True,
        ),
    ),
    "granite": Case(
        "GraniteForCausalLM",
        lambda: transformers.GraniteConfig(**OWN_HEADS, **FACTORS, attention_bias=True, mlp_bias=True),
    ),
    "granite_moe": Case(
        "GraniteMoeForCausalLM",
        lambda: transformers.GraniteMoeConfig(
            **OWN_HEADS | {"intermediate_size": 16}, **FACTORS, num_local_experts=8, num_experts_per_tok=3
        ),
    ),
}


WITH_NORM_OFFSET = ("gemma", "gemma2", "gemma3", "gemma3_multimodal", "qwen3_next", "qwen3_5", "qwen3_5_moe", "step3p5")
"""Cases with norms that add 1 to their scales."""


def store_as_published(folder: Path) -> None:
    """Transpose the experts of a saved Qwen3-VL: HF reads the published order, [in, out], and writes its own."""
    tensors = load_file(folder / "model.safetensors")
    turned = {name: each.mT.contiguous() if ".experts." in name else each for name, each in tensors.items()}
    save_file(turned, folder / "model.safetensors", {"format": "pt"})


def name_dense_as_published(folder: Path) -> None:
    """Name the dense MLPs of a saved Kimi Linear, which HF saves under the name of experts."""
    tensors = load_file(folder / "model.safetensors")
    named = {
        re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", name): each for name, each in tensors.items()
    }
    save_file(named, folder / "model.safetensors", {"format": "pt"})


def name_as_published(folder: Path) -> None:
    """Name the architecture of a saved InternLM 3, which HF saves as a Llama."""
    config = folder / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "InternLM3ForCausalLM"))


def fill(model: nn.Module, seed: int, *, norm_offset: float, scales_embeddings: bool) -> None:
    """Draw weights large enough that every feature moves the logits."""
    rng = np.random.default_rng(seed)
    amplifies = any("A_log" in name or "softmax_scaling" in name for name, _ in model.named_parameters())
    for name, param in model.named_parameters():
        noise = torch.from_numpy(rng.standard_normal(tuple(param.shape), dtype=np.float32))
        if name.endswith("softmax_scaling.scale"):
            # With the logarithms, scores stay about as large as without them.
            value = 0.2 + 0.1 * noise
        elif name.endswith(("bias", "sinks")):
            value = 0.5 * noise
        elif param.ndim == 1:
            # The norm in a gated delta net has no offset.
            value = (1.0 if name.endswith("linear_attn.norm.weight") else 1.0 - norm_offset) + 0.3 * noise
        elif any(part in name for part in EMBEDDINGS):
            # Gemma scales its embeddings up; they must not drown the layers.
            value = (0.3 if scales_embeddings else 0.6) * noise
        else:
            # Norms of the first tokens' small outputs amplify rounding.
            gain = (3.0 if any(part in name for part in HEADS) else 1.3) * (0.8 if amplifies else 1)
            # Experts are stacked; what they sum over may be either of the other axes, which are of similar sizes.
            num_inputs = param.shape[1] if param.ndim == 3 and param.shape[1] > 1 else param[0].numel()
            value = gain * noise / num_inputs**0.5
        param.data.copy_(value)
    # Learned without a gradient, and zero until then.
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(torch.from_numpy(0.2 * rng.standard_normal(tuple(buffer.shape), dtype=np.float32)))
        elif name.endswith("rotary_emb.alpha"):
            buffer.copy_(torch.from_numpy(0.5 * rng.standard_normal(tuple(buffer.shape), dtype=np.float32)))
        elif name.endswith("layer_scalar"):
            buffer.copy_(torch.from_numpy(1 + 0.3 * rng.standard_normal(tuple(buffer.shape), dtype=np.float32)))


@torch.no_grad()
def decode(model: nn.Module, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return log-probabilities of the prompt's positions, those of the decodes, and the greedy tokens."""
    ids, cache = torch.from_numpy(prompt)[None], None
    steps, tokens = [], []
    for _ in range(NUM_DECODES):
        # Models of recurrent states alone have another name for them.
        name = "cache_params" if model.config.model_type in ("mamba", "falcon_mamba", "mamba2") else "past_key_values"
        start = len(prompt) + len(tokens) - ids.shape[1]
        # Bamba does not count what is cached.
        where = {"position_ids": start + torch.arange(ids.shape[1])[None]} if model.config.model_type == "bamba" else {}
        out = model(input_ids=ids, use_cache=True, **{name: cache}, **where)
        steps.append(torch.log_softmax(out.logits[0].float(), dim=-1).numpy())
        tokens.append(int(steps[-1][-1].argmax()))
        ids, cache = torch.tensor([[tokens[-1]]]), out[name]
    return steps[0], np.stack([step[-1] for step in steps]), np.asarray(tokens, np.int32)


@torch.no_grad()
def whole(model: nn.Module, ids: np.ndarray) -> np.ndarray:
    """Return log-probabilities of all positions, computed at once."""
    return torch.log_softmax(model(input_ids=torch.from_numpy(ids)[None]).logits[0].float(), dim=-1).numpy()


def golden(folder: Path, model_class: Any) -> tuple[dict[str, Any], float]:
    """Run HF over the prompts; return goldens, and how far HF is from itself.

    The model is loaded anew for each, since dynamic RoPE remembers earlier lengths.
    """
    rng, doubts = np.random.default_rng(0), []
    arrays: dict[str, Any] = {}
    for index, length in enumerate(PROMPT_LENS):
        prompt = rng.integers(6, VOCAB, length)
        model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        prompt_logprobs, logprobs, tokens = decode(model, prompt)
        doubts.append(np.abs(whole(model, np.concatenate((prompt, tokens[:-1])))[length - 1 :] - logprobs).max())
        arrays |= {f"prompt_{index}": prompt.astype(np.int32), f"tokens_{index}": tokens, f"logprobs_{index}": logprobs}
        if length < max(PROMPT_LENS):
            arrays[f"prompt_logprobs_{index}"] = prompt_logprobs
    return arrays, float(max(doubts))


def smallest_gap(arrays: dict[str, Any]) -> float:
    """Return the smallest lead of a greedy token over the second best."""
    best = [np.sort(arrays[f"logprobs_{index}"], axis=-1)[:, -2:] for index in range(len(PROMPT_LENS))]
    return float(min((pair[:, 1] - pair[:, 0]).min() for pair in best))


def make(name: str, case: Case, folder: Path) -> None:
    """Write one case, with the first seed that leaves no greedy choice in doubt."""
    model_class = getattr(transformers, case.model)
    for seed in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        model = model_class(case.config())
        fill(model, seed, norm_offset=1.0 if name in WITH_NORM_OFFSET else 0.0, scales_embeddings="gemma" in name)
        model.tie_weights()
        model.to(torch.bfloat16).save_pretrained(folder)
        if name == "qwen3_vl_moe":
            store_as_published(folder)
        if name == "kimi_linear":
            name_dense_as_published(folder)
        if name == "internlm3":
            name_as_published(folder)
        arrays, doubt = golden(folder, model_class)
        gap = smallest_gap(arrays)
        if gap > MIN_GAP and (doubt < MAX_DOUBT or "rope" in name):
            if case.publish is not None:
                case.publish(folder)
            np.savez_compressed(folder / "golden.npz", **arrays)
            size = sum(path.stat().st_size for path in folder.iterdir()) // 1024
            print(f"{name}: seed {seed}, smallest gap {gap:.4f}, {doubt:.0e} in doubt, {size} KB")
            return
    raise RuntimeError(f"{name}: no seed in 20 keeps greedy choices apart by {MIN_GAP}")


def run(description: str | None, cases: Mapping[str, Any], make_case: Callable[..., None], folder: str) -> None:
    """Write the cases named on the command line, or all, into a folder of tests/data by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(cases)}; all by default")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[2] / "tests/data" / folder)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in args.cases or cases:
        make_case(name, cases[name], args.output / name)


if __name__ == "__main__":
    run(__doc__, CASES, make, "tiny")
