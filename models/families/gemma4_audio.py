"""The tower of sounds of Gemma 4: a conformer over frames of 40 ms, with a row for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jax import Array
from jax.typing import DTypeLike

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_float, read_int, read_ints, read_mapping, require
from ..layers.clipped import bound_names
from ..layers.norm import unit_norm
from ..names import Prefixes, TensorName
from ..towers.conformer import ConformerFrame, ConformerLayer
from ..towers.frame import RowProjector
from ..towers.reading import AUDIO, read_text_size, read_tower, read_vision
from ..towers.settings import ConformerSettings, DenseSettings, Projector, SoundSettings, TowerSettings

# HF's values for keys that an audio_config leaves out.
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "hidden_act": "silu",
    "subsampling_conv_channels": (128, 32),
    "conv_kernel_size": 5,
    "residual_weight": 0.5,
    "attention_chunk_size": 12,
    "attention_context_left": 13,
    "attention_logit_cap": 50.0,
    "use_clipped_linears": True,
    "rms_norm_eps": 1e-6,
    "gradient_clipping": 1e10,
    "output_proj_dims": 1536,
}
_MOST_FRAMES = 750
"""The frames of 40 ms in the longest sound; what is longer HF cuts off."""


def _config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the tower of sounds of a multimodal Gemma 4 config.json."""
    audio = read_vision(hf, _DEFAULTS, "gemma4_audio", section=AUDIO)
    chunk, channels = read_int(audio, "attention_chunk_size"), read_ints(audio, "subsampling_conv_channels")
    # HF's norms of layers have this epsilon, and its code of distances fits this window alone.
    require(audio, rms_norm_eps=1e-6, attention_context_left=chunk + 1, attention_context_right=0)
    if both := read_mapping(hf, "text_config").get("use_bidirectional_attention"):
        # A span of rows would be seen from both sides, whatever it stands for, and in HF those of sounds are not.
        raise ValueError(f"use_bidirectional_attention is {both!r}, which no supported model with an audio tower has")
    if len(channels) != 2 or not all(channels):
        raise ValueError(f"subsampling_conv_channels is {list(channels)}, expected two positive numbers")
    tower = TowerSettings(
        # HF computes how many bands are left from the first convolution's channels, which are as many as all bands.
        patch_shape=(4, channels[0]),
        projector=Projector(
            dense=(DenseSettings(read_int(audio, "output_proj_dims")), DenseSettings(read_text_size(hf), bias=False))
        ),
        clips=read_bool(audio, "use_clipped_linears"),
        sound=SoundSettings(num_frames=_MOST_FRAMES, group=1, columns=4, hears_whole=True, ends_in_zeros=True),
        conformer=ConformerSettings(
            channels=(channels[0], channels[1]),
            kernel_size=read_int(audio, "conv_kernel_size"),
            mlp_scale=read_float(audio, "residual_weight"),
            bound=read_float(audio, "gradient_clipping"),
        ),
    )
    layer: dict[str, Any] = {"causal": True, "window": chunk, "soft_cap": read_float(audio, "attention_logit_cap")}
    sized = {**audio, "intermediate_size": 4 * read_int(audio, "hidden_size")}
    config = read_tower(sized, "Gemma4Audio", tower, norm_eps=read_float(audio, "rms_norm_eps"), **layer)
    return replace(config, norm_bias=False)


class _Projector(RowProjector):
    """A projector with a norm between its matmuls."""

    def __init__(self, settings: Projector, cfg: ModelConfig, dtype: DTypeLike) -> None:
        super().__init__(settings, 1, cfg, dtype)
        self.eps = cfg.norm_eps

    def project(self, x_ri: Array) -> Array:
        """Return rows [r, o] of hidden states."""
        first, second = (getattr(self, name) for name in self.names)
        return second(unit_norm(first(x_ri), self.eps))


class _Frame(ConformerFrame):
    """A conformer's frame with such a projector."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        super().__init__(cfg, dtype)
        assert cfg.tower is not None
        self.projector = _Projector(cfg.tower.projector, cfg, dtype)


_LAYER = "{body}layers.{l}."
# The matmuls of layers by our names: HF's, and the layouts of their weights.
_MATMULS = {
    **{
        f"layers.mlp{number}.{path}": (f"feed_forward{number}.{name}.", "o i -> o i")
        for number in (1, 2)
        for path, name in (("up", "ffw_layer_1"), ("down", "ffw_layer_2"))
    },
    **{f"layers.attn.{each}": (f"self_attn.{each}_proj.", "(n h) d -> n h d") for each in ("q", "k", "v")},
    "layers.attn.o": ("self_attn.post.", "d c -> d c"),
    "layers.conv.start": ("lconv1d.linear_start.", "o i -> o i"),
    "layers.conv.end": ("lconv1d.linear_end.", "o i -> o i"),
}
_NORMS = {
    "layers.mlp1.norm": "feed_forward1.pre_layer_norm",
    "layers.mlp1.post_norm": "feed_forward1.post_layer_norm",
    "layers.attn_norm": "norm_pre_attn",
    "layers.post_attn_norm": "norm_post_attn",
    "layers.conv.norm": "lconv1d.pre_layer_norm",
    "layers.conv.conv_norm": "lconv1d.conv_norm",
    "layers.mlp2.norm": "feed_forward2.pre_layer_norm",
    "layers.mlp2.post_norm": "feed_forward2.post_layer_norm",
    "layers.out_norm": "norm_out",
}
_SUBSAMPLE = "{body}subsample_conv_projection."
_NAMES = {
    **{
        f"conv{number + 1}{ours}": TensorName(f"{_SUBSAMPLE}layer{number}.{theirs}.weight", layout)
        for number in (0, 1)
        for ours, theirs, layout in (("", "conv", "o i s f -> o s f i"), ("_norm.scale", "norm", "d -> d"))
    },
    "patch": TensorName(f"{_SUBSAMPLE}input_proj_linear.weight", "d c -> d c"),
    "layers.attn.far": TensorName(f"{_LAYER}self_attn.relative_k_proj.weight", "(n h) d -> n h d"),
    "layers.attn.q_scale": TensorName(f"{_LAYER}self_attn.per_dim_scale", "h -> h"),
    "layers.conv.conv": TensorName(f"{_LAYER}lconv1d.depthwise_conv1d.weight", "d u k -> d u k"),
    "projector.dense0.weight": TensorName("{body}output_proj.weight", "o i -> o i"),
    "projector.dense0.bias": TensorName("{body}output_proj.bias", "o -> o"),
    "projector.dense1.weight": TensorName("{head}embedding_projection.weight", "o i -> o i"),
    **{f"{path}.scale": TensorName(f"{_LAYER}{name}.weight", "d -> d") for path, name in _NORMS.items()},
    **{
        f"{path}.weight": TensorName(f"{_LAYER}{name}linear.weight", layout)
        for path, (name, layout) in _MATMULS.items()
    },
    **bound_names(_LAYER, _MATMULS),
}
GEMMA4_AUDIO = Family(
    config_from_hf=_config,
    names=MappingProxyType(_NAMES),
    layer=ConformerLayer,
    frame=_Frame,
    prefixes=tuple(Prefixes(f"{model}audio_tower.", f"{model}embed_audio.") for model in ("model.", "")),
    marks=("patch",),
    section=AUDIO,
)
