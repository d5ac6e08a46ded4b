"""Gemma 3 text: Gemma 2 with norms on q and k for soft caps; sliding and global layers, each kind its own RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_int, read_mapping
from ..reading import LAYER_TYPES, is_tied_wrapper, read_layer_types, read_num_layers, read_rope, read_text_config
from .gemma2 import DEFAULTS as GEMMA2_DEFAULTS
from .gemma2 import GEMMA_NAMES, read_gemma

# HF's values for keys that a config.json leaves out, as Gemma's own do.
DEFAULTS = GEMMA2_DEFAULTS | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


def gemma3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Gemma 3 text-only config.json."""
    return _read("Gemma3ForCausalLM", hf)


def gemma3_multimodal_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a multimodal Gemma 3 config.json."""
    text = read_text_config(hf, "gemma3_text")
    return _read("Gemma3ForConditionalGeneration", text, tie_word_embeddings=is_tied_wrapper(DEFAULTS | dict(hf), text))


def _read(architecture: str, hf: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    hf = DEFAULTS | dict(hf)
    num_layers = read_num_layers(hf)
    period = read_int(hf, "sliding_window_pattern", read_int(hf, "_sliding_window_pattern", 6))
    pattern = tuple("sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers))
    layer_types = read_layer_types(hf, pattern)
    settings = _rope_settings(hf)
    kinds = [kind for kind in LAYER_TYPES if kind in layer_types]
    return read_gemma(
        hf,
        architecture,
        layer_types,
        qk_norm=True,
        ropes=tuple(read_rope(hf, settings[kind]) for kind in kinds),
        layers={"rope": tuple(kinds.index(kind) for kind in layer_types)},
        **overrides,
    )


def _rope_settings(hf: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return RoPE settings by layer type; scaling in the old keys applies to the global layers only."""
    given = read_mapping(hf, "rope_parameters")
    flat = sorted(set(given) - set(LAYER_TYPES))
    if flat:
        raise ValueError(f"Gemma 3's rope_parameters are per layer type, but there is {', '.join(flat)}")
    settings = {kind: read_mapping(given, kind) for kind in LAYER_TYPES}
    settings["full_attention"].update(read_mapping(hf, "rope_scaling"))
    settings["full_attention"].setdefault("rope_theta", hf.get("rope_theta", 1_000_000.0))
    settings["sliding_attention"].setdefault("rope_theta", hf.get("rope_local_base_freq", 10_000.0))
    return settings


GEMMA3 = Family(config_from_hf=gemma3_config, names=GEMMA_NAMES)
GEMMA3_MULTIMODAL = Family(
    config_from_hf=gemma3_multimodal_config,
    names=GEMMA_NAMES,
    is_wrapper=True,
)
