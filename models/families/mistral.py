"""Mistral: Llama with a sliding window over all layers. Ministral 3: queries also grow with their positions.

Both are also read as the text part of the multimodal `mistral3` wrapper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig, QueryScaling
from ..family import Family
from ..fields import read_int, read_mapping, read_optional_float, read_optional_int
from ..reading import (
    is_tied_wrapper,
    read_decoder,
    read_num_layers,
    read_rope_settings,
    read_text_config,
    read_trained_positions,
)
from .llama import LLAMA_NAMES

# HF's values for keys that a config.json leaves out.
DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096}
_MINISTRAL3_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262_144,
}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _mistral_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Mistral config.json."""
    return _read("MistralForCausalLM", hf)


def _mistral3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a `mistral3` config.json, which is a Mistral or a Ministral 3."""
    is_ministral3 = read_mapping(hf, "text_config").get("model_type") == "ministral3"
    text = read_text_config(hf, "ministral3" if is_ministral3 else "mistral")
    read = _read_ministral3 if is_ministral3 else _read
    return read("Mistral3ForConditionalGeneration", text, tie_word_embeddings=is_tied_wrapper(hf, text))


def _ministral3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Ministral 3 config.json."""
    return _read_ministral3("Ministral3ForCausalLM", hf)


def _read(architecture: str, hf: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    hf = DEFAULTS | dict(hf)
    windows = (read_optional_int(hf, "sliding_window"),) * read_num_layers(hf)
    return read_decoder(hf, architecture=architecture, layers={"window": windows}, **overrides)


def _read_ministral3(architecture: str, hf: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    hf = _MINISTRAL3_DEFAULTS | {"sliding_window": None} | dict(hf)
    if not hf.get("rope_parameters") and not hf.get("rope_scaling"):
        hf["rope_parameters"] = _MINISTRAL3_ROPE
    settings = read_rope_settings(hf)
    if (beta := read_optional_float(settings, "llama_4_scaling_beta")) is not None:
        trained = read_trained_positions(hf, settings, read_int(hf, "max_position_embeddings"))
        overrides["query_scaling"] = QueryScaling(beta, trained)
    return _read(architecture, hf, **overrides)


FAMILIES = {
    "MistralForCausalLM": Family(config_from_hf=_mistral_config, names=LLAMA_NAMES),
    "Mistral3ForConditionalGeneration": Family(
        config_from_hf=_mistral3_config,
        names=LLAMA_NAMES,
        is_wrapper=True,
    ),
    "Ministral3ForCausalLM": Family(config_from_hf=_ministral3_config, names=LLAMA_NAMES),
}
