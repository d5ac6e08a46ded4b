"""Qwen2-MoE and Qwen3-MoE: Qwen2 and Qwen3 with experts in place of the MLP; Qwen2-MoE also has a shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig, MoESpec
from ..family import Family
from ..fields import read_bool, read_int, read_ints, read_optional_int
from ..names import Fused, TensorName
from ..reading import read_decoder, read_layer_types, read_num_layers, windows_of
from .llama import LLAMA_NAMES

MOE_NAMES = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.mlp.router.weight": TensorName("{body}layers.{l}.mlp.gate.weight", "e d -> e d"),
        "layers.mlp.experts.gate": TensorName("{body}layers.{l}.mlp.experts.{e}.gate_proj.weight", "f d -> f d"),
        "layers.mlp.experts.up": TensorName("{body}layers.{l}.mlp.experts.{e}.up_proj.weight", "f d -> f d"),
        "layers.mlp.experts.down": TensorName("{body}layers.{l}.mlp.experts.{e}.down_proj.weight", "d f -> d f"),
    }
)
_GATE_UP, _EXPERTS = Fused(("gate", "up")), "{body}layers.{l}.mlp.experts."
FUSED_EXPERTS = MappingProxyType(
    {
        "layers.mlp.experts.gate": TensorName(f"{_EXPERTS}gate_up_proj", "f d -> f d", _GATE_UP),
        "layers.mlp.experts.up": TensorName(f"{_EXPERTS}gate_up_proj", "f d -> f d", _GATE_UP),
        "layers.mlp.experts.down": TensorName(f"{_EXPERTS}down_proj", "d f -> d f"),
    }
)
"""The names of experts where all of a layer are one tensor, as HF holds them."""

QWEN2_MOE_NAMES = MappingProxyType(
    {
        **MOE_NAMES,
        "layers.mlp.shared.gate": TensorName("{body}layers.{l}.mlp.shared_expert.gate_proj.weight", "f d -> f d"),
        "layers.mlp.shared.up": TensorName("{body}layers.{l}.mlp.shared_expert.up_proj.weight", "f d -> f d"),
        "layers.mlp.shared.down": TensorName("{body}layers.{l}.mlp.shared_expert.down_proj.weight", "d f -> d f"),
        "layers.mlp.shared_gate": TensorName("{body}layers.{l}.mlp.shared_expert_gate.weight", "o d -> o d"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}
_QWEN2_DEFAULTS = {
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
}
_QWEN3_DEFAULTS = {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


def _qwen2_moe_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Qwen2-MoE config.json."""
    hf = DEFAULTS | _QWEN2_DEFAULTS | dict(hf)
    shared = read_int(hf, "shared_expert_intermediate_size", 5632)
    return read_decoder(
        hf,
        architecture="Qwen2MoeForCausalLM",
        qkv_bias=read_bool(hf, "qkv_bias", True),
        layers={"window": _qwen2_moe_windows(hf), "moe": read_qwen_moe(hf, shared_size=shared, shared_gate=True)},
    )


def _qwen3_moe_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Qwen3-MoE config.json."""
    hf = DEFAULTS | _QWEN3_DEFAULTS | dict(hf)
    bias = read_bool(hf, "attention_bias")
    window = read_optional_int(hf, "sliding_window") if read_bool(hf, "use_sliding_window") else None
    return read_decoder(
        hf,
        architecture="Qwen3MoeForCausalLM",
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        window=window,
        layers={"moe": read_qwen_moe(hf)},
    )


def read_qwen_moe(hf: Mapping[str, Any], **fields: Any) -> list[MoESpec | None]:
    """Return each layer's experts: every `decoder_sparse_step`-th layer has some, except `mlp_only_layers`."""
    # Newer versions of HF call num_experts num_local_experts.
    moe = MoESpec(
        num_experts=read_int(hf, "num_local_experts", read_int(hf, "num_experts")),
        top_k=read_int(hf, "num_experts_per_tok"),
        intermediate_size=read_int(hf, "moe_intermediate_size"),
        normalizes=read_bool(hf, "norm_topk_prob"),
        **fields,
    )
    step, dense = read_int(hf, "decoder_sparse_step"), read_ints(hf, "mlp_only_layers")
    layers = range(read_num_layers(hf))
    return [None if layer in dense or (layer + 1) % step else moe for layer in layers]


def _qwen2_moe_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's window; by default every other one of the first `max_window_layers` has it."""
    slides, last = read_bool(hf, "use_sliding_window"), read_int(hf, "max_window_layers", minimum=0)
    default = tuple(
        "sliding_attention" if slides and layer % 2 == 0 and layer < last else "full_attention"
        for layer in range(read_num_layers(hf))
    )
    return windows_of(read_layer_types(hf, default), read_optional_int(hf, "sliding_window") if slides else None)


FAMILIES = {
    "Qwen2MoeForCausalLM": Family(config_from_hf=_qwen2_moe_config, names=QWEN2_MOE_NAMES),
    "Qwen3MoeForCausalLM": Family(config_from_hf=_qwen3_moe_config, names=MOE_NAMES),
}
