"""config.json is read with old and new keys and HF's defaults, and refusals name what is not supported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxllm.models import ModelConfig, ModelSpecs, QueryScaling, RopeConfig, get_family
from jaxllm.models.config import MoESpec
from jaxllm.models.mixer_specs import LatentSpec, ScanSpec
from jaxllm.models.plan import LayerPlan
from tests.models.tiny import CASES, read_hf_config, read_tensors

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
MISTRAL = {**SIZES, "model_type": "mistral", "num_key_value_heads": 2}
GLM = {"num_key_value_heads": 2, "n_routed_experts": 16}
LATENT = {"num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}
GRANITE = {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 4}
GEMMA4 = {"hidden_size_per_layer_input": 0}
GEMMA4_MOE = GEMMA4 | {"enable_moe_block": True, "num_experts": 4, "moe_intermediate_size": 32}


def read(architecture: str, **hf: Any) -> ModelConfig:
    return get_family(architecture).read_config({**SIZES, **hf})


def windows(config: ModelConfig) -> tuple[int | None, ...]:
    return tuple(layer.window for layer in config.layers)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}},
            {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_SCALING},
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, {"rope_type": "dynamic", "factor": 2.0}),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 1024},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        ),
    ],
)
def test_old_and_new_rope_keys_agree(old: dict[str, Any], new: dict[str, Any]) -> None:
    config = read("LlamaForCausalLM", **old)
    assert config == read("LlamaForCausalLM", rope_parameters=new)
    assert config.ropes[0].rope_type == new["rope_type"]
    assert config.ropes[0].theta == new.get("rope_theta", 10_000.0)


def test_gemma3_old_and_new_rope_keys_agree() -> None:
    old = {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    new = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    config = read("Gemma3ForCausalLM", num_hidden_layers=7, **old)
    assert config == read("Gemma3ForCausalLM", num_hidden_layers=7, rope_parameters=new)
    assert config.ropes == (RopeConfig(rope_type="linear", theta=2e6, factor=8.0), RopeConfig(theta=2e4))
    assert tuple(layer.rope for layer in config.layers) == (1, 1, 1, 1, 1, 0, 1)
    assert windows(config) == (4096,) * 5 + (None, 4096)


def test_gemma3_4b_relies_on_defaults() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    hf = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    config = get_family("Gemma3ForConditionalGeneration").read_config(hf)
    layer = config.layers[0]
    assert (config.vocab_size, layer.num_heads, layer.num_kv_heads, layer.head_dim) == (262_208, 8, 4, 256)
    assert config.tie_word_embeddings
    assert layer.scale == 256**-0.5
    assert windows(config)[:6] == (1024,) * 5 + (None,)
    assert [rope.theta for rope in config.ropes] == [1e6, 1e4]
    assert config.max_position_embeddings == 131_072


# The hub's config.json, without the keys that transformers never reads.
OPT_350M = {
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": False,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "transformers_version": "4.20.0.dev0",
    "use_cache": True,
    "vocab_size": 50_272,
    "word_embed_proj_dim": 512,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50_256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50_256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_type": "cls_index",
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50_257,
}


def test_opt_of_its_time() -> None:
    small = get_family("OPTForCausalLM").read_config(OPT_350M)
    assert (small.embed_size, small.hidden_size, small.position_offset) == (512, 1024, 2)
    assert (small.final_norm, small.layers[0].norms_stream, small.norm_eps) == (False, True, 1e-5)
    assert small.tie_word_embeddings
    assert small.ropes == ()
    other = {"do_layer_norm_before": True, "word_embed_proj_dim": 1024, "enable_bias": False}
    large = get_family("OPTForCausalLM").read_config(OPT_350M | other)
    assert (large.embed_size, large.final_norm, large.layers[0].norms_stream) == (None, True, False)
    assert not any((large.layers[0].qkv_bias, large.layers[0].o_bias, large.layers[0].mlp_bias))
    old = get_family("OPTForCausalLM").read_config(OPT_350M | other | {"_remove_final_layer_norm": True})
    assert not old.final_norm
    assert get_family("OPTForCausalLM").read_config({}).layers[11].intermediate_size == 3072


def test_gpt2_of_its_time() -> None:
    family = get_family("GPT2LMHeadModel")
    config = family.read_config(GPT2)
    layer = config.layers[11]
    assert (config.max_position_embeddings, config.hidden_size, config.num_layers) == (1024, 768, 12)
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.intermediate_size) == (12, 12, 64, 3072)
    assert (layer.scale, layer.hidden_act, layer.rope, config.position_offset) == (0.125, "gelu_new", None, 0)
    assert config == family.read_config({})
    unscaled = {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "n_inner": 100}
    assert [each.scale for each in family.read_config(GPT2 | unscaled).layers[:3]] == [1, 1 / 2, 1 / 3]
    assert family.read_config(unscaled).layers[0].intermediate_size == 100
    assert family.read_config({"hidden_size": 96}) == family.read_config({"n_embd": 96})


def test_olmo3_scales_rope_on_global_layers_only() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2}
    config = read("Olmo3ForCausalLM", rope_scaling=yarn, rope_theta=5e5)
    assert windows(config) == (4096,) * 3 + (None,)
    assert [config.ropes[layer.rope or 0].rope_type for layer in config.layers] == ["default"] * 3 + ["yarn"]
    assert [rope.theta for rope in config.ropes] == [5e5, 5e5]


def test_smollm3_rotates_three_layers_of_four() -> None:
    config = read("SmolLM3ForCausalLM", num_key_value_heads=2)
    assert [layer.rope for layer in config.layers] == [0, 0, 0, None]
    assert config == read("SmolLM3ForCausalLM", num_key_value_heads=2, no_rope_layers=[1, 1, 1, 0])
    assert windows(config) == (None,) * 4
    slides = read("SmolLM3ForCausalLM", num_key_value_heads=2, use_sliding_window=True, sliding_window=32)
    assert windows(slides) == (None, None, None, 32)


# As on the hub, without the keys that a text model does not read.
LLAMA4_SCOUT = {
    "attn_scale": 0.1,
    "attn_temperature_tuning": 4,
    "floor_scale": 8192,
    "for_llm_compressor": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "max_position_embeddings": 10_485_760,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500_000.0,
    "use_qk_norm": True,
    "vocab_size": 202_048,
}


def test_llama4_scout() -> None:
    config = get_family("Llama4ForConditionalGeneration").read_config({"text_config": LLAMA4_SCOUT})
    assert config.architecture == "Llama4ForConditionalGeneration"
    local, everywhere = config.layers[0], config.layers[3]
    assert config.layers == (local, local, local, everywhere) * 12
    assert (local.attention_chunk, local.rope, local.qk_unit_norm, local.query_scaling) == (8192, 0, 1e-5, None)
    assert (everywhere.attention_chunk, everywhere.rope, everywhere.qk_unit_norm) == (None, None, None)
    assert everywhere.query_scaling == QueryScaling(0.1, 8192, first=1)
    sizes: dict[str, Any] = {"num_experts": 16, "top_k": 1, "intermediate_size": 8192, "shared_size": 8192}
    assert local.moe == everywhere.moe == MoESpec(**sizes, sigmoid=True, scales_inputs=True)
    assert (config.ropes[0].interleaved, config.ropes[0].factor, config.tie_word_embeddings) == (True, 16.0, False)
    assert {layer.attention_chunk for layer in config.within(8192).layers} == {None}
    assert {layer.attention_chunk for layer in config.within(8193).layers} == {None, 8192}


def test_llama4_layers() -> None:
    config = read(
        "Llama4ForCausalLM",
        num_key_value_heads=2,
        interleave_moe_layer_step=2,
        use_qk_norm=False,
        attn_temperature_tuning=False,
    )
    assert [layer.moe is None for layer in config.layers] == [True, False, True, False]
    assert {layer.intermediate_size for layer in config.layers} == {16_384}
    assert {(layer.qk_unit_norm, layer.query_scaling) for layer in config.layers} == {(None, None)}
    listed = read("Llama4ForCausalLM", num_key_value_heads=2, moe_layers=[0, 7], no_rope_layers=[0, 1, 1, 0])
    assert [layer.moe is None for layer in listed.layers] == [False, True, True, True]
    assert [layer.attention_chunk for layer in listed.layers] == [None, 8192, 8192, None]
    types = ["full_attention"] * 3 + ["chunked_attention"]
    dense = read(
        "Llama4ForCausalLM",
        num_key_value_heads=2,
        moe_layers=[],
        num_local_experts=0,
        layer_types=types,
        attention_chunk_size=64,
    )
    assert [layer.moe for layer in dense.layers] == [None] * 4
    assert [layer.attention_chunk for layer in dense.layers] == [None] * 3 + [64]
    assert [layer.rope for layer in dense.layers] == [0, 0, 0, None]


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi3_has_one_scaling_of_several_names(name: str) -> None:
    config = read("Phi3ForCausalLM", rope_scaling=LONGROPE | {"type": name}, max_position_embeddings=131_072)
    (rope,) = config.ropes
    assert (rope.rope_type, rope.short_factors, rope.long_factors) == ("longrope", (1.0,) * 8, (2.0,) * 8)
    assert rope.original_max_position_embeddings == 4096
    assert rope.attention_factor == pytest.approx((1 + 5 / 12) ** 0.5)
    assert not rope.depends_on_length(4096)
    assert rope.depends_on_length(4097)


def test_ministral3_is_the_same_in_its_wrapper() -> None:
    text = {**SIZES, "num_key_value_heads": 2, "model_type": "ministral3"}
    alone = get_family("Ministral3ForCausalLM").read_config(text)
    wrapped = get_family("Mistral3ForConditionalGeneration").read_config({"text_config": text})
    assert wrapped == replace(alone, architecture="Mistral3ForConditionalGeneration")
    assert {layer.query_scaling for layer in alone.layers} == {QueryScaling(0.1, 16_384)}
    assert (alone.ropes[0].rope_type, alone.ropes[0].attention_factor) == ("yarn", 1.0)


def test_qwen_vl_reads_old_and_new_configs() -> None:
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    text = {**SIZES, "num_key_value_heads": 2, "rope_theta": 1e5, "tie_word_embeddings": True}
    for architecture, model_type in (("Qwen2VL", "qwen2_vl_text"), ("Qwen2_5_VL", "qwen2_5_vl_text")):
        family = get_family(f"{architecture}ForConditionalGeneration")
        flat = family.read_config({**text, "rope_scaling": rope})
        assert flat.ropes == (RopeConfig(theta=1e5, axes=(0, 0, 1, 1, 1, 2, 2, 2)),)
        assert flat.tie_word_embeddings
        nested = {**text, "model_type": model_type, "rope_parameters": rope | {"rope_type": "default"}}
        assert family.read_config({"text_config": nested}) == flat


def test_gemma4_relies_on_defaults() -> None:
    text = {"model_type": "gemma4_text", "num_hidden_layers": 7, "use_bidirectional_attention": "vision"}
    hf = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    config = get_family("Gemma4ForConditionalGeneration").read_config(hf)
    assert windows(config) == (512,) * 5 + (None,) * 2
    assert [layer.head_dim for layer in config.layers] == [256] * 5 + [512] * 2
    assert {(layer.num_kv_heads, layer.input_size, layer.scale) for layer in config.layers} == {(4, 256, 1.0)}
    assert config.ropes == (
        RopeConfig(rope_type="proportional", theta=1e6, rotated=0.25),
        RopeConfig(theta=1e4),
    )
    assert config.tie_word_embeddings
    assert config.final_soft_cap is None


@pytest.mark.parametrize("stated", [{}, {"use_bidirectional_attention": None}])
def test_gemma4_12b_has_defaults_of_its_own(stated: dict[str, Any]) -> None:
    hf = {"text_config": {"model_type": "gemma4_unified_text", "num_hidden_layers": 7, **stated}}
    config = get_family("Gemma4UnifiedForConditionalGeneration").read_config(hf)
    assert windows(config) == (1024,) * 5 + (None,) * 2
    assert [layer.sees_both_sides for layer in config.layers] == [not stated] * 5 + [False] * 2
    assert {(layer.input_size, layer.moe) for layer in config.layers} == {(None, None)}
    assert config.max_position_embeddings == 262_144


def test_gemma4_rope_type_may_have_its_old_name() -> None:
    settings = {"partial_rotary_factor": 0.25, "rope_theta": 1e6}
    old, new = (
        {"full_attention": settings | {name: "proportional"}, "sliding_attention": {}} for name in ("type", "rope_type")
    )
    config = read("Gemma4ForCausalLM", **GEMMA4, rope_parameters=old)
    assert config == read("Gemma4ForCausalLM", **GEMMA4, rope_parameters=new)
    assert config.ropes[0] == RopeConfig(rope_type="proportional", theta=1e6, rotated=0.25)


def test_gemma4_old_and_new_head_sizes_agree() -> None:
    old = {"global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    new = {"per_layer_config": {"3": {"head_dim": 64, "num_key_value_heads": 1}}, "attention_k_eq_v": True}
    sizes = {"num_key_value_heads": 2, "head_dim": 32, "vocab_size_per_layer_input": 128}
    config = read("Gemma4ForCausalLM", **sizes, **old)
    assert config == read("Gemma4ForCausalLM", **sizes, **new)
    assert [(layer.head_dim, layer.num_kv_heads, layer.k_is_v) for layer in config.layers] == [
        (32, 2, False),
        (32, 2, False),
        (32, 2, False),
        (64, 1, True),
    ]
    fewer = read("Gemma4ForCausalLM", **sizes, num_global_key_value_heads=1)
    assert fewer.layers[3].num_kv_heads == 2, "fewer heads need one projection for keys and values"


def test_gemma4_late_layers_borrow_and_are_wide() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    shared = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "vocab_size_per_layer_input": 128}
    config = read("Gemma4ForCausalLM", layer_types=types, **shared)
    assert [layer.borrows_kv for layer in config.layers] == [False, False, True, True]
    assert [layer.intermediate_size for layer in config.layers] == [96, 96, 192, 192]


def test_layers_borrow_from_their_own_type_however_short_sequences_are() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    sizes = {"num_kv_shared_layers": 2, "head_dim": 16, "global_head_dim": 16, "num_key_value_heads": 4}
    plan = LayerPlan(read("Gemma4ForCausalLM", **GEMMA4, **sizes, layer_types=types).within(8).layers)
    assert [plan.cache_layers(kind) for kind in plan.sequence] == [(0, (0,)), (1, (0,)), (0, (0,)), (1, (0,))]


def test_a_part_of_a_head_is_rotated_where_hf_does_so() -> None:
    factor = {"partial_rotary_factor": 0.5, "num_key_value_heads": 2}
    assert read("LlamaForCausalLM", **factor).ropes[0].rotated == 1
    assert read("Qwen3ForCausalLM", **factor).ropes[0].rotated == 1
    assert read("Phi3ForCausalLM", **factor).ropes[0].rotated == 0.5
    assert read("Qwen3NextForCausalLM", **factor).ropes[0].rotated == 0.5
    assert read("Glm4MoeForCausalLM", **GLM, partial_rotary_factor=0.25).ropes[0].rotated == 0.25


@pytest.mark.parametrize(
    ("architecture", "num_kv_heads"),
    [
        ("LlamaForCausalLM", 64),
        ("Qwen2ForCausalLM", 32),
        ("Qwen3ForCausalLM", 32),
        ("Qwen2MoeForCausalLM", 16),
        ("Qwen3MoeForCausalLM", 4),
        ("Qwen3NextForCausalLM", 2),
        ("Qwen3_5ForCausalLM", 4),
        ("Qwen3_5MoeForCausalLM", 2),
        ("MixtralForCausalLM", 8),
        ("SmolLM3ForCausalLM", 4),
        ("Olmo2ForCausalLM", 64),
    ],
)
def test_kv_heads_that_are_left_out_are_as_many_as_in_hfs_class(architecture: str, num_kv_heads: int) -> None:
    hf = {"num_attention_heads": 64, "head_dim": 16, "full_attention_interval": 1}
    assert {layer.num_kv_heads for layer in read(architecture, **hf).layers} == {num_kv_heads}


def test_what_hf_reads_and_leaves() -> None:
    assert read("Gemma3ForCausalLM", attn_logit_softcapping=2.0).layers[0].soft_cap is None
    assert read("Gemma2ForCausalLM", attn_logit_softcapping=2.0).layers[0].soft_cap == 2
    sizes = {"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32}
    assert [layer.head_dim for layer in read("Gemma4ForCausalLM", **GEMMA4, **sizes).layers] == [16] * 3 + [32]
    one = read("Gemma4ForCausalLM", **GEMMA4, **sizes, per_layer_config={})
    assert {layer.head_dim for layer in one.layers} == {16}
    padded = read("Gemma4ForCausalLM", **GEMMA4, **sizes, per_layer_config={"01": {"head_dim": 64}})
    assert [layer.head_dim for layer in padded.layers] == [16, 64, 16, 16]


def test_a_norm_after_rotation_takes_out_its_factor() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 2.0, "original_max_position_embeddings": 1024}
    llama4 = {"num_key_value_heads": 2, "rope_scaling": yarn, "rms_norm_eps": 1e-4, "num_experts_per_tok": 1}
    normed, plain = (read("Llama4ForCausalLM", **llama4, use_qk_norm=each) for each in (True, False))
    assert (normed.ropes[0].attention_factor, normed.layers[0].qk_unit_norm) == (1, 1e-4 / 4)
    assert (plain.ropes[0].attention_factor, plain.layers[0].qk_unit_norm) == (2, None)


def test_windows() -> None:
    assert windows(read("MistralForCausalLM", num_key_value_heads=2)) == (4096,) * 4
    assert windows(read("MistralForCausalLM", num_key_value_heads=2, sliding_window=None)) == (None,) * 4
    upper = read(
        "Qwen2ForCausalLM", num_key_value_heads=2, use_sliding_window=True, sliding_window=32, max_window_layers=3
    )
    assert windows(upper) == (None, None, None, 32)
    assert (
        windows(read("Qwen2ForCausalLM", num_key_value_heads=2, sliding_window=32, max_window_layers=0)) == (None,) * 4
    )
    assert windows(read("Gemma2ForCausalLM", sliding_window=32)) == (32, None, 32, None)
    for architecture in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
        assert (
            windows(read(architecture, num_key_value_heads=2, use_sliding_window=True, sliding_window=None))
            == (None,) * 4
        )
    config = read("Gemma2ForCausalLM", layer_types=["full_attention"] * 4)
    assert windows(config) == (None,) * 4


@pytest.mark.parametrize("case", CASES)
def test_the_checkpoint_decides_whether_there_is_a_head(case: str) -> None:
    hf, names = read_hf_config(case), set(read_tensors(case))
    family = get_family(hf["architectures"][0])
    prefixes = family.find_prefixes(names)._asdict()
    embedding, head = (family.names[path].name.format(**prefixes) for path in ("embed.table", "lm_head.table"))
    for stated in (True, False):
        hf |= {"tie_word_embeddings": stated}
        assert not family.read_config(hf, names | {head}).tie_word_embeddings
        assert family.read_config(hf, names - {head}).tie_word_embeddings
        assert family.read_config(hf).tie_word_embeddings == stated
        alone = family.read_config(hf, (names | {head}) - {embedding})
        assert alone.tie_word_embeddings == stated
        specs = ModelSpecs(alone, np.float32).param_specs((names | {head}) - {embedding})
        assert specs["embed.table"].sources == (head if stated else embedding,)


@pytest.mark.parametrize(
    ("architecture", "hf", "message"),
    [
        ("LlamaForCausalLM", {"rope_scaling": {"type": "xpos", "factor": 2.0}}, "rope_type is 'xpos'"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "short_factor is missing"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ("LlamaForCausalLM", {"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ("LlamaForCausalLM", {"rope_parameters": {"full_attention": {}}}, "per layer type"),
        ("LlamaForCausalLM", {"rope_scaling": {"mrope_section": [2, 2]}}, "mrope_section"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("Phi3ForCausalLM", {"rope_parameters": {"partial_rotary_factor": 0.1}}, "partial_rotary_factor"),
        ("LlamaForCausalLM", {"rope_scaling": DYNAMIC, "head_dim": 2}, "leave 2 of 4 dimensions"),
        ("LlamaForCausalLM", {"rope_scaling": DYNAMIC, "partial_rotary_factor": 0.5}, "does not fit this architecture"),
        ("LlamaForCausalLM", {"rope_theta": -1.0}, "rope_theta"),
        ("LlamaForCausalLM", {"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ("LlamaForCausalLM", {"vocab_size": None}, "vocab_size is missing"),
        ("LlamaForCausalLM", {"vocab_size": "many"}, "vocab_size is 'many'"),
        ("LlamaForCausalLM", {"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ("LlamaForCausalLM", {"num_attention_heads": 0}, "num_attention_heads is 0"),
        ("LlamaForCausalLM", {"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ("LlamaForCausalLM", {"head_dim": 15}, "even"),
        ("MistralForCausalLM", {"num_key_value_heads": 2, "sliding_window": 0}, "sliding_window is 0"),
        ("Mistral3ForConditionalGeneration", {}, "text_config is missing"),
        ("Mistral3ForConditionalGeneration", {"text_config": {"model_type": "llama"}}, "'llama'"),
        ("Qwen2ForCausalLM", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention"] * 3}, "3 layer_types"),
        ("OPTForCausalLM", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is False"),
        ("OPTForCausalLM", {"hidden_size": 66}, "a hidden size of 66 is not a multiple of 4 heads"),
        ("OPTForCausalLM", {"ffn_dim": "wide"}, "ffn_dim is 'wide'"),
        ("OPTForCausalLM", {"activation_function": "mish"}, "activation_function is 'mish'"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention"),
        ("GPT2LMHeadModel", {"n_embd": 0}, "n_embd is 0"),
        ("GPT2LMHeadModel", {"n_embd": 66}, "a hidden size of 66 is not a multiple of 4 heads"),
        ("GPT2LMHeadModel", {"n_inner": -1}, "n_inner is -1"),
        ("GPT2LMHeadModel", {"scale_attn_weights": "yes"}, "scale_attn_weights is 'yes'"),
        ("Glm4MoeForCausalLM", GLM | {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("Glm4MoeForCausalLM", GLM | {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("Glm4MoeForCausalLM", GLM | {"n_group": 16, "topk_group": 8}, "n_group is 16, of 16 experts"),
        ("Glm4MoeForCausalLM", GLM | {"n_group": 3}, "n_group 3"),
        ("Glm4MoeForCausalLM", GLM | {"n_routed_experts": 0}, "n_routed_experts is 0"),
        ("DeepseekV2ForCausalLM", LATENT | {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("DeepseekV2ForCausalLM", LATENT | {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ("DeepseekV2ForCausalLM", LATENT | {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("DeepseekV2ForCausalLM", {}, "num_experts_per_tok is missing"),
        ("DeepseekV3ForCausalLM", LATENT | {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("DeepseekV3ForCausalLM", LATENT | {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("DeepseekV3ForCausalLM", LATENT | {"n_group": 256}, "a group needs at least 2"),
        ("DeepseekV3ForCausalLM", LATENT | {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ("DeepseekV3ForCausalLM", LATENT | {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("DeepseekV3ForCausalLM", LATENT | {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ("DeepseekV3ForCausalLM", LATENT | {"qk_rope_head_dim": 7}, "head_dim is 519"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["mlp"] * 4}, "mlp_layer_types"),
        ("Mistral4ForCausalLM", {"rope_parameters": {"llama_4_scaling_beta": "x"}}, "llama_4_scaling_beta"),
        ("MiniMaxM2ForCausalLM", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("MiniMaxM2ForCausalLM", {"use_qk_norm": False}, "use_qk_norm is False"),
        ("MiniMaxM2ForCausalLM", {"use_routing_bias": 1}, "use_routing_bias is 1"),
        ("MixtralForCausalLM", {"num_local_experts": 1}, "num_experts_per_tok is 2, and there are 1 experts"),
        ("GptOssForCausalLM", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5"),
        ("Gemma2ForCausalLM", {"hidden_activation": None}, "hidden_activation is None"),
        ("Olmo3ForCausalLM", {"rope_parameters": {"rope_type": "default"}}, "per layer type"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window"),
        ("Llama4ForCausalLM", {"num_experts_per_tok": 2}, "an expert that scales its inputs needs 1"),
        ("Llama4ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "layer_types sliding_attention are not"),
        ("Llama4ForCausalLM", {"attention_chunk_size": None}, "attention_chunk_size is missing"),
        ("Llama4ForCausalLM", {"attn_temperature_tuning": "yes"}, "attn_temperature_tuning is 'yes'"),
        ("Llama4ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("Llama4ForCausalLM", {"moe_layers": [-1]}, "moe_layers is"),
        ("Llama4ForCausalLM", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step is 0"),
        ("Llama4ForConditionalGeneration", {"text_config": {"model_type": "llama"}}, "only llama4_text is supported"),
        ("Phi3ForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("Phi3ForCausalLM", {"lm_head_bias": True}, "lm_head_bias"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "only longrope"),
        ("Phi3ForCausalLM", {"rope_scaling": LONGROPE | {"short_factor": 1.0}}, "short_factor is 1.0"),
        ("Phi3ForCausalLM", {"rope_scaling": LONGROPE | {"long_factor": [1.0]}}, "need 8 numbers"),
        ("Ministral3ForCausalLM", {"rope_parameters": {"llama_4_scaling_beta": "x"}}, "llama_4_scaling_beta"),
        ("Qwen3VLForConditionalGeneration", {}, "text_config is missing"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"rope_type": "default"}}, "per layer type"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("Gemma4ForCausalLM", GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("Gemma4ForCausalLM", GEMMA4 | {"rope_parameters": {"rope_type": "default"}}, "per layer type"),
        ("Gemma4ForCausalLM", {"vocab_size_per_layer_input": 64}, "vocab_size_per_layer_input is 64"),
        ("Gemma4ForCausalLM", GEMMA4 | {"num_kv_shared_layers": 3}, "leaves nothing to share"),
        ("Gemma4ForCausalLM", GEMMA4 | {"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5"),
        ("Gemma4ForCausalLM", GEMMA4 | {"enable_moe_block": True}, "num_experts is missing"),
        (
            "Gemma4ForCausalLM",
            GEMMA4 | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5},
            "top_k_experts is 5",
        ),
        ("Gemma4ForCausalLM", GEMMA4 | {"per_layer_config": {"3": {"window": 3}}}, "per_layer_config has window"),
        (
            "Olmo3ForCausalLM",
            {"rope_scaling": {"rope_type": "yarn", "truncate": False}},
            "truncate is false for a layer",
        ),
        ("Gemma4ForCausalLM", GEMMA4 | {"per_layer_config": {"4": {}}}, "per_layer_config has 4, expected numbers of"),
        ("Gemma4ForCausalLM", GEMMA4 | {"per_layer_config": {"x": {}}}, "per_layer_config has x, expected numbers of"),
        (
            "Gemma4ForCausalLM",
            GEMMA4 | {"rope_parameters": {"full_attention": {"rope_type": "linear", "partial_rotary_factor": 0.5}}},
            "partial_rotary_factor is 0.5, which does not fit",
        ),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba"] * 4}, "no layer of attention"),
        ("GraniteMoeHybridForCausalLM", GRANITE | {"mamba_d_head": 64}, "mamba_n_heads is 4, of 64 numbers each"),
        ("GraniteMoeHybridForCausalLM", GRANITE | {"mamba_n_groups": 3}, "3 groups of a state space do not divide"),
        ("GraniteMoeHybridForCausalLM", GRANITE | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("GraniteMoeHybridForCausalLM", GRANITE | {"position_embedding_type": "alibi"}, "position_embedding_type is"),
        ("GraniteMoeHybridForCausalLM", GRANITE | {"time_step_limit": [0.0]}, "expected two numbers"),
        ("GraniteMoeHybridForCausalLM", GRANITE | {"time_step_limit": [0.0, "x"]}, "time_step_limit has 'x'"),
        ("GraniteMoeHybridForCausalLM", GRANITE | {"time_step_limit": [2.0, 1.0]}, "the lesser first"),
        ("NemotronHForCausalLM", {}, "hybrid_override_pattern has 0 layers"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M-"}, "no layer of attention"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*X"}, "expected letters of M\\*-E"),
        ("NemotronHForCausalLM", {"layers_block_type": ["conv"]}, "layer_types conv are not supported"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*", "mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*", "sliding_window": 8}, "sliding_window is not"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*E", "mlp_bias": True}, "mlp_bias is not supported"),
    ],
)
def test_refusals_name_what_is_wrong(architecture: str, hf: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(architecture, **hf)


def test_deepseek_v3_as_it_is() -> None:
    """The sizes and factors of the published config.json, whose keys are older than HF's class."""
    hf = {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "ep_size": 1,
        "max_position_embeddings": 163_840,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }
    config = read("DeepseekV3ForCausalLM", **hf)
    dense, sparse = config.layers[2], config.layers[3]
    assert (dense.moe, sparse.num_heads, sparse.num_kv_heads, sparse.head_dim) == (None, 128, 1, 576)
    assert sparse.latent == LatentSpec(rank=512, q_rank=1536, nope_dim=128, rope_dim=64, v_dim=128)
    assert sparse.moe is not None
    assert (sparse.moe.num_groups, sparse.moe.top_groups, sparse.moe.group_best) == (8, 4, 2)
    # Its authors' factor is (0.1 ln 40 + 1)^2 / sqrt(192).
    assert sparse.scale == pytest.approx(1.8738542 / 192**0.5)
    [rope] = config.ropes
    assert (rope.interleaved, rope.attention_factor, rope.factor) == (True, 1.0, 40.0)
    [group] = LayerPlan(config.layers).groups
    assert (group.num_heads, group.num_kv_heads, group.head_dim, group.latent_dim) == (128, 1, 576, 512)


def test_granite4_reads_what_it_leaves_out_and_older_names() -> None:
    config = read("GraniteMoeHybridForCausalLM", **GRANITE, num_local_experts=0, position_embedding_type="nope")
    state, attention = config.layers[:2]
    scan = ScanSpec(num_heads=4, head_dim=32, num_groups=1, state_dim=256, conv_size=4)
    assert (state.state, attention.state) == (scan, None)
    assert (attention.rope, attention.moe, attention.intermediate_size, attention.scale) == (None, None, 1024, 1.0)
    infinite = {"time_step_limit": [0.0, {"__float__": "Infinity"}], "layers_block_type": GRANITE["layer_types"]}
    same = {"mamba_n_heads": 4, "mamba_d_head": "auto", "num_local_experts": 0} | infinite
    assert read("GraniteMoeHybridForCausalLM", **same) == config
    rotated = read("GraniteMoeHybridForCausalLM", **GRANITE, position_embedding_type="rope")
    assert [layer.rope for layer in rotated.layers] == [None, 0, None, 0]


def test_nemotron_h_has_a_part_in_each_layer() -> None:
    sizes = {"num_key_value_heads": 2}
    config = read("NemotronHForCausalLM", **sizes, hybrid_override_pattern="M-*EM", mamba_n_groups=4)
    types = ["mamba", "mlp", "attention", "moe", "linear_attention"]
    assert read("NemotronHForCausalLM", **sizes, layers_block_type=types, n_groups=4) == config
    assert [(layer.has_mixer, layer.has_mlp) for layer in config.layers] == [
        *((True, False), (False, True), (True, False), (False, True), (True, False)),
    ]
    assert [layer.moe is not None for layer in config.layers] == [False] * 3 + [True, False]
    attention, state = LayerPlan(config.layers).groups.items()
    assert (attention[0].state, attention[1]) == (None, (2,))
    assert (state[0].state, state[1]) == (config.layers[0].state, (0, 4))


JUNK = (None, True, -1, 0, 1, 1.5, 10**30, 1e300, float("nan"), "x", [], [1], {}, {"x": 1})


@pytest.mark.parametrize("case", CASES)
def test_any_value_gives_a_config_or_value_error(case: str) -> None:
    hf = read_hf_config(case)
    family = get_family(hf["architectures"][0])
    refusals: list[str] = []
    objects = [hf, *(value for value in hf.values() if isinstance(value, dict))]
    objects += [value for each in objects[1:] for value in each.values() if isinstance(value, dict)]
    for values in objects:
        for name, original in list(values.items()):
            for junk in JUNK:
                values[name] = junk
                try:
                    config = family.read_config(hf)
                except ValueError as error:
                    refusals.append(str(error))
                else:
                    assert hash(config) == hash(family.read_config(hf))
            values[name] = original
    assert refusals
    assert all(refusal.startswith("config.json: ") for refusal in refusals)
