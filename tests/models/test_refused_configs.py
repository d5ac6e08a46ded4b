"""Settings that a family does not support are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.models import get_family

pytestmark = pytest.mark.models


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("HYV3ForCausalLM", {"qk_norm": False}, "qk_norm is False"),
        ("HYV3ForCausalLM", {"mlp_layer_types": ["dense"]}, r"mlp_layer_types is \['dense'\]"),
        ("MiMoV2FlashForCausalLM", {"n_shared_experts": 1}, "n_shared_experts is 1"),
        ("MiMoV2FlashForCausalLM", {"v_head_dim": 256}, "v_head_dim is 256, and head_dim 192"),
        (
            "MiMoV2ForCausalLM",
            {"attention_projection_layout": "fused_qkv"},
            "attention_projection_layout is 'fused_qkv'; only q_proj, k_proj and v_proj",
        ),
        ("Cohere2MoeForCausalLM", {"expert_selection_fn": "relu"}, "expert_selection_fn is 'relu'"),
        ("Step3p5ForCausalLM", {"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate is False"),
        ("Step3p5ForCausalLM", {"moe_layers_enum": "3,x"}, "moe_layers_enum is '3,x'"),
        ("BailingMoeV2ForCausalLM", {"use_qk_norm": False, "moe_intermediate_size": 8}, "use_qk_norm is False"),
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
        ("FalconH1ForCausalLM", {"mlp_multipliers": [1.0]}, "mlp_multipliers has 1 numbers"),
        ("FalconH1ForCausalLM", {"mamba_proj_bias": True}, "projectors_bias is not"),
        ("FalconH1ForCausalLM", {"mlp_bias": True}, "mlp_bias is True"),
        ("FalconH1ForCausalLM", {"mamba_n_heads": 7}, "mamba_n_heads is 7"),
        ("JambaForCausalLM", {"attn_layer_offset": 8}, "attn_layer_offset is 8"),
        ("JambaForCausalLM", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("MambaForCausalLM", {"time_step_rank": "half"}, "time_step_rank is 'half'"),
        ("FalconMambaForCausalLM", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("Mamba2ForCausalLM", {"num_heads": 80}, "num_heads is 80"),
        ("BailingMoeV3ForCausalLM", {"kda_lower_bound": 5.0}, "kda_lower_bound is 5.0, expected a negative number"),
        ("BailingMoeV3ForCausalLM", {"num_experts": 100}, "topk_group is 4 of n_group 8, of 100 experts"),
        ("Lfm3ForCausalLM", {"layer_types": ["conv", "mamba"]}, "mamba are not supported"),
        ("GPTNeoXForCausalLM", {"num_attention_heads": 3}, "not a multiple of 3 heads"),
        ("PhiForSequenceClassification", {"classifier_from_token": [1, 2]}, "output head has a bias"),
    ],
)
def test_what_is_not_supported_is_named(architecture: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_family(architecture).read_config(SIZES | change)
