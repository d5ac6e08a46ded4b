"""MiniMax M2: attention whose queries and keys are normed over all heads, and experts with sigmoid scores."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec
from ..family import Family
from ..fields import read_int, require
from ..names import TensorName
from ..reading import read_decoder
from .mixtral import MIXTRAL_NAMES

_MINIMAX_M2_NAMES = MappingProxyType(
    {
        **MIXTRAL_NAMES,
        "layers.mlp.router.correction": TensorName(
            "{body}layers.{l}.block_sparse_moe.e_score_correction_bias", "e -> e"
        ),
        "layers.attn.q_norm.scale": TensorName("{body}layers.{l}.self_attn.q_norm.weight", "(n h) -> n h"),
        "layers.attn.k_norm.scale": TensorName("{body}layers.{l}.self_attn.k_norm.weight", "(k h) -> k h"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 196_608,
    "rope_theta": 5_000_000.0,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}


def _minimax_m2_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a MiniMax M2 config.json."""
    hf = DEFAULTS | dict(hf)
    require(hf, scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True, qk_norm_type="per_layer")
    # Checkpoints on the hub say by rotary_dim how much of a head is rotated.
    if hf.get("rotary_dim") is not None:
        hf.setdefault("partial_rotary_factor", read_int(hf, "rotary_dim") / read_int(hf, "head_dim"))
    moe = MoESpec(
        num_experts=read_int(hf, "num_local_experts"),
        top_k=read_int(hf, "num_experts_per_tok"),
        intermediate_size=read_int(hf, "intermediate_size"),
        sigmoid=True,
        correction_bias=True,
        normalizes=True,
    )
    return read_decoder(
        hf, architecture="MiniMaxM2ForCausalLM", rotates_part=True, qk_norm=True, qk_norm_all_heads=True, moe=moe
    )


FAMILIES = {"MiniMaxM2ForCausalLM": Family(config_from_hf=_minimax_m2_config, names=_MINIMAX_M2_NAMES)}
