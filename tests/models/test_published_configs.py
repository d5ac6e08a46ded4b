"""Models of published sizes have as many parameters as their publishers count."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxllm.models import ModelSpecs, get_family

pytestmark = pytest.mark.models


def sizes(vocab: int, width: int, mlp: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    """Return the keys that all configs have."""
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


PUBLISHED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Pythia-160m": ("GPTNeoXForCausalLM", 162_322_944, sizes(50_304, 768, 3072, 12, 12, 12)),
    "Phi-2": ("PhiForCausalLM", 2_779_683_840, sizes(51_200, 2560, 10_240, 32, 32, 32)),
    "Gemma 2B": ("GemmaForCausalLM", 2_506_172_416, sizes(256_000, 2048, 16_384, 18, 8, 1)),
    "StableLM 2 1.6B": (
        "StableLmForCausalLM",
        1_644_515_328,
        sizes(100_352, 2048, 5632, 24, 32, 32) | {"use_qkv_bias": True},
    ),
    "StarCoder2-3B": ("Starcoder2ForCausalLM", 3_030_371_328, sizes(49_152, 3072, 12_288, 30, 24, 2)),
    "OLMoE-1B-7B": ("OlmoeForCausalLM", 6_919_161_856, sizes(50_304, 2048, 1024, 16, 16, 16)),
    "Aya 23 8B": ("CohereForCausalLM", 8_028_033_024, sizes(256_000, 4096, 14_336, 32, 32, 8)),
    "GLM-4-9B-0414": ("Glm4ForCausalLM", 9_400_279_040, sizes(151_552, 4096, 13_696, 40, 32, 2)),
    "ERNIE-4.5-0.3B": ("Ernie4_5ForCausalLM", 360_748_032, sizes(103_424, 1024, 3072, 18, 16, 2)),
    "ERNIE-4.5-21B-A3B": ("Ernie4_5_MoeForCausalLM", 21_825_437_888, sizes(103_424, 2560, 12_288, 28, 20, 4)),
    "Granite 3.1 2B": (
        "GraniteForCausalLM",
        2_533_531_648,
        sizes(49_155, 2048, 8192, 40, 32, 8) | {"tie_word_embeddings": True},
    ),
    "Seed-OSS-36B": ("SeedOssForCausalLM", 36_151_104_512, sizes(155_136, 5120, 27_648, 64, 80, 8)),
    "Hunyuan-A13B": (
        "HunYuanMoEV1ForCausalLM",
        80_393_183_232,
        sizes(128_167, 4096, 3072, 32, 32, 8)
        | {
            "num_experts": 64,
            "moe_topk": [8] * 32,
            "moe_intermediate_size": [3072] * 32,
            "num_shared_expert": [1] * 32,
            "use_qk_norm": True,
            "use_cla": False,
            "tie_word_embeddings": True,
        },
    ),
    "InternLM3-8B": (
        "InternLM3ForCausalLM",
        8_804_241_408,
        sizes(128_512, 4096, 10_240, 48, 32, 2) | {"qkv_bias": False, "bias": False},
    ),
    "EXAONE-4.0-1.2B": (
        "Exaone4ForCausalLM",
        1_279_391_488,
        sizes(102_400, 2048, 4096, 30, 32, 8) | {"head_dim": 64, "tie_word_embeddings": True, "sliding_window": None},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    architecture, count, hf = PUBLISHED[name]
    config = get_family(architecture).read_config(hf)
    assert sum(math.prod(spec.shape) for spec in ModelSpecs(config, "bfloat16").param_specs().values()) == count


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("StableLmForCausalLM", {"qk_layernorm": True}, "qk_layernorm is True"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("Ernie4_5_MoeForCausalLM", {"use_bias": True}, "use_bias is True"),
        ("Ernie4_5_MoeForCausalLM", {"moe_norm_min": 0.1}, "moe_norm_min is 0.1"),
        ("HunYuanMoEV1ForCausalLM", {"num_shared_expert": [1, 2]}, r"num_shared_expert is \[1, 2\]"),
        ("HunYuanMoEV1ForCausalLM", {"moe_intermediate_size": 8}, "moe_intermediate_size is 8"),
        ("HunYuanMoEV1ForCausalLM", {"moe_topk": [1]}, "moe_topk has 1 numbers, and there are 2 layers"),
        ("HunYuanDenseV1ForCausalLM", {"use_cla": True}, "use_cla is True"),
        ("AfmoeForCausalLM", {"score_func": "softmax"}, "score_func is 'softmax'"),
        ("AfmoeForCausalLM", {"attention_bias": True}, "attention_bias is True"),
        ("ApertusForCausalLM", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ("Cohere2ForCausalLM", {"use_parallel_block": False}, "use_parallel_block is False"),
        ("GraniteMoeForCausalLM", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("GPTNeoXForCausalLM", {"num_attention_heads": 3}, "not a multiple of 3 heads"),
        ("PhiForSequenceClassification", {"classifier_from_token": [1, 2]}, "output head has a bias"),
    ],
)
def test_what_is_not_supported_is_named(architecture: str, change: dict[str, Any], message: str) -> None:
    hf = sizes(64, 32, 16, 2, 2, 1) | change
    with pytest.raises(ValueError, match=message):
        get_family(architecture).read_config(hf)
