"""Read the parts of a wrapper's config.json that towers share. Unsupported values raise ValueError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..config import HIDDEN_ACTS, LayerSpec, ModelConfig, RopeConfig
from ..fields import read_choice, read_float, read_int, read_mapping
from ..reading import MAX_LAYERS
from .settings import Projector, TowerSettings

VISION, AUDIO = "vision_config", "audio_config"
"""The keys of a tower's settings in a wrapper's config.json."""


def read_tower(
    vision: Mapping[str, Any],
    architecture: str,
    tower: TowerSettings,
    *,
    size_key: str = "hidden_size",
    layers_key: str = "num_hidden_layers",
    heads_key: str = "num_attention_heads",
    skips: int = 0,
    theta: float | None = None,
    chunks: Sequence[int | None] = (),
    norm_eps: float,
    **layer: Any,
) -> ModelConfig:
    """Return a tower's config from the wrapper's `vision_config` with defaults filled in.

    The keys name the fields that not all towers call the same. The last `skips` layers are left out. `theta` is RoPE's,
    None without RoPE; `chunks` has each layer's `attention_chunk`. `layer` has further fields of `LayerSpec`.
    """
    num_layers = read_int(vision, layers_key, maximum=MAX_LAYERS)
    hidden_size, num_heads = read_int(vision, size_key), read_int(vision, heads_key)
    head_dim, rest = divmod(hidden_size, num_heads)
    if rest:
        raise ValueError(f"{heads_key} is {num_heads}, which does not divide {size_key}, {hidden_size}")
    if theta is not None and head_dim % 4:
        raise ValueError(f"{heads_key} leaves heads of {head_dim}; RoPE in two directions needs a multiple of 4")
    if not 0 <= skips < num_layers:
        raise ValueError(f"vision_feature_layer leaves out {skips} of {num_layers} layers")
    fields: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": head_dim,
        "intermediate_size": read_int(vision, "intermediate_size"),
        "scale": head_dim**-0.5,
        "hidden_act": read_choice(vision, "hidden_act", HIDDEN_ACTS, "gelu"),
        "causal": False,
        "rope": None if theta is None else 0,
    } | layer
    chunks = chunks or [None] * num_layers
    specs = tuple(LayerSpec(**fields, attention_chunk=chunk) for chunk in chunks)
    return ModelConfig(
        architecture=architecture,
        vocab_size=0,
        hidden_size=hidden_size,
        layers=specs[: num_layers - skips],
        ropes=() if theta is None else (RopeConfig(theta=theta),),
        max_position_embeddings=0,
        norm_eps=norm_eps,
        tie_word_embeddings=False,
        tower=tower,
    )


def read_vision(
    hf: Mapping[str, Any], defaults: Mapping[str, Any], *model_types: str, section: str = VISION
) -> dict[str, Any]:
    """Return a tower's section of a wrapper's config.json, which must be of one of the types.

    It has defaults for keys that it leaves out.
    """
    vision = read_mapping(hf, section)
    if model_types and vision.get("model_type") not in (None, *model_types):
        raise ValueError(
            f"{section}'s model_type is {vision['model_type']!r}; only {', '.join(model_types)} is supported"
        )
    return {**defaults, **{key: value for key, value in vision.items() if value is not None}}


def read_text_size(hf: Mapping[str, Any]) -> int:
    """Return the width of the text model; `Family.read_config` has settled it."""
    return read_int(read_mapping(hf, "text_config"), "hidden_size")


def read_axial_theta(vision: Mapping[str, Any], default: float = 10_000.0) -> float:
    """Return the theta of RoPE over rows and columns, from `rope_parameters` or the old key `rope_theta`."""
    settings = read_mapping(vision, "rope_parameters")
    read_choice(settings, "rope_type", ("axial", "default"), "axial")
    return read_float(settings, "rope_theta", read_float(vision, "rope_theta", default))


def read_square(vision: Mapping[str, Any], name: str) -> int:
    """Return a size in pixels that may be one number or two equal ones."""
    value = vision.get(name)
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        return read_int({name: value[0]}, name)
    return read_int(vision, name)


def read_side(vision: Mapping[str, Any]) -> int:
    """Return the number of patches on a side of the tower's square images."""
    image, patch = read_square(vision, "image_size"), read_square(vision, "patch_size")
    if image < patch:
        raise ValueError(f"image_size is {image}, less than a patch of {patch}")
    return image // patch


def read_act(hf: Mapping[str, Any]) -> str:
    """Return the activation of a projector with two matmuls."""
    return read_choice(hf, "projector_hidden_act", HIDDEN_ACTS, "gelu")


def read_skips(hf: Mapping[str, Any], num_layers: int, default: int) -> int:
    """Return the number of last layers that are left out, from `vision_feature_layer`: one of HF's hidden states."""
    layer = hf.get("vision_feature_layer", default)
    if type(layer) is not int or not -num_layers <= layer <= num_layers or not layer:
        raise ValueError(
            f"vision_feature_layer is {layer!r}, expected the number of one of the tower's {num_layers} layers"
        )
    return -layer - 1 if layer < 0 else num_layers - layer


def check_fit(vision: ModelConfig, hidden_size: int) -> ModelConfig:
    """Return the tower's config; ValueError if its rows do not have the text model's width."""
    assert vision.tower is not None
    section = VISION if vision.tower.sound is None else AUDIO
    projectors: list[Projector | None] = [vision.tower.projector, vision.tower.deep_projector]
    for projector in projectors:
        if projector is not None and projector.output_size != hidden_size:
            raise ValueError(
                f"{section} gives rows of {projector.output_size}, but hidden_size of the text model is {hidden_size}"
            )
    return vision
