"""Qwen3.5 and Qwen3.6: the layers of Qwen3-Next, with MLPs or experts, also in a multimodal wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..names import TensorName
from ..reading import is_tied_wrapper, read_text_config
from .llama import LLAMA_NAMES
from .qwen3_next import DEFAULTS, DELTA, DELTA_DEFAULTS, DELTA_NAMES, SPLIT_NAMES, read_delta_decoder, read_gated_moe
from .qwen_moe import FUSED_EXPERTS, QWEN2_MOE_NAMES
from .qwen_vl import QWEN3_5_TOWER, with_plain_rope, with_three_positions

_PROJECTION_NAMES = {
    **SPLIT_NAMES,
    "layers.recurrent.beta": TensorName(DELTA + "in_proj_b.weight", "c d -> c d"),
    "layers.recurrent.decay": TensorName(DELTA + "in_proj_a.weight", "c d -> c d"),
}
_QWEN3_5_NAMES = MappingProxyType({**LLAMA_NAMES, **DELTA_NAMES, **_PROJECTION_NAMES})
_QWEN3_5_MOE_NAMES = MappingProxyType({**QWEN2_MOE_NAMES, **DELTA_NAMES, **_PROJECTION_NAMES})
_MOE_DEFAULTS: dict[str, Any] = DEFAULTS | {"num_experts": 256, "num_experts_per_tok": 8}


def _qwen3_5_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Qwen3.5 config.json of a text model."""
    return _read(hf, "Qwen3_5ForCausalLM")


def _qwen3_5_moe_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Qwen3.5 config.json of a text model with experts."""
    return _read_moe(hf, "Qwen3_5MoeForCausalLM")


def _qwen3_5_multimodal_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a Qwen3.5 config.json."""
    text = read_text_config(hf, "qwen3_5_text")
    return _read(text, "Qwen3_5ForConditionalGeneration", tie_word_embeddings=_is_tied(hf, text))


def _qwen3_5_moe_multimodal_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a Qwen3.5 config.json with experts."""
    text = read_text_config(hf, "qwen3_5_moe_text")
    return _read_moe(text, "Qwen3_5MoeForConditionalGeneration", tie_word_embeddings=_is_tied(hf, text))


def _is_tied(hf: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    return is_tied_wrapper({"tie_word_embeddings": False} | dict(hf), text)


def _read(hf: Mapping[str, Any], architecture: str, **fields: Any) -> ModelConfig:
    text = DELTA_DEFAULTS | {"intermediate_size": 12_288, "num_key_value_heads": 4} | with_plain_rope(hf)
    return with_three_positions(read_delta_decoder(text, architecture, **fields), hf, interleaved=True)


def _read_moe(hf: Mapping[str, Any], architecture: str, **fields: Any) -> ModelConfig:
    text = _MOE_DEFAULTS | with_plain_rope(hf)
    config = read_delta_decoder(text, architecture, {"moe": read_gated_moe(text)}, **fields)
    return with_three_positions(config, hf, interleaved=True)


_WRAPPER: dict[str, Any] = {"is_wrapper": True, "vision": QWEN3_5_TOWER}
# The multi-token-prediction layers are left out.
_OTHERS = ("mtp.*", "model.mtp.*")
# Qwen's own checkpoints have one tensor for all experts; converted ones have a tensor for each.
_MOE_NAMES: dict[str, Any] = {"names": _QWEN3_5_MOE_NAMES, "other_names": (FUSED_EXPERTS,)}
FAMILIES = {
    "Qwen3_5ForCausalLM": Family(config_from_hf=_qwen3_5_config, names=_QWEN3_5_NAMES, leaves_out=_OTHERS),
    "Qwen3_5MoeForCausalLM": Family(config_from_hf=_qwen3_5_moe_config, leaves_out=_OTHERS, **_MOE_NAMES),
    "Qwen3_5ForConditionalGeneration": Family(
        config_from_hf=_qwen3_5_multimodal_config, names=_QWEN3_5_NAMES, leaves_out=_OTHERS, **_WRAPPER
    ),
    "Qwen3_5MoeForConditionalGeneration": Family(
        config_from_hf=_qwen3_5_moe_multimodal_config, leaves_out=_OTHERS, **_WRAPPER, **_MOE_NAMES
    ),
}
