"""Programs that need shapes and no weights find here the config.json of real models."""

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
    "smollm2-135m": LLAMA | {
        "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "max_window_layers": 36,
    },
    "qwen3-32b": QWEN3 | {
        "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64,
        "max_window_layers": 64,
    },
}  # fmt: skip
TOY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128,
}  # fmt: skip
"""What makes any of these a toy."""
HUB_IDS = {
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-32b": "Qwen/Qwen3-32B",
}
