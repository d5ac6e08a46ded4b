"""Gemma 4 12B: Gemma 4's text model, whose images have no tower; matmuls and norms make a row of each patch.

A patch is a square of the patches that other models of Gemma 4 merge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ..config import ModelConfig
from ..family import Family
from ..fields import read_float, read_int, require
from ..layers import LayerNorm, declare
from ..layers.norm import unit_norm
from ..names import Prefixes, TensorName
from ..reading import is_tied_wrapper, read_text_config
from ..towers.frame import RowProjector, TowerFrame
from ..towers.layout import PatchBatch
from ..towers.reading import read_text_size, read_vision
from ..towers.settings import DenseSettings, NormSettings, Projector, TowerSettings
from .gemma4 import DEFAULTS, GEMMA4_NAMES, Gemma4Frame, Gemma4Layer, read_gemma4

# HF's values for keys that a config.json leaves out.
_DEFAULTS = DEFAULTS | {
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
}
_VISION_DEFAULTS: dict[str, Any] = {
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "mm_embed_dim": 3840,
    "mm_posemb_size": 1120,
    "rms_norm_eps": 1e-6,
}
_LAYER_NORM = NormSettings("layer", 1e-5)


def _text_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a text-only config.json."""
    return _read("Gemma4UnifiedForCausalLM", hf)


def _multimodal_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a multimodal config.json."""
    text = read_text_config(hf, "gemma4_unified_text")
    tied = is_tied_wrapper(DEFAULTS | dict(hf), text)
    return _read("Gemma4UnifiedForConditionalGeneration", text, tie_word_embeddings=tied)


def _read(architecture: str, hf: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    """Read the text model, which has neither experts nor per-layer inputs."""
    hf = _DEFAULTS | dict(hf)
    without = {
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": hf["vocab_size"],
    }
    return read_gemma4(architecture, hf | without, **overrides)


def _vision_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read what makes rows of patches: a tower without layers."""
    vision = read_vision(hf, _VISION_DEFAULTS, "gemma4_unified_vision")
    width = read_int(vision, "mm_embed_dim")
    require(vision, output_proj_dims=width)
    patch_side = read_int(vision, "patch_size") * read_int(vision, "pooling_kernel_size")
    tower = TowerSettings(
        patch_shape=(3 * patch_side**2,),
        projector=Projector(dense=(DenseSettings(read_text_size(hf), bias=False),)),
        patch_bias=True,
        patch_norm=_LAYER_NORM,
        start_norm=_LAYER_NORM,
        positions="axial",
        side=read_int(vision, "mm_posemb_size"),
    )
    return ModelConfig(
        architecture="Gemma4UnifiedVision",
        vocab_size=0,
        hidden_size=width,
        layers=(),
        ropes=(),
        max_position_embeddings=0,
        norm_eps=read_float(vision, "rms_norm_eps"),
        tie_word_embeddings=False,
        tower=tower,
    )


class _Projector(RowProjector):
    """A projector of patches that are normed without learned scales."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert cfg.tower is not None
        super().__init__(cfg.tower.projector, cfg.tower.group, cfg, dtype)
        self.eps = cfg.norm_eps

    def gather(self, x_pd: Array, rows_rg: Array) -> Array:
        """Return each row's patch, normed, [r, d]."""
        return unit_norm(super().gather(x_pd, rows_rg), self.eps)


class _Embedder(TowerFrame):
    """A frame that norms pixels, and has learned positions of columns and of rows."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        super().__init__(cfg, dtype)
        shape = 2, self.settings.side, cfg.hidden_size
        self.positions = declare(shape, ("positions", "positions", "embed"), dtype)
        self.pixel_norm = LayerNorm(self.settings.patch_dim, "pixels", replace(cfg, norm_eps=_LAYER_NORM.eps), dtype)
        self.projector = _Projector(cfg, dtype)

    def start(self, inputs: PatchBatch) -> Array:
        """Return the embedded patches [p, d]; pixels are from 0 to 1."""
        patches_pc = jnp.asarray(inputs.patches_pc).astype(self.dtype)
        return super().start(inputs._replace(patches_pc=self.pixel_norm(patches_pc)))


_NORMS = {"pixel_norm": "patch_ln1", "patch_norm": "patch_ln2", "start_norm": "pos_norm"}
_VISION_NAMES = {
    "patch": TensorName("{body}patch_dense.weight", "d c -> d c"),
    "patch_bias": TensorName("{body}patch_dense.bias", "d -> d"),
    "positions": TensorName("{body}pos_embedding", "n a d -> a n d"),
    "projector.dense0.weight": TensorName("{head}embedding_projection.weight", "o i -> o i"),
    **{f"{path}.scale": TensorName(f"{{body}}{name}.weight", "d -> d") for path, name in _NORMS.items()},
    **{f"{path}.bias": TensorName(f"{{body}}{name}.bias", "d -> d") for path, name in _NORMS.items()},
}
_VISION = Family(
    config_from_hf=_vision_config,
    names=MappingProxyType(_VISION_NAMES),
    frame=_Embedder,
    # As published, and as HF's modules are named.
    prefixes=(
        Prefixes("model.vision_embedder.", "model.embed_vision."),
        Prefixes("model.embed_vision.", "model.embed_vision.multimodal_embedder."),
    ),
    marks=("patch",),
)
FAMILIES = {
    "Gemma4UnifiedForCausalLM": Family(
        config_from_hf=_text_config, names=GEMMA4_NAMES, layer=Gemma4Layer, frame=Gemma4Frame, is_text_part=True
    ),
    "Gemma4UnifiedForConditionalGeneration": Family(
        config_from_hf=_multimodal_config,
        names=GEMMA4_NAMES,
        layer=Gemma4Layer,
        frame=Gemma4Frame,
        is_wrapper=True,
        vision=_VISION,
    ),
}
