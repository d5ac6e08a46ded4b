"""A key that a config.json leaves out has the value of HF's class, in every family."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.loading.hf import AutoConfig
from jaxllm.models import get_family
from tests.models.tiny import CASES, read_hf_config

DECODERS = {hf["model_type"]: hf["architectures"][0] for hf in map(read_hf_config, CASES)}
TYPES = {kind: name for kind, name in DECODERS.items() if not get_family(name).is_wrapper}
TYPES |= {"qwen3_5_text": "Qwen3_5ForCausalLM", "bert": "BertModel", "modernbert": "ModernBertModel"}
TYPES |= {"nomic_bert": "NomicBertModel", "gte": "GteModel", "deberta-v2": "DebertaV2Model"}
TYPES |= {"jina_embeddings_v3": "JinaEmbeddingsV3Model", "embedding_gemma2_text": "EmbeddingGemma2TextModel"}
del TYPES["bailing_moe_v2"]  # HF has no class for it
CHANGES: dict[str, dict[str, Any]] = {
    # HF's own values do not make a valid model.
    "deberta-v2": {
        "relative_attention": True,
        "position_biased_input": False,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    },
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
    # HF writes the width of a part of attention's heads under the key that is read without this one.
    "bailing_hybrid": {"linear_head_dim": 128},
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
