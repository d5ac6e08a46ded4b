"""GLM-4.1V, GLM-4.5V and GLM-4.6V: GLM-4 and GLM-4.5 in a wrapper, with a vision tower for any resolution.

Their RoPE gives pictures three positions, as in Qwen-VL. Those of text are equal, which is plain RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jax import Array
from jax.typing import DTypeLike

from ..config import HIDDEN_ACTS, ModelConfig
from ..family import Family
from ..fields import read_bool, read_choice, read_float, read_int, read_mapping
from ..layers import ACTIVATIONS, GatedMLP, LayerNorm, declare, linear
from ..names import Prefixes, TensorName
from ..reading import is_tied_wrapper, read_decoder, read_rope, read_rope_settings, read_text_config
from ..towers.frame import RowProjector, TowerFrame, multiply_flat
from ..towers.reading import read_axial_theta, read_side, read_square, read_tower, read_vision
from ..towers.settings import DenseSettings, NormSettings, Projector, TowerSettings
from .glm4 import GLM4_NAMES
from .glm4_moe import GLM4_MOE
from .qwen_moe import FUSED_EXPERTS
from .qwen_vl import GATED_MLP_NAMES, QWEN_VIT_NAMES, with_plain_rope, with_three_positions

# In GLM-4.6V with experts, which the correction tells, layers without them have GLM-4.5's names. HF stores all experts
# of a layer together there.
_GLM45_NAMES = MappingProxyType(
    {f"layers.mlp.{name}": GLM4_MOE.names[f"layers.mlp.{name}"] for name in ("gate", "up", "router.correction")}
)

# HF's values for keys that a config.json leaves out.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_552,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
}
_MOE_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_424,
    "max_position_embeddings": 65_536,
    "attention_bias": True,
}
_SECTIONS = [8, 12, 12]


def _glm4v_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a GLM-4.1V config.json."""
    return _read_glm4("Glm4vForConditionalGeneration", hf)


def _glm46v_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a GLM-4.6V config.json, which is that of GLM-4.1V or, with experts, of GLM-4.5V."""
    kind = read_choice(read_mapping(hf, "text_config"), "model_type", ("glm4v_text", "glm4v_moe_text"), "glm4v_text")
    read = _read_glm4_moe if kind == "glm4v_moe_text" else _read_glm4
    return read("Glm46VForConditionalGeneration", hf)


def _glm4v_moe_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a GLM-4.5V config.json."""
    return _read_glm4_moe("Glm4vMoeForConditionalGeneration", hf)


def _read_glm4(architecture: str, hf: Mapping[str, Any]) -> ModelConfig:
    source, tied = _DEFAULTS | _read_text(hf, "glm4v_text"), _is_tied(hf)
    text = with_plain_rope(source)
    rope = replace(read_rope(text, read_rope_settings(text), rotates_part=True), interleaved=True)
    config = read_decoder(
        text, architecture=architecture, ropes=(rope,), qkv_bias=True, post_norms=True, tie_word_embeddings=tied
    )
    return with_three_positions(config, source)


def _read_glm4_moe(architecture: str, hf: Mapping[str, Any]) -> ModelConfig:
    source, tied = _MOE_DEFAULTS | _read_text(hf, "glm4v_moe_text"), _is_tied(hf)
    config = GLM4_MOE.config_from_hf(with_plain_rope(source))
    config = replace(config, architecture=architecture, tie_word_embeddings=tied)
    return with_three_positions(config, source)


def _read_text(hf: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Return the text part's keys, which the first checkpoints have among the wrapper's."""
    text = read_text_config(hf, model_type) if read_mapping(hf, "text_config") else hf
    settings = {"mrope_section": _SECTIONS} | read_rope_settings(text)
    return {**text, "rope_parameters": settings, "rope_scaling": None}


def _is_tied(hf: Mapping[str, Any]) -> bool:
    return is_tied_wrapper({"tie_word_embeddings": False} | dict(hf), read_mapping(hf, "text_config"))


# HF's values for keys that a vision_config leaves out.
_VISION: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1536,
    "hidden_act": "silu",
    "num_heads": 12,
    "image_size": 336,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 4096,
    "intermediate_size": 13_696,
}
_PROJECTOR_EPS = 1e-5


def _glm_vision_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the tower of a GLM-4.1V or GLM-4.5V config.json."""
    vision = read_vision(hf, _VISION, "glm4v_vision", "glm4v_moe_vision", "glm4v", "glm4v_moe")
    out, inner, patch = read_int(vision, "out_hidden_size"), read_int(vision, "intermediate_size"), _read_patch(vision)
    norm = NormSettings("rms", read_float(vision, "rms_norm_eps"))
    act = read_choice(vision, "hidden_act", HIDDEN_ACTS, "silu")
    dense = DenseSettings(out), DenseSettings(out, bias=False), DenseSettings(inner, bias=False, act=act)
    tower = TowerSettings(
        patch_shape=patch,
        patch_bias=True,
        projector=Projector(norm=norm, join="channels", dense=(*dense, DenseSettings(out, bias=False))),
        merge=read_int(vision, "spatial_merge_size"),
        is_blocked=True,
        patch_norm=norm,
        positions="bicubic",
        side=read_side(vision),
    )
    vision["intermediate_size"] = out
    keys: Any = {"layers_key": "depth", "heads_key": "num_heads", "qkv_bias": read_bool(vision, "attention_bias")}
    return read_tower(vision, "Glm4vVision", tower, theta=read_axial_theta(vision), norm_eps=norm.eps, **keys)


def _read_patch(vision: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of a patch."""
    size = read_square(vision, "patch_size")
    return read_int(vision, "in_channels", 3), read_int(vision, "temporal_patch_size"), size, size


class _GlmProjector(RowProjector):
    """A projector whose first matmul is a convolution, with a norm after the second and a gated MLP after that."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert cfg.tower is not None
        settings, group, merge, d = cfg.tower.projector, cfg.tower.group, cfg.tower.merge, cfg.hidden_size
        super().__init__(replace(settings, dense=()), group, cfg, dtype)
        _, _, gate, last = settings.dense
        out = last.size
        # Its inputs have several axes, as in the checkpoint, so it is never quantized.
        self.downsample = declare((out, d, merge, merge), ("embed", "embed", "pixels", "pixels"), dtype)
        self.downsample_bias = declare((out,), ("embed",), dtype)
        self.dense = declare((out, out), ("embed", "embed"), dtype, 1)
        self.dense_norm = LayerNorm(out, "embed", replace(cfg, norm_eps=_PROJECTOR_EPS), dtype)
        assert gate.act is not None
        spec = replace(cfg.layers[0], intermediate_size=gate.size, hidden_act=gate.act)
        self.mlp = GatedMLP(spec, replace(cfg, hidden_size=out), dtype)

    def project(self, x_ri: Array) -> Array:
        """Return rows [r, o] of what is joined."""
        x_ro = multiply_flat(x_ri, self.downsample[...]) + self.downsample_bias[...][None]
        return self.mlp(ACTIVATIONS["gelu"](self.dense_norm(linear(x_ro, self.dense))))


class _GlmFrame(TowerFrame):
    """The usual frame with GLM's projector."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        super().__init__(cfg, dtype)
        self.projector = _GlmProjector(cfg, dtype)


_MERGER = "{body}merger."
_TOWER_NAMES = {
    **QWEN_VIT_NAMES,
    **GATED_MLP_NAMES,
    "patch_bias": TensorName("{body}patch_embed.proj.bias", "d -> d"),
    "patch_norm.scale": TensorName("{body}post_conv_layernorm.weight", "d -> d"),
    "positions": TensorName("{body}embeddings.position_embedding.weight", "n d -> n d"),
    "projector.norm.scale": TensorName("{body}post_layernorm.weight", "d -> d"),
    "projector.downsample": TensorName("{body}downsample.weight", "o d y x -> o d y x"),
    "projector.downsample_bias": TensorName("{body}downsample.bias", "o -> o"),
    "projector.dense": TensorName(f"{_MERGER}proj.weight", "o i -> o i"),
    "projector.dense_norm.scale": TensorName(f"{_MERGER}post_projection_norm.weight", "d -> d"),
    "projector.dense_norm.bias": TensorName(f"{_MERGER}post_projection_norm.bias", "d -> d"),
    "projector.mlp.gate": TensorName(f"{_MERGER}gate_proj.weight", "f d -> f d"),
    "projector.mlp.up": TensorName(f"{_MERGER}up_proj.weight", "f d -> f d"),
    "projector.mlp.down": TensorName(f"{_MERGER}down_proj.weight", "d f -> d f"),
}
GLM_TOWER = Family(
    config_from_hf=_glm_vision_config,
    names=MappingProxyType(_TOWER_NAMES),
    frame=_GlmFrame,
    prefixes=(Prefixes("model.visual.", ""), Prefixes("visual.", "")),
    marks=("patch",),
)
_WRAPPER: dict[str, Any] = {"is_wrapper": True, "vision": GLM_TOWER}
# The multi-token-prediction layer, which comes last.
_LEFT_OUT = ("*layers.{after}.*",)
FAMILIES = {
    "Glm4vForConditionalGeneration": Family(config_from_hf=_glm4v_config, names=GLM4_NAMES, **_WRAPPER),
    "Glm46VForConditionalGeneration": Family(
        config_from_hf=_glm46v_config,
        names=MappingProxyType({**GLM4_MOE.names, **GLM4_NAMES}),
        other_names=(MappingProxyType({**_GLM45_NAMES, **FUSED_EXPERTS}), _GLM45_NAMES),
        leaves_out=_LEFT_OUT,
        **_WRAPPER,
    ),
    "Glm4vMoeForConditionalGeneration": Family(
        config_from_hf=_glm4v_moe_config,
        names=GLM4_MOE.names,
        leaves_out=_LEFT_OUT,
        **_WRAPPER,
    ),
}
