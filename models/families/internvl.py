"""InternVL 3 and 3.5 in HF's form: Qwen2, Qwen3 with or without experts, gpt-oss or Llama in a wrapper, and InternViT.

The largest of them have InternViT-6B, which has RMSNorms, also of queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jax import Array
from jax.typing import DTypeLike

from ..config import LayerSpec, ModelConfig
from ..family import Family
from ..fields import read_bool, read_choice, read_float, read_int, read_mapping, require
from ..layers import Attention, GPTLayer, declare
from ..names import Prefixes, TensorName, plain_mlp_names
from ..reading import is_tied_wrapper, read_text_config
from ..towers.clip import TWO_MATMULS
from ..towers.frame import TowerFrame, make_norm
from ..towers.reading import read_act, read_side, read_square, read_text_size, read_tower, read_vision
from ..towers.settings import DenseSettings, NormSettings, Projector, TowerSettings
from . import gpt_oss, llama, qwen2, qwen3, qwen_moe

_TEXTS = {
    "qwen2": qwen2.FAMILIES["Qwen2ForCausalLM"],
    "qwen3": qwen3.FAMILIES["Qwen3ForCausalLM"],
    "gpt_oss": gpt_oss.GPT_OSS,
    "qwen3_moe": qwen_moe.FAMILIES["Qwen3MoeForCausalLM"],
    "llama": llama.LLAMA,
}
# HF's values for keys that a vision_config leaves out.
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "image_size": 448,
    "patch_size": 14,
}
_PROJECTOR_EPS, _QK_EPS = 1e-5, 1e-6


def _internvl_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of an InternVL config.json."""
    kind = read_choice(read_mapping(hf, "text_config"), "model_type", tuple(_TEXTS), "qwen2")
    text = read_text_config(hf, kind)
    config = _TEXTS[kind].config_from_hf(text)
    tied = is_tied_wrapper({"tie_word_embeddings": True} | dict(hf), text)
    return replace(config, architecture="InternVLForConditionalGeneration", tie_word_embeddings=tied)


def _internvl_vision_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the tower of an InternVL config.json."""
    require(hf, vision_feature_layer=-1, vision_feature_select_strategy="default")
    vision = read_vision(hf, _DEFAULTS, "internvl_vision")
    require(vision, use_mask_token=False, use_absolute_position_embeddings=True)
    norms = read_choice(vision, "norm_type", ("layer_norm", "rms_norm"), "layer_norm")
    patch, out, eps = read_square(vision, "patch_size"), read_text_size(hf), read_float(vision, "layer_norm_eps")
    projector = Projector(
        norm=None if read_bool(vision, "use_mean_pooling", True) else NormSettings("layer", eps),
        joined_norm=NormSettings("layer", _PROJECTOR_EPS),
        dense=(DenseSettings(out, act=read_act(hf)), DenseSettings(out)),
    )
    tower = TowerSettings(
        patch_shape=(read_int(vision, "num_channels", 3), patch, patch),
        patch_bias=True,
        projector=projector,
        merge=int(1 / read_float(hf, "downsample_ratio", 0.5)),
        class_position=0,
        positions="exact",
        side=read_side(vision),
        layer_norm=norms.removesuffix("_norm"),
    )
    layer: Any = {"qkv_bias": read_bool(vision, "attention_bias"), "o_bias": True, "mlp_bias": True}
    if read_bool(vision, "use_qk_norm"):
        layer |= {"qk_norm": True, "qk_norm_all_heads": True}
    return read_tower(vision, "InternVLVision", tower, norm_eps=eps, **layer)


class _InternViTLayer(GPTLayer):
    """The layer of GPT-2, with a scale for each channel of the outputs of attention and MLP; it may have RMSNorms."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        super().__init__(spec, cfg, dtype)
        assert cfg.tower is not None
        norm = NormSettings(cfg.tower.layer_norm, cfg.norm_eps)
        self.attn_norm, self.mlp_norm = (make_norm(norm, cfg.hidden_size, cfg, dtype) for _ in range(2))
        self.attn = Attention(spec, replace(cfg, norm_eps=_QK_EPS), dtype)
        self.attn_scale, self.mlp_scale = (declare((cfg.hidden_size,), ("embed",), dtype) for _ in range(2))

    def finish(self, x_td: Array, attended_tnh: Array) -> Array:
        """Return the stream after this layer, from the stream before it and attention's output."""
        x_td = x_td + self.attn_scale[...][None] * self.attn.output(attended_tnh)
        return x_td + self.mlp_scale[...][None] * self.mlp(self.mlp_norm(x_td))


class _InternViTFrame(TowerFrame):
    """The frame of other towers, with the axes of size 1 that checkpoints have in the class token and positions."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        super().__init__(cfg, dtype)
        d = cfg.hidden_size
        self.class_token = declare((1, 1, d), ("one", "one", "embed"), dtype)
        self.positions = declare((1, self.settings.num_positions, d), ("one", "positions", "embed"), dtype)


_LAYER, _EMBEDDINGS = "{body}encoder.layer.{l}.", "{body}embeddings."
_NAMES = {
    "patch": TensorName(f"{_EMBEDDINGS}patch_embeddings.projection.weight", "d c y x -> d c y x"),
    "patch_bias": TensorName(f"{_EMBEDDINGS}patch_embeddings.projection.bias", "d -> d"),
    "class_token": TensorName(f"{_EMBEDDINGS}cls_token", "u o d -> u o d"),
    "positions": TensorName(f"{_EMBEDDINGS}position_embeddings", "u n d -> u n d"),
    "layers.attn_norm.scale": TensorName(f"{_LAYER}layernorm_before.weight", "d -> d"),
    "layers.attn_norm.bias": TensorName(f"{_LAYER}layernorm_before.bias", "d -> d"),
    "layers.attn.q": TensorName(f"{_LAYER}attention.q_proj.weight", "(n h) d -> n h d"),
    "layers.attn.k": TensorName(f"{_LAYER}attention.k_proj.weight", "(k h) d -> k h d"),
    "layers.attn.v": TensorName(f"{_LAYER}attention.v_proj.weight", "(k h) d -> k h d"),
    "layers.attn.o": TensorName(f"{_LAYER}attention.projection_layer.weight", "d c -> d c"),
    "layers.attn.q_bias": TensorName(f"{_LAYER}attention.q_proj.bias", "(n h) -> n h"),
    "layers.attn.k_bias": TensorName(f"{_LAYER}attention.k_proj.bias", "(k h) -> k h"),
    "layers.attn.v_bias": TensorName(f"{_LAYER}attention.v_proj.bias", "(k h) -> k h"),
    "layers.attn.o_bias": TensorName(f"{_LAYER}attention.projection_layer.bias", "d -> d"),
    "layers.attn.q_norm.scale": TensorName(f"{_LAYER}attention.q_norm.weight", "(n h) -> n h"),
    "layers.attn.k_norm.scale": TensorName(f"{_LAYER}attention.k_norm.weight", "(k h) -> k h"),
    "layers.attn_scale": TensorName(f"{_LAYER}lambda_1", "d -> d"),
    "layers.mlp_norm.scale": TensorName(f"{_LAYER}layernorm_after.weight", "d -> d"),
    "layers.mlp_norm.bias": TensorName(f"{_LAYER}layernorm_after.bias", "d -> d"),
    **plain_mlp_names(f"{_LAYER}mlp.fc1", f"{_LAYER}mlp.fc2"),
    "layers.mlp_scale": TensorName(f"{_LAYER}lambda_2", "d -> d"),
    "projector.norm.scale": TensorName("{body}layernorm.weight", "d -> d"),
    "projector.norm.bias": TensorName("{body}layernorm.bias", "d -> d"),
    "projector.joined_norm.scale": TensorName("{head}layer_norm.weight", "d -> d"),
    "projector.joined_norm.bias": TensorName("{head}layer_norm.bias", "d -> d"),
    **TWO_MATMULS,
}
INTERNVL_TOWER = Family(
    config_from_hf=_internvl_vision_config,
    names=MappingProxyType(_NAMES),
    layer=_InternViTLayer,
    frame=_InternViTFrame,
    prefixes=tuple(Prefixes(f"{model}vision_tower.", f"{model}multi_modal_projector.") for model in ("", "model.")),
    marks=("patch",),
)
_OF_GPT_OSS = MappingProxyType(
    {path: name for path, name in gpt_oss.GPT_OSS.names.items() if path not in llama.LLAMA_NAMES}
)
FAMILIES = {
    "InternVLForConditionalGeneration": Family(
        config_from_hf=_internvl_config,
        names=qwen_moe.MOE_NAMES,
        other_names=(_OF_GPT_OSS,),
        is_wrapper=True,
        vision=INTERNVL_TOWER,
    ),
}
