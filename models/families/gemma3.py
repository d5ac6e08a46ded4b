"""Gemma 3: Gemma 2 with norms on q and k instead of soft caps, and two RoPE tables, for sliding and global layers.

EmbeddingGemma is a Gemma 3 whose attention is not causal. The vision tower is a SigLIP, whose patches are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_float, read_int
from ..layers import GPTLayer
from ..names import TensorName
from ..pooling import embedding
from ..reading import is_tied_wrapper, read_layer_types, read_num_layers, read_ropes_by_type, read_text_config
from ..towers.clip import CLIP_NAMES, CLIP_PREFIXES, SIGLIP_DEFAULTS, read_clip
from ..towers.frame import TowerFrame
from ..towers.reading import read_side, read_text_size, read_vision
from ..towers.settings import DenseSettings, NormSettings, Projector
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
    tied = is_tied_wrapper(DEFAULTS | dict(hf), text)
    return _read("Gemma3ForConditionalGeneration", text, tie_word_embeddings=tied, sees_both_sides=True)


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


def _gemma3_vision_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the tower of a multimodal Gemma 3 config.json."""
    vision = read_vision(hf, SIGLIP_DEFAULTS, "siglip_vision_model")
    side, num_rows, eps = (
        read_side(vision),
        read_int(hf, "mm_tokens_per_image", 256),
        read_float(vision, "layer_norm_eps"),
    )
    rows_side = isqrt(num_rows)
    if rows_side**2 != num_rows or side % rows_side:
        raise ValueError(
            f"mm_tokens_per_image is {num_rows}, which does not divide {side} x {side} patches into squares"
        )
    projector = Projector(
        norm=NormSettings("layer", eps),
        join="mean",
        joined_norm=NormSettings("rms", eps, 1.0),
        dense=(DenseSettings(read_text_size(hf), bias=False),),
    )
    return read_clip(vision, "Gemma3Vision", patch_bias=True, merge=side // rows_side, projector=projector)


_PROJECTOR_NAMES = {
    "projector.joined_norm.scale": TensorName("{head}mm_soft_emb_norm.weight", "d -> d"),
    "projector.dense0.weight": TensorName("{head}mm_input_projection_weight", "i o -> o i"),
}
GEMMA3_TOWER = Family(
    config_from_hf=_gemma3_vision_config,
    names=MappingProxyType({**CLIP_NAMES, **_PROJECTOR_NAMES}),
    layer=GPTLayer,
    frame=TowerFrame,
    prefixes=CLIP_PREFIXES,
    marks=("patch",),
    # The pooling of SigLIP's own classifier.
    leaves_out=("*vision_tower*.head.*",),
)
FAMILIES = {
    "Gemma3ForCausalLM": Family(config_from_hf=_gemma3_config, names=GEMMA_NAMES, is_text_part=True),
    "Gemma3ForConditionalGeneration": Family(
        config_from_hf=_gemma3_multimodal_config,
        names=GEMMA_NAMES,
        is_wrapper=True,
        vision=GEMMA3_TOWER,
    ),
    "Gemma3TextModel": Family(config_from_hf=_gemma3_embedder_config, names=GEMMA_NAMES),
}
