"""Gemma 3 text: Gemma 2 with norms on q and k instead of soft caps, and two RoPE tables, for sliding and global layers.

EmbeddingGemma is a Gemma 3 whose attention is not causal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_int
from ..pooling import embedding
from ..reading import is_tied_wrapper, read_layer_types, read_num_layers, read_ropes_by_type, read_text_config
from .gemma2 import DEFAULTS as GEMMA2_DEFAULTS
from .gemma2 import GEMMA_NAMES, read_gemma

# HF's values for keys that a config.json leaves out. Gemma's own leave out many.
DEFAULTS = GEMMA2_DEFAULTS | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": None,
}


def _gemma3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Gemma 3 text-only config.json."""
    return _read("Gemma3ForCausalLM", hf)


def _gemma3_multimodal_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a multimodal Gemma 3 config.json."""
    text = read_text_config(hf, "gemma3_text")
    return _read("Gemma3ForConditionalGeneration", text, tie_word_embeddings=is_tied_wrapper(DEFAULTS | dict(hf), text))


def _gemma3_embedder_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Gemma 3 embedder: with causal attention, or with EmbeddingGemma's."""
    if not read_bool(hf, "use_bidirectional_attention"):
        return embedding(_read("Gemma3TextModel", hf))
    # The window counts the tokens on both sides.
    window = read_int(DEFAULTS | dict(hf), "sliding_window") // 2 + 1
    hf = {**hf, "use_bidirectional_attention": False, "sliding_window": window}
    return embedding(_read("Gemma3TextModel", hf, causal=False), "MEAN")


def _read(architecture: str, hf: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    hf = DEFAULTS | dict(hf)
    num_layers = read_num_layers(hf)
    period = read_int(hf, "sliding_window_pattern", read_int(hf, "_sliding_window_pattern", 6))
    pattern = tuple("sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers))
    layer_types = read_layer_types(hf, pattern)
    theta, local_theta = hf.get("rope_theta", 1_000_000.0), hf.get("rope_local_base_freq", 10_000.0)
    ropes, rope_of = read_ropes_by_type(hf, layer_types, theta, local_theta)
    return read_gemma(
        hf,
        architecture,
        layer_types,
        qk_norm=True,
        soft_cap=None,  # HF reads attn_logit_softcapping but does not use it
        ropes=ropes,
        layers={"rope": rope_of},
        **overrides,
    )


FAMILIES = {
    "Gemma3ForCausalLM": Family(config_from_hf=_gemma3_config, names=GEMMA_NAMES, is_text_part=True),
    "Gemma3ForConditionalGeneration": Family(
        config_from_hf=_gemma3_multimodal_config,
        names=GEMMA_NAMES,
        is_wrapper=True,
    ),
    "Gemma3TextModel": Family(config_from_hf=_gemma3_embedder_config, names=GEMMA_NAMES),
}
