"""LLaVA 1.5, 1.6 (NeXT) and OneVision: a decoder in a wrapper, with CLIP or SigLIP as the vision tower.

1.6 and OneVision show an image whole and in tiles, and put a learned row after each line of the tiles' rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_choice, read_float, read_int, read_mapping, require
from ..layers import GPTLayer
from ..names import Prefixes, TensorName
from ..reading import is_tied_wrapper, read_decoder, read_text_config
from ..towers.clip import CLIP_DEFAULTS, CLIP_NAMES, CLIP_PREFIXES, SIGLIP_DEFAULTS, TWO_MATMULS, read_clip
from ..towers.frame import TowerFrame
from ..towers.reading import read_act, read_skips, read_square, read_text_size, read_vision
from ..towers.settings import DenseSettings, NormSettings, Projector, Tiling
from . import mistral, qwen2
from .llama import DEFAULTS, LLAMA, LLAMA_NAMES


def _llava_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a LLaVA config.json, which is a Llama."""
    text = {**DEFAULTS, **read_text_config(hf, "llama")}
    bias, tied = read_bool(text, "attention_bias"), is_tied_wrapper({"tie_word_embeddings": False} | dict(hf), text)
    architecture, mlp_bias = "LlavaForConditionalGeneration", read_bool(text, "mlp_bias")
    biases: Any = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": mlp_bias}
    return read_decoder(text, architecture=architecture, tie_word_embeddings=tied, **biases)


def _llava_vision_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the tower of a LLaVA config.json."""
    vision = read_vision(hf, CLIP_DEFAULTS, "clip_vision_model")
    require(hf, vision_feature_select_strategy="default")
    bias, act = read_bool(hf, "multimodal_projector_bias", True), read_act(hf)
    size = read_text_size(hf)
    projector = Projector(dense=(DenseSettings(size, bias, act), DenseSettings(size, bias)))
    return read_clip(
        vision,
        "LlavaVision",
        skips=read_skips(hf, read_int(vision, "num_hidden_layers"), -2),
        class_position=0,
        start_norm=NormSettings("layer", read_float(vision, "layer_norm_eps")),
        projector=projector,
    )


_TEXTS = {
    "llama": LLAMA,
    "mistral": mistral.FAMILIES["MistralForCausalLM"],
    "qwen2": qwen2.FAMILIES["Qwen2ForCausalLM"],
}
# HF's values for resolutions that a config.json leaves out: height and width in tiles.
_NEXT_TILES = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
_ONEVISION_TILES = tuple(product(range(1, 7), range(1, 7)))


def _llava_next_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a LLaVA 1.6 config.json."""
    return _read_tiled("LlavaNextForConditionalGeneration", hf, "llama")


def _llava_onevision_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a LLaVA-OneVision config.json."""
    return _read_tiled("LlavaOnevisionForConditionalGeneration", hf, "qwen2")


def _read_tiled(architecture: str, hf: Mapping[str, Any], default: str) -> ModelConfig:
    kind = read_choice(read_mapping(hf, "text_config"), "model_type", tuple(_TEXTS), default)
    text = {**DEFAULTS, **read_text_config(hf, kind)}
    tied = is_tied_wrapper({"tie_word_embeddings": False} | dict(hf), text)
    return replace(_TEXTS[kind].config_from_hf(text), architecture=architecture, tie_word_embeddings=tied)


def _llava_next_vision_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the tower of a LLaVA 1.6 config.json: that of 1.5, with tiles."""
    config = _llava_vision_config(hf)
    assert config.tower is not None
    tile = read_square(read_vision(hf, CLIP_DEFAULTS), "image_size")
    return replace(
        config, tower=replace(config.tower, tiling=Tiling(tile=tile, resolutions=_read_sizes(hf, tile, _NEXT_TILES)))
    )


def _llava_onevision_vision_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the tower of a LLaVA-OneVision config.json."""
    vision = read_vision(hf, SIGLIP_DEFAULTS, "siglip_vision_model")
    require(hf, vision_feature_select_strategy="full")
    aspect = hf.get("vision_aspect_ratio", "anyres_max_9")
    most = str(aspect).removeprefix("anyres_max_")
    if not most.isdecimal() or not int(most):
        raise ValueError(f"vision_aspect_ratio is {aspect!r}, expected 'anyres_max_' and a number of tiles")
    bias, act = read_bool(hf, "multimodal_projector_bias", True), read_act(hf)
    size, tile = read_text_size(hf), read_square(vision, "image_size")
    return read_clip(
        vision,
        "LlavaOnevisionVision",
        skips=read_skips(hf, read_int(vision, "num_hidden_layers"), -1),
        patch_bias=True,
        tiling=Tiling(
            tile=tile, resolutions=_read_sizes(hf, tile, _ONEVISION_TILES), most=int(most), splits_alone=True
        ),
        projector=Projector(dense=(DenseSettings(size, bias, act), DenseSettings(size, bias))),
    )


def _read_sizes(hf: Mapping[str, Any], tile: int, default: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the resolutions of `image_grid_pinpoints`."""
    sizes = hf.get("image_grid_pinpoints")
    if sizes is None:
        return tuple((tile * rows, tile * columns) for rows, columns in default)
    if not isinstance(sizes, list | tuple) or any(
        not isinstance(pair, list | tuple) or [type(side) for side in pair] != [int, int] for pair in sizes
    ):
        raise ValueError(f"image_grid_pinpoints is {sizes!r}, expected a list of heights and widths")
    return tuple((height, width) for height, width in sizes)


LLAVA_TOWER = Family(
    config_from_hf=_llava_vision_config,
    names=MappingProxyType({**CLIP_NAMES, **TWO_MATMULS}),
    layer=GPTLayer,
    frame=TowerFrame,
    prefixes=CLIP_PREFIXES,
    marks=("patch",),
    # The layers after the one whose output is read, and the norm of the class token.
    leaves_out=("*vision_tower*.layers.{after}.*", "*vision_tower*.post_layernorm.*", "*embeddings.position_ids"),
)
# The prefixes are those of the tower and of what stands beside it: the projector and the learned row.
_TILED: dict[str, Any] = {
    "names": MappingProxyType(
        {
            **CLIP_NAMES,
            **{
                path: TensorName(name.replace("{head}", "{head}multi_modal_projector."), layout)
                for path, (name, layout, _) in TWO_MATMULS.items()
            },
            "newline": TensorName("{head}image_newline", "d -> d"),
        }
    ),
    "prefixes": tuple(
        Prefixes(prefixes.body, prefixes.head.removesuffix("multi_modal_projector.")) for prefixes in CLIP_PREFIXES
    ),
}
LLAVA_NEXT_TOWER = replace(LLAVA_TOWER, config_from_hf=_llava_next_vision_config, **_TILED)
LLAVA_ONEVISION_TOWER = replace(
    LLAVA_NEXT_TOWER,
    config_from_hf=_llava_onevision_vision_config,
    leaves_out=("*vision_tower*.layers.{after}.*", "*vision_tower*.head.*", "*vision_tower*.post_layernorm.*"),
)
_TILED_WRAPPER: dict[str, Any] = {
    "names": LLAMA_NAMES,
    "is_wrapper": True,
    # The learned row, which a model that reads text alone does not need.
    "leaves_out": ("*image_newline",),
}
FAMILIES = {
    "LlavaForConditionalGeneration": Family(
        config_from_hf=_llava_config, names=LLAMA_NAMES, is_wrapper=True, vision=LLAVA_TOWER
    ),
    "LlavaNextForConditionalGeneration": Family(
        config_from_hf=_llava_next_config, vision=LLAVA_NEXT_TOWER, **_TILED_WRAPPER
    ),
    "LlavaOnevisionForConditionalGeneration": Family(
        config_from_hf=_llava_onevision_config, vision=LLAVA_ONEVISION_TOWER, **_TILED_WRAPPER
    ),
}
