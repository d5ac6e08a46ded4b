"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3 in a wrapper, with vision towers for any resolution.

Their RoPE gives pictures three positions. Those of text are equal, which is plain RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_int, read_ints, read_mapping
from ..layers import GPTLayer
from ..names import Fused, Prefixes, TensorName, plain_mlp_names
from ..reading import is_tied_wrapper, read_decoder, read_rope_settings, read_rope_type, read_text_config
from ..towers.frame import TowerFrame
from ..towers.reading import read_axial_theta, read_square, read_tower, read_vision
from ..towers.settings import DenseSettings, NormSettings, Projector, TowerSettings
from .llama import LLAMA_NAMES
from .qwen2 import qwen_windows
from .qwen_moe import FAMILIES as MOE_FAMILIES
from .qwen_moe import MOE_NAMES

# HF's values for keys that a config.json leaves out.
_QWEN2_VL_DEFAULTS: dict[str, Any] = {
    "vocab_size": 152_064,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "max_window_layers": 80,
    "rope_theta": 1_000_000.0,
}
_QWEN3_VL_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 32,
    "max_position_embeddings": 128_000,
    "rope_theta": 500_000.0,
}
_QWEN3_VL_MOE_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 16,
    "max_position_embeddings": 128_000,
    "rope_theta": 500_000.0,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
}


def _qwen2_vl_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a Qwen2-VL config.json."""
    return _read_qwen2("Qwen2VLForConditionalGeneration", hf, "qwen2_vl_text")


def _qwen2_5_vl_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a Qwen2.5-VL config.json."""
    return _read_qwen2("Qwen2_5_VLForConditionalGeneration", hf, "qwen2_5_vl_text")


def _qwen3_vl_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a Qwen3-VL config.json."""
    source = _QWEN3_VL_DEFAULTS | dict(read_text_config(hf, "qwen3_vl_text"))
    text = with_plain_rope(source)
    bias = read_bool(text, "attention_bias")
    tied = is_tied_wrapper({"tie_word_embeddings": False} | dict(hf), text)
    architecture = "Qwen3VLForConditionalGeneration"
    config = read_decoder(
        text, architecture=architecture, qk_norm=True, qkv_bias=bias, o_bias=bias, tie_word_embeddings=tied
    )
    return with_three_positions(config, source, interleaved=True)


def _qwen3_vl_moe_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a Qwen3-VL config.json with experts."""
    text = read_text_config(hf, "qwen3_vl_moe_text")
    source = _QWEN3_VL_MOE_DEFAULTS | dict(text) | {"norm_topk_prob": True}
    config = MOE_FAMILIES["Qwen3MoeForCausalLM"].config_from_hf(with_plain_rope(source))
    config = with_three_positions(config, source, interleaved=True)
    tied = is_tied_wrapper({"tie_word_embeddings": False} | dict(hf), text)
    return replace(config, architecture="Qwen3VLMoeForConditionalGeneration", tie_word_embeddings=tied)


def _read_qwen2(architecture: str, hf: Mapping[str, Any], model_type: str) -> ModelConfig:
    # The first checkpoints have the text part's keys among the wrapper's.
    text = read_text_config(hf, model_type) if read_mapping(hf, "text_config") else hf
    source = _QWEN2_VL_DEFAULTS | dict(text)
    text = with_plain_rope(source)
    tied = is_tied_wrapper(hf, text)
    windows = {"window": qwen_windows(text)}
    config = read_decoder(text, architecture=architecture, qkv_bias=True, layers=windows, tie_word_embeddings=tied)
    return with_three_positions(config, source)


def with_plain_rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without RoPE's settings for pictures."""
    settings = read_rope_settings(text)
    settings = {name: value for name, value in settings.items() if name not in ("mrope_section", "mrope_interleaved")}
    if read_rope_type(settings) == "mrope":
        settings["rope_type"] = "default"
    return {**text, "rope_parameters": settings, "rope_scaling": None}


def with_three_positions(config: ModelConfig, text: Mapping[str, Any], *, interleaved: bool = False) -> ModelConfig:
    """Return the config with RoPE by three positions, if its settings say which frequencies turn with which.

    `mrope_section` has the number of frequencies of each position, which follow one another or, if they are
    interleaved, take turns as long as those of height and width last.
    """
    settings = read_rope_settings(text)
    if settings.get("mrope_section") is None:
        return config
    sections = read_ints(settings, "mrope_section")
    if len(sections) != 3:
        raise ValueError(f"mrope_section is {list(sections)}, expected three numbers")
    axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    if interleaved:
        axes = [0] * sum(sections)
        for axis in (1, 2):
            for index in range(axis, min(3 * sections[axis], len(axes)), 3):
                axes[index] = axis
    return replace(config, ropes=tuple(replace(rope, axes=tuple(axes)) for rope in config.ropes))


# HF's values for keys that a vision_config leaves out.
_QWEN2_VISION: dict[str, Any] = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN2_5_VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
_QWEN3_VISION: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
_MAX_DEEPSTACK = 8
"""The most deepstack outputs that have names; models have 3."""
_EPS = 1e-6
_KEYS: dict[str, Any] = {"layers_key": "depth", "heads_key": "num_heads"}
_BIASES: dict[str, Any] = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}


def _qwen2_vision_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the tower of a Qwen2-VL config.json."""
    vision = read_vision(hf, _QWEN2_VISION)
    size = read_int(vision, "embed_dim")
    vision["intermediate_size"] = size * read_int(vision, "mlp_ratio")
    tower = _read_settings(vision, size, read_int(vision, "hidden_size"), NormSettings("layer", _EPS))
    theta = read_axial_theta(vision)
    keys: Any = {**_KEYS, "size_key": "embed_dim"}
    return read_tower(vision, "Qwen2VLVision", tower, theta=theta, norm_eps=_EPS, **keys, **_BIASES)


def _qwen2_5_vision_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the tower of a Qwen2.5-VL config.json: most layers attend within windows."""
    vision = read_vision(hf, _QWEN2_5_VISION)
    size, out, depth = (read_int(vision, key) for key in ("hidden_size", "out_hidden_size", "depth"))
    merge, patch = read_int(vision, "spatial_merge_size"), read_square(vision, "patch_size")
    window = read_int(vision, "window_size") // merge // patch * merge
    if not window:
        raise ValueError(f"window_size is {vision['window_size']}, less than the pixels of a row")
    whole = read_ints(vision, "fullatt_block_indexes")
    tower = _read_settings(vision, size, out, NormSettings("rms", _EPS), window=window)
    chunks = [None if layer in whole else window**2 for layer in range(depth)]
    theta, keys = read_axial_theta(vision), {**_KEYS, **_BIASES}
    return read_tower(vision, "Qwen2_5_VLVision", tower, theta=theta, chunks=chunks, norm_eps=_EPS, **keys)


def _qwen3_vision_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the tower of a Qwen3-VL config.json: interpolated positions beside RoPE, and deepstack outputs."""
    vision = read_vision(hf, _QWEN3_VISION | {"deepstack_visual_indexes": (8, 16, 24)})
    deepstack, depth = read_ints(vision, "deepstack_visual_indexes"), read_int(vision, "depth")
    if (
        list(deepstack) != sorted(set(deepstack))
        or len(deepstack) > _MAX_DEEPSTACK
        or max(deepstack, default=0) >= depth
    ):
        raise ValueError(
            f"deepstack_visual_indexes is {list(deepstack)}, expected up to {_MAX_DEEPSTACK} ascending numbers of the "
            f"{depth} layers"
        )
    return _read_qwen3_vision(vision, deepstack)


def _qwen3_5_vision_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the tower of a Qwen3.5 config.json: that of Qwen3-VL without deepstack outputs."""
    return _read_qwen3_vision(read_vision(hf, _QWEN3_VISION), ())


def _read_qwen3_vision(vision: Mapping[str, Any], deepstack: tuple[int, ...]) -> ModelConfig:
    size, out, count = (read_int(vision, key) for key in ("hidden_size", "out_hidden_size", "num_position_embeddings"))
    side = isqrt(count)
    if side**2 != count:
        raise ValueError(f"num_position_embeddings is {count}, expected a square number")
    norm, inner = NormSettings("layer", _EPS), size * read_int(vision, "spatial_merge_size") ** 2
    tower = _read_settings(
        vision,
        size,
        out,
        norm,
        patch_bias=True,
        positions="bilinear",
        side=side,
        deepstack=deepstack,
        deep_projector=Projector(joined_norm=norm, dense=_merger(inner, out)) if deepstack else None,
    )
    theta, keys = read_axial_theta(vision), {**_KEYS, **_BIASES}
    return read_tower(vision, "Qwen3VLVision", tower, theta=theta, norm_eps=_EPS, **keys)


def _read_settings(
    vision: Mapping[str, Any], size: int, out: int, norm: NormSettings, **settings: Any
) -> TowerSettings:
    """Return the settings of a tower of width `size` with rows of width `out`, and its other settings."""
    merge, patch = read_int(vision, "spatial_merge_size"), read_square(vision, "patch_size")
    channels = read_int(vision, "in_channels", read_int(vision, "in_chans", 3))
    return TowerSettings(
        patch_shape=(channels, read_int(vision, "temporal_patch_size"), patch, patch),
        projector=Projector(norm=norm, dense=_merger(size * merge**2, out)),
        merge=merge,
        is_blocked=True,
        **settings,
    )


def _merger(inner: int, out: int) -> tuple[DenseSettings, ...]:
    return DenseSettings(inner, act="gelu"), DenseSettings(out)


_BLOCK, _QKV, _QKV_BIAS = "{body}blocks.{l}.", Fused(("q", "k", "v")), Fused(("q_bias", "k_bias", "v_bias"))
QWEN_VIT_NAMES = {
    "patch": TensorName("{body}patch_embed.proj.weight", "d c t y x -> d c t y x"),
    "layers.attn_norm.scale": TensorName(f"{_BLOCK}norm1.weight", "d -> d"),
    "layers.attn_norm.bias": TensorName(f"{_BLOCK}norm1.bias", "d -> d"),
    "layers.attn.q": TensorName(f"{_BLOCK}attn.qkv.weight", "(n h) d -> n h d", _QKV),
    "layers.attn.k": TensorName(f"{_BLOCK}attn.qkv.weight", "(k h) d -> k h d", _QKV),
    "layers.attn.v": TensorName(f"{_BLOCK}attn.qkv.weight", "(k h) d -> k h d", _QKV),
    "layers.attn.q_bias": TensorName(f"{_BLOCK}attn.qkv.bias", "(n h) -> n h", _QKV_BIAS),
    "layers.attn.k_bias": TensorName(f"{_BLOCK}attn.qkv.bias", "(k h) -> k h", _QKV_BIAS),
    "layers.attn.v_bias": TensorName(f"{_BLOCK}attn.qkv.bias", "(k h) -> k h", _QKV_BIAS),
    "layers.attn.o": TensorName(f"{_BLOCK}attn.proj.weight", "d c -> d c"),
    "layers.attn.o_bias": TensorName(f"{_BLOCK}attn.proj.bias", "d -> d"),
    "layers.mlp_norm.scale": TensorName(f"{_BLOCK}norm2.weight", "d -> d"),
    "layers.mlp_norm.bias": TensorName(f"{_BLOCK}norm2.bias", "d -> d"),
}
_QWEN2_MERGER = {
    "projector.norm.scale": TensorName("{body}merger.ln_q.weight", "d -> d"),
    "projector.norm.bias": TensorName("{body}merger.ln_q.bias", "d -> d"),
    "projector.dense0.weight": TensorName("{body}merger.mlp.0.weight", "o i -> o i"),
    "projector.dense0.bias": TensorName("{body}merger.mlp.0.bias", "o -> o"),
    "projector.dense1.weight": TensorName("{body}merger.mlp.2.weight", "o i -> o i"),
    "projector.dense1.bias": TensorName("{body}merger.mlp.2.bias", "o -> o"),
}


def _qwen3_merger(path: str, norm: str, module: str) -> dict[str, TensorName]:
    """Return the names of a projector of Qwen3-VL with one norm."""
    return {
        f"{path}.{norm}.scale": TensorName(f"{{body}}{module}.norm.weight", "d -> d"),
        f"{path}.{norm}.bias": TensorName(f"{{body}}{module}.norm.bias", "d -> d"),
        f"{path}.dense0.weight": TensorName(f"{{body}}{module}.linear_fc1.weight", "o i -> o i"),
        f"{path}.dense0.bias": TensorName(f"{{body}}{module}.linear_fc1.bias", "o -> o"),
        f"{path}.dense1.weight": TensorName(f"{{body}}{module}.linear_fc2.weight", "o i -> o i"),
        f"{path}.dense1.bias": TensorName(f"{{body}}{module}.linear_fc2.bias", "o -> o"),
    }


GATED_MLP_NAMES = {
    f"layers.mlp.{name}{suffix}": TensorName(f"{_BLOCK}mlp.{name}_proj.{kind}", layout)
    for name, layouts in {
        "gate": ("f d -> f d", "f -> f"),
        "up": ("f d -> f d", "f -> f"),
        "down": ("d f -> d f", "d -> d"),
    }.items()
    for suffix, kind, layout in (("", "weight", layouts[0]), ("_bias", "bias", layouts[1]))
}
_DEEP_MERGERS = {
    path: name
    for number in range(_MAX_DEEPSTACK)
    for path, name in _qwen3_merger(f"deepstack{number}", "joined_norm", f"deepstack_merger_list.{number}").items()
}
_TOWER: dict[str, Any] = {
    "frame": TowerFrame,
    "prefixes": (Prefixes("visual.", ""), Prefixes("model.visual.", "")),
    "marks": ("patch",),
}
QWEN2_VL_TOWER = Family(
    config_from_hf=_qwen2_vision_config,
    names=MappingProxyType(
        {**QWEN_VIT_NAMES, **plain_mlp_names(f"{_BLOCK}mlp.fc1", f"{_BLOCK}mlp.fc2"), **_QWEN2_MERGER}
    ),
    layer=GPTLayer,
    **_TOWER,
)
QWEN2_5_VL_TOWER = Family(
    config_from_hf=_qwen2_5_vision_config,
    names=MappingProxyType({**QWEN_VIT_NAMES, **GATED_MLP_NAMES, **_QWEN2_MERGER}),
    **_TOWER,
)
QWEN3_VL_TOWER = Family(
    config_from_hf=_qwen3_vision_config,
    names=MappingProxyType(
        {
            **QWEN_VIT_NAMES,
            "patch_bias": TensorName("{body}patch_embed.proj.bias", "d -> d"),
            "positions": TensorName("{body}pos_embed.weight", "n d -> n d"),
            **plain_mlp_names(f"{_BLOCK}mlp.linear_fc1", f"{_BLOCK}mlp.linear_fc2"),
            **_qwen3_merger("projector", "norm", "merger"),
            **_DEEP_MERGERS,
        }
    ),
    layer=GPTLayer,
    **_TOWER,
)
_GATE_UP = Fused(("gate", "up"), axis=1)
# Qwen's own checkpoints have one tensor for all experts, stored [in, out]; converted ones have a tensor for each.
_FUSED_EXPERTS = MappingProxyType(
    {
        "layers.mlp.experts.gate": TensorName("{body}layers.{l}.mlp.experts.gate_up_proj", "d f -> f d", _GATE_UP),
        "layers.mlp.experts.up": TensorName("{body}layers.{l}.mlp.experts.gate_up_proj", "d f -> f d", _GATE_UP),
        "layers.mlp.experts.down": TensorName("{body}layers.{l}.mlp.experts.down_proj", "f d -> d f"),
    }
)
QWEN3_5_TOWER = replace(QWEN3_VL_TOWER, config_from_hf=_qwen3_5_vision_config)
_WRAPPER: dict[str, Any] = {"names": LLAMA_NAMES, "is_wrapper": True}
FAMILIES = {
    "Qwen2VLForConditionalGeneration": Family(config_from_hf=_qwen2_vl_config, vision=QWEN2_VL_TOWER, **_WRAPPER),
    "Qwen2_5_VLForConditionalGeneration": Family(
        config_from_hf=_qwen2_5_vl_config, vision=QWEN2_5_VL_TOWER, **_WRAPPER
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        config_from_hf=_qwen3_vl_moe_config,
        names=MOE_NAMES,
        other_names=(_FUSED_EXPERTS,),
        is_wrapper=True,
        vision=QWEN3_VL_TOWER,
    ),
    "Qwen3VLForConditionalGeneration": Family(config_from_hf=_qwen3_vl_config, vision=QWEN3_VL_TOWER, **_WRAPPER),
}
