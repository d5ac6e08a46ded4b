"""The config.json of real models, for programs that need shapes and no weights."""

from __future__ import annotations

from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 128_256,
    "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
LONG: dict[str, Any] = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG |= {"original_max_position_embeddings": 8192}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "vocab_size": 151_936,
    "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "rope_scaling": None, "sliding_window": None,
    "use_sliding_window": False, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
BERT: dict[str, Any] = {
    "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 30_522, "hidden_act": "gelu",
    "num_attention_heads": 12, "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "dtype": "bfloat16", "vocab_size": 248_320, "head_dim": 256, "hidden_act": "silu", "attention_bias": False,
    "max_position_embeddings": 262_144, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attn_output_gate": True,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}  # fmt: skip
"""The common settings of Qwen3.6's text models."""
LATENT: dict[str, Any] = {
    "torch_dtype": "bfloat16", "hidden_act": "silu", "max_position_embeddings": 163_840, "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "attention_bias": False,
    "tie_word_embeddings": False, "moe_layer_freq": 1, "rope_theta": 10_000,
}  # fmt: skip
YARN: dict[str, Any] = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32}
YARN |= {"beta_slow": 1}
FP8_BLOCKS: dict[str, Any] = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
}  # fmt: skip
AWQ: dict[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": None,
}  # fmt: skip
WHISPER: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "torch_dtype": "float16",
    "vocab_size": 51_866, "num_mel_bins": 128, "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120, "decoder_attention_heads": 20, "decoder_ffn_dim": 5120, "activation_function": "gelu",
    "max_source_positions": 1500, "max_target_positions": 448, "scale_embedding": False, "bos_token_id": 50_257,
    "eos_token_id": 50_257, "pad_token_id": 50_256, "decoder_start_token_id": 50_258,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": LLAMA | {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 131_072,
        "rope_scaling": LONG | {"factor": 32.0},
    },
    "llama-3-8b": LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "head_dim": 128, "tie_word_embeddings": False,
    },
    "llama-3.3-70b": LLAMA | {
        "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "head_dim": 128, "tie_word_embeddings": False, "max_position_embeddings": 131_072,
        "rope_scaling": LONG | {"factor": 8.0},
    },
    "llama-3.1-405b": LLAMA | {
        "hidden_size": 16_384, "intermediate_size": 53_248, "num_hidden_layers": 126, "num_attention_heads": 128,
        "head_dim": 128, "tie_word_embeddings": False, "max_position_embeddings": 131_072,
        "rope_scaling": LONG | {"factor": 8.0},
    },
    "smollm2-135m": LLAMA | {
        "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "max_window_layers": 36,
    },
    "qwen3-8b-awq": QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "max_window_layers": 36, "torch_dtype": "float16", "quantization_config": AWQ,
    },
    "qwen3-32b": QWEN3 | {
        "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "max_window_layers": 64,
    },
    "qwen3-32b-awq": QWEN3 | {
        "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "max_window_layers": 64, "torch_dtype": "float16",
        "quantization_config": AWQ,
    },
    "qwen3-30b-a3b": QWEN3 | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "max_window_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "torch_dtype": "bfloat16",
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "sliding_window": None, "tie_word_embeddings": False,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
        "attention_bias": True, "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128,
        "rope_theta": 150_000, "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False,
        },
        "num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "gemma-4-26b": {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "gemma4_text", "dtype": "bfloat16", "vocab_size": 262_144, "hidden_size": 2816,
            "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
            "num_global_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": True,
            "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 262_144, "rms_norm_eps": 1e-6,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5, "sliding_window": 1024,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
            "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
            "final_logit_softcapping": 30.0, "attention_bias": False, "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 262_144, "use_double_wide_mlp": False,
            "use_bidirectional_attention": "vision", "tie_word_embeddings": True,
        },
    },
    "qwen3.5-0.8b": DELTA | {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 1024,
        "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
        "linear_num_value_heads": 16, "tie_word_embeddings": True,
    },
    "qwen3.6-27b": {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": False,
        "text_config": DELTA | {
            "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 64,
            "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48,
        },
    },
    "qwen3.6-35b-a3b": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False, "text_config": DELTA | {
            "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
            "num_key_value_heads": 2, "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        },
    },
    "deepseek-v2-lite": LATENT | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102_400,
        "hidden_size": 2048, "intermediate_size": 10_944, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": None, "moe_intermediate_size": 1408, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "topk_method": "greedy",
        "norm_topk_prob": False, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek-v3": LATENT | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129_280,
        "hidden_size": 7168, "intermediate_size": 18_432, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "q_lora_rank": 1536, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
        "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "quantization_config": FP8_BLOCKS,
    },
    "glm-5": LATENT | {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "vocab_size": 154_880,
        "hidden_size": 6144, "intermediate_size": 12_288, "num_hidden_layers": 78, "num_attention_heads": 64,
        "num_key_value_heads": 64, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256,
        "max_position_embeddings": 202_752, "rms_norm_eps": 1e-5, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 3,
        "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "quantization_config": FP8_BLOCKS,
    },
    "kimi-linear-48b": {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16",
        "vocab_size": 163_840, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 64, "hidden_act": "silu",
        "model_max_length": 1_048_576, "rms_norm_eps": 1e-5, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "attention_bias": False,
        "layer_types": [
            *[*["linear_attention"] * 3, "full_attention"] * 6, *["linear_attention"] * 2, "full_attention",
        ],
        "linear_attn_config": {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4},
        "moe_intermediate_size": 1024, "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
        "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True, "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1, "mlp_layer_types": ["dense"] + ["sparse"] * 26, "tie_word_embeddings": False,
    },
    "mimo-v2-flash": {
        "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "torch_dtype": "bfloat16",
        "vocab_size": 152_576, "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 48,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
        "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, *[0, 1, 1, 1, 1, 1] * 7, 0], "moe_layer_freq": [0] + [1] * 47,
        "sliding_window": 128, "sliding_window_size": 128, "rope_theta": 5_000_000, "swa_rope_theta": 10_000,
        "partial_rotary_factor": 0.334, "attention_value_scale": 0.707, "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False, "attention_bias": False, "layernorm_epsilon": 1e-5,
        "max_position_embeddings": 262_144, "tie_word_embeddings": False, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": None, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": None, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "quantization_config": FP8_BLOCKS | {
            "ignored_layers": [f"model.layers.{layer}.self_attn.o_proj" for layer in range(48)],
        },
    },
    "hy3": {
        "architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "dtype": "bfloat16", "vocab_size": 120_832,
        "hidden_size": 4096, "intermediate_size": 13_312, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "num_experts": 192, "num_experts_per_tok": 8,
        "num_shared_experts": 1, "moe_intermediate_size": 1536, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5,
        "router_scaling_factor": 2.826, "qk_norm": True, "route_norm": True, "max_position_embeddings": 262_144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 11_158_840.0}, "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
    },
    "minilm-l6": BERT | {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6},
    "bert-base": BERT | {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
    "modernbert-base": {
        "architectures": ["ModernBertModel"], "model_type": "modernbert", "vocab_size": 50_368, "hidden_size": 768,
        "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12, "hidden_activation": "gelu",
        "max_position_embeddings": 8192, "norm_eps": 1e-5, "local_attention": 128, "global_attn_every_n_layers": 3,
        "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "norm_bias": False, "attention_bias": False,
        "mlp_bias": False,
    },
    "embeddinggemma-300m": {
        "architectures": ["Gemma3TextModel"], "model_type": "gemma3_text", "torch_dtype": "float32",
        "vocab_size": 262_144, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 24,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4, "sliding_window": 512,
        "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "use_bidirectional_attention": True,
        "attention_bias": False,
    },
    # The hub's config.json names Qwen3ForCausalLM; files of sentence-transformers make it an embedding model.
    "qwen3-embedding-0.6b": QWEN3 | {
        "architectures": ["Qwen3Model"], "vocab_size": 151_669, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "max_position_embeddings": 32_768, "max_window_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-vl-8b": {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": False,
        "image_token_id": 151_655, "video_token_id": 151_656, "vision_start_token_id": 151_652,
        "vision_end_token_id": 151_653, "text_config": {
            "model_type": "qwen3_vl_text", "dtype": "bfloat16", "vocab_size": 151_936, "hidden_size": 4096,
            "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 262_144, "rms_norm_eps": 1e-6,
            "rope_theta": 5_000_000, "attention_bias": False, "rope_scaling": {
                "rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20],
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
            "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "out_hidden_size": 4096, "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 256,
        "boi_token_index": 255_999, "eoi_token_index": 256_000, "image_token_index": 262_144, "text_config": {
            "model_type": "gemma3_text", "dtype": "bfloat16", "vocab_size": 262_208, "hidden_size": 2560,
            "intermediate_size": 10_240, "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 1024, "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "image_size": 896,
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    },
    "mistral-small-3.1": {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 10,
        "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "vision_feature_layer": -1, "text_config": {
            "model_type": "mistral", "dtype": "bfloat16", "vocab_size": 131_072, "hidden_size": 5120,
            "intermediate_size": 32_768, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000_000.0, "sliding_window": None, "tie_word_embeddings": False,
        },
        "vision_config": {
            "model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
            "num_attention_heads": 16, "head_dim": 64, "hidden_act": "silu", "image_size": 1540, "num_channels": 3,
            "patch_size": 14, "rope_theta": 10_000.0,
        },
    },
    "whisper-large-v3": WHISPER | {"decoder_layers": 32},
    "whisper-large-v3-turbo": WHISPER | {"decoder_layers": 4},
}  # fmt: skip
MODELS["deepseek-v3.2"] = MODELS["deepseek-v3"] | {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_n_heads": 64,
    "index_head_dim": 128, "index_topk": 2048,
}  # fmt: skip
SMALL_HYBRID: dict[str, Any] = MODELS["qwen3.5-0.8b"] | {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "head_dim": 64,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "rope_parameters": DELTA["rope_parameters"] | {"mrope_section": [3, 3, 2]},
}  # fmt: skip
"""Qwen3.5's layers in a model that answers at once on two cores."""
_SMALL_LATENTS: dict[str, Any] = {
    "dtype": "bfloat16", "vocab_size": 8192, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 2048, "moe_intermediate_size": 512, "n_shared_experts": 1, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SMALL_SPARSE: dict[str, Any] = _SMALL_LATENTS | {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "q_lora_rank": 512,
    "n_routed_experts": 32, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "index_topk": 64, "index_n_heads": 64, "index_head_dim": 128, "max_position_embeddings": 16_384,
}  # fmt: skip
"""DeepSeek V3.2's layers in a small model, whose indexer chooses few enough tokens for short prompts."""
SMALL_DELTA: dict[str, Any] = _SMALL_LATENTS | {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "q_lora_rank": None,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_heads": 16, "linear_head_dim": 128,
    "num_experts": 32, "num_experts_per_token": 4, "mlp_layer_types": ["sparse"] * 4, "first_k_dense_replace": 0,
    "model_max_length": 16_384,
}  # fmt: skip
"""Kimi Linear's layers in a small model: three of delta attention and one over latents."""
TOY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128,
}  # fmt: skip
"""Settings that turn any of these into a toy."""
IMAGE_PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3-vl-8b": {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
        "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    },
    "gemma-3-4b": {
        "image_processor_type": "Gemma3ImageProcessor", "image_seq_length": 256, "size": {"height": 896, "width": 896},
    },
    "mistral-small-3.1": {
        "image_processor_type": "PixtralImageProcessor", "patch_size": 14, "size": {"longest_edge": 1540},
    },
}  # fmt: skip
"""The preprocessor_config.json of models that see."""
TRANSCRIPTS: dict[str, Any] = {
    "begin_suppress_tokens": [220, 50_257], "bos_token_id": 50_257, "decoder_start_token_id": 50_258,
    "eos_token_id": 50_257, "max_initial_timestamp_index": 50, "no_timestamps_token_id": 50_364, "suppress_tokens": [
        1, 2, 7, 8, 9, 10, 14, 25, 26, 27, 28, 29, 31, 58, 59, 60, 61, 62, 63, 90, 91, 92, 93, 359, 503, 522, 542, 873,
        893, 902, 918, 922, 931, 1350, 1853, 1982, 2460, 2627, 3246, 3253, 3268, 3536, 3846, 3961, 4183, 4667, 6585,
        6647, 7273, 9061, 9383, 10_428, 10_929, 11_938, 12_033, 12_331, 12_562, 13_793, 14_157, 14_635, 15_265, 15_618,
        16_553, 16_604, 18_362, 18_956, 20_075, 21_675, 22_520, 26_130, 26_161, 26_435, 28_279, 29_464, 31_650, 32_302,
        32_470, 36_865, 42_863, 47_425, 49_870, 50_254, 50_258, 50_359, 50_360, 50_361, 50_362, 50_363,
    ],
}  # fmt: skip
GENERATION_CONFIGS: dict[str, dict[str, Any]] = {
    "whisper-large-v3": TRANSCRIPTS | {
        "alignment_heads": [
            [7, 0], [10, 17], [12, 18], [13, 12], [16, 1], [17, 14], [19, 11], [21, 4], [24, 1], [25, 6],
        ],
    },
    "whisper-large-v3-turbo": TRANSCRIPTS | {
        "alignment_heads": [[2, 4], [2, 11], [3, 3], [3, 6], [3, 11], [3, 14]],
    },
}  # fmt: skip
"""The generation_config.json of models that hear, as far as an engine reads it."""
HUB_IDS = {
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "llama-3.1-405b": "meta-llama/Llama-3.1-405B-Instruct",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-8b-awq": "Qwen/Qwen3-8B-AWQ",
    "qwen3-32b-awq": "Qwen/Qwen3-32B-AWQ",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gemma-4-26b": "google/gemma-4-26B-A4B-it",
    "qwen3.6-27b": "Qwen/Qwen3.6-27B",
    "qwen3.6-35b-a3b": "Qwen/Qwen3.6-35B-A3B",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "deepseek-v3.2": "deepseek-ai/DeepSeek-V3.2",
    "glm-5": "zai-org/GLM-5",
    "kimi-linear-48b": "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    "mimo-v2-flash": "XiaomiMiMo/MiMo-V2-Flash",
    "hy3": "tencent/Hy3-preview",
    "qwen3-vl-8b": "Qwen/Qwen3-VL-8B-Instruct",
    "gemma-3-4b": "google/gemma-3-4b-it",
    "mistral-small-3.1": "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "whisper-large-v3": "openai/whisper-large-v3",
    "whisper-large-v3-turbo": "openai/whisper-large-v3-turbo",
    "minilm-l6": "sentence-transformers/all-MiniLM-L6-v2",
    "qwen3-embedding-0.6b": "Qwen/Qwen3-Embedding-0.6B",
}


def with_layers(hf: dict[str, Any], num_layers: int | None) -> dict[str, Any]:
    """Return a model's config.json with its first layers only, or unchanged for None.

    Two layers of Whisper's plan, self-attention and cross-attention, are one here, and one of the encoder.
    """
    if num_layers is None:
        return hf
    if "decoder_layers" in hf:
        return hf | dict.fromkeys(("encoder_layers", "decoder_layers"), num_layers // 2)
    if "text_config" in hf:
        return hf | {"text_config": with_layers(hf["text_config"], num_layers)}
    by_layer = ("layer_types", "mlp_layer_types", "hybrid_layer_pattern", "moe_layer_freq")
    lists = {name: hf[name][:num_layers] for name in by_layer if isinstance(hf.get(name), list)}
    return hf | {"num_hidden_layers": num_layers} | lists
