"""Idefics 3 and SmolVLM: a Llama in a wrapper, with a SigLIP for any size as the vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_float, read_int
from ..layers import GPTLayer
from ..names import Prefixes, TensorName
from ..reading import is_tied_wrapper, read_decoder, read_text_config
from ..towers.clip import CLIP_NAMES, SIGLIP_DEFAULTS, read_clip
from ..towers.frame import TowerFrame
from ..towers.reading import read_text_size, read_vision
from ..towers.settings import DenseSettings, NormSettings, Projector
from .llama import DEFAULTS, LLAMA_NAMES

# HF's values for keys that a vision_config leaves out.
_VISION = {**SIGLIP_DEFAULTS, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}


def _idefics3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of an Idefics 3 or SmolVLM config.json, which is a Llama."""
    text = {**DEFAULTS, **read_text_config(hf, "llama")}
    bias, tied = read_bool(text, "attention_bias"), is_tied_wrapper({"tie_word_embeddings": False} | dict(hf), text)
    biases: Any = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": read_bool(text, "mlp_bias")}
    architecture = "Idefics3ForConditionalGeneration"
    return read_decoder(text, architecture=architecture, tie_word_embeddings=tied, **biases)


def _idefics3_vision_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the tower of an Idefics 3 or SmolVLM config.json."""
    vision = read_vision(hf, _VISION, "idefics3", "idefics3_vision", "smolvlm", "smolvlm_vision")
    return read_clip(
        vision,
        "Idefics3Vision",
        patch_bias=True,
        positions="nearest",
        merge=read_int(hf, "scale_factor", 2),
        projector=Projector(
            norm=NormSettings("layer", read_float(vision, "layer_norm_eps")),
            dense=(DenseSettings(read_text_size(hf), bias=False),),
        ),
    )


IDEFICS3_TOWER = Family(
    config_from_hf=_idefics3_vision_config,
    names=MappingProxyType(
        {**CLIP_NAMES, "projector.dense0.weight": TensorName("{head}modality_projection.proj.weight", "o i -> o i")}
    ),
    layer=GPTLayer,
    frame=TowerFrame,
    prefixes=(Prefixes("model.vision_model.", "model.connector."),),
    marks=("patch",),
)
_IDEFICS3 = Family(config_from_hf=_idefics3_config, names=LLAMA_NAMES, is_wrapper=True, vision=IDEFICS3_TOWER)
FAMILIES = {"Idefics3ForConditionalGeneration": _IDEFICS3, "SmolVLMForConditionalGeneration": _IDEFICS3}
