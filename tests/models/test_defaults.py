"""A key that a config.json leaves out has the value of HF's class, in every family."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.loading.hf import AutoConfig
from jaxllm.models import get_family

TYPES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "opt": "OPTForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertModel",
    "modernbert": "ModernBertModel",
}
CHANGES: dict[str, dict[str, Any]] = {
    # HF's own values do not make a valid model.
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
}
NEEDED = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("layers_block_type", "num_experts_per_tok"),
}
"""Keys without a default; no file on the hub leaves them out."""


@pytest.mark.parametrize("model_type", TYPES)
def test_keys_that_are_left_out(model_type: str) -> None:
    family, changes = get_family(TYPES[model_type]), CHANGES.get(model_type, {})
    full = AutoConfig.for_model(model_type, **changes).to_dict()
    whole = family.read_config(full)
    for key in full.keys() - NEEDED - changes.keys():
        left = {name: value for name, value in full.items() if name != key}
        assert family.read_config(left) == whole, key
