"""Gemma 4: unit norms on values, global layers with larger heads, experts beside the MLP, per-layer inputs, and late
layers that borrow the keys and values of earlier ones. Each model has some of these.

The vision tower takes grids of any size. Its rows are means of squares of patches. Beside it there may be a conformer,
which hears. The matmuls of both may clip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import HIDDEN_ACTS, LayerSpec, ModelConfig, MoESpec, RopeConfig
from ..family import Family
from ..fields import read_bool, read_choice, read_float, read_int, read_mapping, read_optional_float, require
from ..inputs import TokenBatch
from ..layers import ACTIVATIONS, Attention, DecoderLayer, Embedding, Frame, GatedMLP, RMSNorm, declare, linear
from ..layers.clipped import ClippedLinear, bound_names
from ..layers.moe import Choices, Experts, Router
from ..layers.norm import unit_norm
from ..loop import Heads
from ..names import Fused, Prefixes, TensorName
from ..plan import group_of
from ..reading import (
    LAYER_TYPES,
    is_tied_wrapper,
    read_decoder,
    read_layer_types,
    read_num_layers,
    read_text_config,
    read_typed_rope,
    windows_of,
)
from ..towers.frame import RowProjector, TowerFrame
from ..towers.layout import PatchBatch
from ..towers.reading import read_axial_theta, read_text_size, read_tower, read_vision
from ..towers.settings import DenseSettings, Projector, TowerSettings
from .gemma2 import GEMMA_NAMES
from .gemma4_audio import GEMMA4_AUDIO

_GATE_UP = Fused(("gate", "up"))

GEMMA4_NAMES = MappingProxyType(
    {
        **GEMMA_NAMES,
        "layers.scalar": TensorName("{body}layers.{l}.layer_scalar", "o -> o"),
        "layers.router.weight": TensorName("{body}layers.{l}.router.proj.weight", "e d -> e d"),
        "layers.router.input_scale": TensorName("{body}layers.{l}.router.scale", "d -> d"),
        "layers.router.expert_scale": TensorName("{body}layers.{l}.router.per_expert_scale", "e -> e"),
        "layers.experts.gate": TensorName("{body}layers.{l}.experts.gate_up_proj", "f d -> f d", _GATE_UP),
        "layers.experts.up": TensorName("{body}layers.{l}.experts.gate_up_proj", "f d -> f d", _GATE_UP),
        "layers.experts.down": TensorName("{body}layers.{l}.experts.down_proj", "d f -> d f"),
        "layers.dense_out_norm.scale": TensorName("{body}layers.{l}.post_feedforward_layernorm_1.weight", "d -> d"),
        "layers.experts_norm.scale": TensorName("{body}layers.{l}.pre_feedforward_layernorm_2.weight", "d -> d"),
        "layers.experts_out_norm.scale": TensorName("{body}layers.{l}.post_feedforward_layernorm_2.weight", "d -> d"),
        "layers.input_gate": TensorName("{body}layers.{l}.per_layer_input_gate.weight", "p d -> p d"),
        "layers.input_out": TensorName("{body}layers.{l}.per_layer_projection.weight", "d p -> d p"),
        "layers.post_input_norm.scale": TensorName("{body}layers.{l}.post_per_layer_input_norm.weight", "d -> d"),
        "layer_embed.table": TensorName("{body}embed_tokens_per_layer.weight", "v i -> v i"),
        "layer_context": TensorName("{body}per_layer_model_projection.weight", "i d -> i d"),
        "layer_context_norm.scale": TensorName("{body}per_layer_projection_norm.weight", "p -> p"),
    }
)

# HF's values for keys that a config.json leaves out. Gemma's own leave out many.
DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
}
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def _gemma4_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Gemma 4 text-only config.json."""
    return read_gemma4("Gemma4ForCausalLM", hf)


def _gemma4_multimodal_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a multimodal Gemma 4 config.json."""
    text = read_text_config(hf, "gemma4_text")
    tied = is_tied_wrapper(DEFAULTS | dict(hf), text)
    pad = read_int(text, "pad_token_id", 0, minimum=0)
    return read_gemma4("Gemma4ForConditionalGeneration", text, tie_word_embeddings=tied, media_token_id=pad)


def read_gemma4(architecture: str, hf: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    """Read the settings of a text model; `overrides` are fields of the config."""
    hf = DEFAULTS | dict(hf)
    # Then attention among the tokens of one image is not causal in layers with a window, but that among text is.
    sees_both_sides = hf.get("use_bidirectional_attention") == "vision"
    if sees_both_sides:
        del hf["use_bidirectional_attention"]
    num_layers, width = read_num_layers(hf), read_int(hf, "intermediate_size")
    pattern = tuple("sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(num_layers))
    # HF makes the last layer global, whatever the config.
    layer_types = (*read_layer_types(hf, pattern)[:-1], "full_attention")
    first_borrower = num_layers - read_int(hf, "num_kv_shared_layers", 0, minimum=0, maximum=num_layers)
    borrows = [layer >= first_borrower for layer in range(num_layers)]
    wide = read_bool(hf, "use_double_wide_mlp")
    kinds = [kind for kind in LAYER_TYPES if kind in layer_types]
    one_projection = read_bool(hf, "attention_k_eq_v")
    config = read_decoder(
        hf,
        architecture=architecture,
        moe=_read_moe(hf),
        input_size=_read_input_size(hf),
        final_soft_cap=read_optional_float(hf, "final_logit_softcapping"),
        ropes=tuple(_read_rope(hf, kind) for kind in kinds),
        layers={
            **head_sizes(hf, layer_types, _wide_heads(hf)),
            "window": windows_of(layer_types, read_int(hf, "sliding_window")),
            "sees_both_sides": [sees_both_sides and kind == "sliding_attention" for kind in layer_types],
            "rope": [kinds.index(kind) for kind in layer_types],
            "k_is_v": [one_projection and kind == "full_attention" for kind in layer_types],
            "borrows_kv": borrows,
            "intermediate_size": [width * (2 if wide and each else 1) for each in borrows],
        },
        **(read_shared(hf) | overrides),
    )
    if {group_of(each) for each in config.layers} != {group_of(each) for each in config.layers if not each.borrows_kv}:
        raise ValueError(f"num_kv_shared_layers is {num_layers - first_borrower}, which leaves nothing to share")
    return config


def read_shared(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `read_decoder` that Gemma 4 and EmbeddingGemma 2 have in common."""
    bias = read_bool(hf, "attention_bias")
    return {
        "act_key": "hidden_activation",
        "scale": 1.0,
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "v_norm": True,
        "post_norms": True,
        "embed_scale": read_int(hf, "hidden_size") ** 0.5,
    }


def _wide_heads(hf: Mapping[str, Any]) -> dict[str, int]:
    """Return what differs in the heads of global layers, by the hub's keys."""
    wide = {"head_dim": read_int(hf, "global_head_dim")}
    if read_bool(hf, "attention_k_eq_v") and hf.get("num_global_key_value_heads") is not None:
        wide["num_key_value_heads"] = read_int(hf, "num_global_key_value_heads")
    return wide


def head_sizes(hf: Mapping[str, Any], layer_types: Sequence[str], wide: Mapping[str, int]) -> dict[str, list[int]]:
    """Return head_dim and num_kv_heads of each layer, by `per_layer_config`.

    Without that key, global layers have the sizes of `wide`.
    """
    ours = {"head_dim": read_int(hf, "head_dim"), "num_key_value_heads": read_int(hf, "num_key_value_heads")}
    overrides: Mapping[int, Mapping[str, Any]] = _by_layer(read_mapping(hf, "per_layer_config"), len(layer_types))
    # An empty one means that all heads have one size.
    if hf.get("per_layer_config") is None:
        overrides = {layer: wide for layer, kind in enumerate(layer_types) if kind == "full_attention"}
    sizes = []
    for layer in range(len(layer_types)):
        override = overrides.get(layer, {})
        if unknown := sorted(set(override) - set(ours)):
            raise ValueError(f"per_layer_config has {', '.join(unknown)}; only {' and '.join(ours)} may differ")
        sizes.append({name: read_int(override, name, size) for name, size in ours.items()})
    return {
        "head_dim": [each["head_dim"] for each in sizes],
        "num_kv_heads": [each["num_key_value_heads"] for each in sizes],
    }


def _by_layer(entries: Mapping[str, Any], num_layers: int) -> dict[int, dict[str, Any]]:
    """Return the entries of `per_layer_config` by layer number, which HF writes with leading zeros."""
    numbers = {name: int(name) for name in entries if name.isdecimal() and name.isascii()}
    if wrong := sorted(name for name in entries if numbers.get(name, num_layers) >= num_layers):
        raise ValueError(f"per_layer_config has {', '.join(wrong)}, expected numbers of {num_layers} layers")
    return {number: read_mapping(entries, name) for name, number in numbers.items()}


def _read_rope(hf: Mapping[str, Any], kind: str) -> RopeConfig:
    """Return the RoPE table of one layer type."""
    ropes = read_mapping(hf, "rope_parameters") or _ROPES
    if kind not in ropes:
        raise ValueError(f"Gemma 4's rope_parameters are per layer type, but there are none for {kind}")
    return read_typed_rope(hf, {"partial_rotary_factor": 1.0} | read_mapping(ropes, kind))


def _read_moe(hf: Mapping[str, Any]) -> MoESpec | None:
    """Return the experts of all layers; the MLP beside them is the shared expert."""
    if not read_bool(hf, "enable_moe_block"):
        return None
    num_experts = read_int(hf, "num_experts")
    return MoESpec(
        num_experts=num_experts,
        top_k=read_int(hf, "top_k_experts", maximum=num_experts),
        intermediate_size=read_int(hf, "moe_intermediate_size"),
        normalizes=True,
        shared_size=read_int(hf, "intermediate_size"),
    )


def _read_input_size(hf: Mapping[str, Any]) -> int | None:
    """Return the width of per-layer inputs, or None if the model has none."""
    size = read_int(hf, "hidden_size_per_layer_input", minimum=0)
    vocab_size = read_int(hf, "vocab_size_per_layer_input")
    if size and vocab_size != read_int(hf, "vocab_size"):
        raise ValueError(f"vocab_size_per_layer_input is {vocab_size}, expected vocab_size, {hf['vocab_size']}")
    return size or None


class _Gemma4Router(Router):
    """A router that norms and scales its input, and scales each expert's output."""

    def __init__(self, spec: MoESpec, cfg: ModelConfig) -> None:
        super().__init__(spec, cfg)
        self.input_scale = declare((cfg.hidden_size,), ("embed",), jnp.float32)
        self.expert_scale = declare((spec.num_experts,), ("router",), jnp.float32)
        self.eps = cfg.norm_eps

    def __call__(self, x_td: Array) -> Choices:
        """Choose experts for each token of [t, d]."""
        normed_td = unit_norm(x_td.astype(jnp.float32), self.eps)
        choices = super().__call__(normed_td * self.input_scale[...][None] * x_td.shape[1] ** -0.5)
        return choices._replace(weights_tj=choices.weights_tj * self.expert_scale[...][choices.experts_tj])


class Gemma4Layer(nnx.Module):
    """Attention; then the MLP, with or without experts beside it; then the per-layer input, if there is one."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        norm = partial(RMSNorm, cfg.hidden_size, "embed", cfg, dtype)
        self.attn_norm, self.attn, self.post_attn_norm = norm(), Attention(spec, cfg, dtype), norm()
        self.mlp_norm, self.mlp, self.post_mlp_norm = norm(), GatedMLP(spec, cfg, dtype), norm()
        self.scalar = declare((1,), ("embed",), dtype)
        self.spec = spec
        if spec.moe:
            self.router, self.experts = _Gemma4Router(spec.moe, cfg), Experts(spec, cfg, dtype)
            self.dense_out_norm, self.experts_norm, self.experts_out_norm = norm(), norm(), norm()
        if size := spec.input_size:
            self.input_gate = declare((size, cfg.hidden_size), ("layer_input", "embed"), dtype, 1)
            self.input_out = declare((cfg.hidden_size, size), ("embed", "layer_input"), dtype, 1)
            self.post_input_norm = norm()

    def project(self, x_td: Array) -> Heads:
        """Return the inputs of attention, from the stream [t, d]."""
        return self.attn.project(self.attn_norm(x_td))

    def finish(self, x_td: Array, attended_tnh: Array, input_tp: Array | None = None) -> Array:
        """Return the stream after this layer, from the stream before it, attention's output, and the layer's input."""
        x_td = x_td + self.post_attn_norm(self.attn.output(attended_tnh))
        out_td = self.mlp(self.mlp_norm(x_td))
        if self.spec.moe:
            routed_td = self.experts(self.experts_norm(x_td), self.router(x_td)).astype(x_td.dtype)
            out_td = self.dense_out_norm(out_td) + self.experts_out_norm(routed_td)
        x_td = x_td + self.post_mlp_norm(out_td)
        if input_tp is not None:
            gated_tp = ACTIVATIONS[self.spec.hidden_act](linear(x_td, self.input_gate)) * input_tp
            x_td = x_td + self.post_input_norm(linear(gated_tp, self.input_out))
        return x_td * self.scalar[...][None]


class ContextFrame(Frame):
    """A frame that computes per-layer inputs from the tokens' embeddings."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        super().__init__(cfg, dtype)
        self.num_layers, self.input_size = cfg.num_layers, cfg.layers[0].input_size
        if self.input_size:
            width = self.num_layers * self.input_size
            self.layer_context = declare((width, cfg.hidden_size), ("layer_input", "embed"), dtype, 1)
            self.layer_context_norm = RMSNorm(self.input_size, "layer_input", cfg, dtype)

    def layer_inputs(self, tokens: TokenBatch, x_td: Array) -> Array:
        """Return the per-layer inputs [l, t, p], from the tokens and the first layer's input."""
        del tokens
        return self.context(x_td).swapaxes(0, 1)

    def context(self, x_td: Array) -> Array:
        """Return the normed projections [t, l, p] of the first layer's input."""
        assert self.input_size
        context_ti = linear(x_td, self.layer_context) * x_td.shape[1] ** -0.5
        return self.layer_context_norm(context_ti.reshape(len(x_td), self.num_layers, self.input_size))


class Gemma4Frame(ContextFrame):
    """A frame that computes per-layer inputs from the tokens and their embeddings."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        super().__init__(cfg, dtype)
        if self.input_size:
            self.layer_embed = Embedding(cfg, dtype, self.num_layers * self.input_size)

    def layer_inputs(self, tokens: TokenBatch, x_td: Array) -> Array:
        """Return the per-layer inputs [l, t, p], from the tokens and the first layer's input."""
        assert self.input_size
        context_tlp = self.context(x_td)
        token_tlp = self.layer_embed.embed(tokens.token_ids_t, self.input_size**0.5).reshape(context_tlp.shape)
        total_tlp = (context_tlp + token_tlp).astype(jnp.float32) * 2**-0.5
        return total_tlp.astype(x_td.dtype).swapaxes(0, 1)


# HF's values for keys that a vision_config leaves out.
_VISION_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10_240,
}


def _gemma4_vision_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the tower of a multimodal Gemma 4 config.json."""
    vision = read_vision(hf, _VISION_DEFAULTS, "gemma4_vision")
    heads, head_dim = read_int(vision, "num_attention_heads"), read_int(vision, "head_dim")
    require(vision, attention_bias=False, num_key_value_heads=heads)
    if head_dim % 4:
        raise ValueError(f"head_dim is {head_dim}; RoPE in two directions needs a multiple of 4")
    projector = Projector(
        join="mean",
        standardizes=read_bool(vision, "standardize"),
        dense=(DenseSettings(read_text_size(hf), bias=False),),
    )
    tower = TowerSettings(
        patch_shape=(3 * read_int(vision, "patch_size") ** 2,),
        projector=projector,
        merge=read_int(vision, "pooling_kernel_size"),
        positions="axial",
        side=read_int(vision, "position_embedding_size"),
        clips=read_bool(vision, "use_clipped_linears"),
    )
    layer: dict[str, Any] = {
        "head_dim": head_dim,
        "hidden_act": read_choice(vision, "hidden_activation", HIDDEN_ACTS, "gelu_pytorch_tanh"),
        "scale": 1.0,
        "qk_norm": True,
        "v_norm": True,
        "post_norms": True,
    }
    theta, eps = read_axial_theta(vision, 100.0), read_float(vision, "rms_norm_eps")
    config = read_tower(vision, "Gemma4Vision", tower, theta=theta, norm_eps=eps, **layer)
    return replace(config, ropes=(RopeConfig(theta=theta, is_split=True),))


class _ClippedAttention(nnx.Module):
    """The projections around attention, each with its bounds, and norms of queries, keys and values."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        d, n, h = cfg.hidden_size, spec.num_heads, spec.head_dim
        heads, axes = (n, h, d), ("heads", "head_dim", "embed")
        self.q, self.k = (ClippedLinear(declare(heads, axes, dtype, 1, rotates=True)) for _ in range(2))
        self.v = ClippedLinear(declare(heads, axes, dtype, 1))
        self.o = ClippedLinear(declare((d, n * h), ("embed", "heads"), dtype, 1))
        self.q_norm, self.k_norm = (RMSNorm(h, "head_dim", cfg, dtype, rotates=True) for _ in range(2))
        self.eps = cfg.norm_eps

    def project(self, x_td: Array) -> Heads:
        """Return queries, keys and values, not yet rotated."""
        q_tnh, k_tnh, v_tnh = self.q_norm(self.q(x_td)), self.k_norm(self.k(x_td)), unit_norm(self.v(x_td), self.eps)
        return Heads(q_tnh, k_tnh, v_tnh, None, None)

    def output(self, attended_tnh: Array) -> Array:
        """Return [t, d]."""
        return self.o(attended_tnh.reshape(len(attended_tnh), -1))


class _ClippedMLP(nnx.Module):
    """The MLP down(act(gate(x)) * up(x)), each matmul with its bounds."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        d, f, self.act = cfg.hidden_size, spec.intermediate_size, spec.hidden_act
        self.gate, self.up = (ClippedLinear(declare((f, d), ("mlp", "embed"), dtype, 1)) for _ in range(2))
        self.down = ClippedLinear(declare((d, f), ("embed", "mlp"), dtype, 1))

    def __call__(self, x_td: Array) -> Array:
        """Return [t, d]."""
        return self.down(ACTIVATIONS[self.act](self.gate(x_td)) * self.up(x_td))


class _Gemma4VisionLayer(DecoderLayer):
    """The usual layer, with or without bounds of its matmuls' inputs and outputs."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        super().__init__(spec, cfg, dtype)
        assert cfg.tower is not None
        if cfg.tower.clips:
            self.attn, self.mlp = _ClippedAttention(spec, cfg, dtype), _ClippedMLP(spec, cfg, dtype)


class _Gemma4Projector(RowProjector):
    """A projector of means, which are scaled up, standardized and normed."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert cfg.tower is not None
        settings = cfg.tower.projector
        super().__init__(settings, cfg.tower.group, cfg, dtype)
        self.eps, self.factor, self.standardizes = cfg.norm_eps, cfg.hidden_size**0.5, settings.standardizes
        if settings.standardizes:
            self.shift, self.scale = (declare((cfg.hidden_size,), ("embed",), jnp.float32) for _ in range(2))

    def gather(self, x_pd: Array, rows_rg: Array) -> Array:
        """Return the normed means of each row's patches, [r, d]."""
        mean_rd = super().gather(x_pd, rows_rg).astype(jnp.float32) * self.factor
        if self.standardizes:
            mean_rd = (mean_rd - self.shift[...][None]) * self.scale[...][None]
        return unit_norm(mean_rd.astype(x_pd.dtype), self.eps)


class _Gemma4TowerFrame(TowerFrame):
    """A frame with learned positions of columns and of rows."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        super().__init__(cfg, dtype)
        shape = 2, self.settings.side, cfg.hidden_size
        self.positions = declare(shape, ("positions", "positions", "embed"), dtype)
        self.projector = _Gemma4Projector(cfg, dtype)

    def start(self, inputs: PatchBatch) -> Array:
        """Return the stream [p, d] that goes into the first layer; pixels are from 0 to 1."""
        return super().start(inputs._replace(patches_pc=2 * jnp.asarray(inputs.patches_pc) - 1))


_VISION_LAYER = "{body}encoder.layers.{l}."
# Each matmul by our name: HF's, and the layout of its weight.
_VISION_MATMULS = {
    "layers.attn.q": ("self_attn.q_proj.", "(n h) d -> n h d"),
    "layers.attn.k": ("self_attn.k_proj.", "(n h) d -> n h d"),
    "layers.attn.v": ("self_attn.v_proj.", "(n h) d -> n h d"),
    "layers.attn.o": ("self_attn.o_proj.", "d c -> d c"),
    "layers.mlp.gate": ("mlp.gate_proj.", "f d -> f d"),
    "layers.mlp.up": ("mlp.up_proj.", "f d -> f d"),
    "layers.mlp.down": ("mlp.down_proj.", "d f -> d f"),
}
_VISION_NORMS = {
    "layers.attn_norm": "input_layernorm",
    "layers.post_attn_norm": "post_attention_layernorm",
    "layers.mlp_norm": "pre_feedforward_layernorm",
    "layers.post_mlp_norm": "post_feedforward_layernorm",
    "layers.attn.q_norm": "self_attn.q_norm",
    "layers.attn.k_norm": "self_attn.k_norm",
}
_VISION_NAMES = {
    "patch": TensorName("{body}patch_embedder.input_proj.weight", "d c -> d c"),
    "positions": TensorName("{body}patch_embedder.position_embedding_table", "a n d -> a n d"),
    "projector.shift": TensorName("{body}std_bias", "d -> d"),
    "projector.scale": TensorName("{body}std_scale", "d -> d"),
    "projector.dense0.weight": TensorName("{head}embedding_projection.weight", "o i -> o i"),
    **{f"{path}.scale": TensorName(f"{_VISION_LAYER}{name}.weight", "d -> d") for path, name in _VISION_NORMS.items()},
    # A matmul with bounds is a module of its own.
    **{
        f"{path}{end}": TensorName(f"{_VISION_LAYER}{name}linear.weight", layout)
        for path, (name, layout) in _VISION_MATMULS.items()
        for end in ("", ".weight")
    },
    **bound_names(_VISION_LAYER, _VISION_MATMULS),
}
GEMMA4_TOWER = Family(
    config_from_hf=_gemma4_vision_config,
    names=MappingProxyType(_VISION_NAMES),
    layer=_Gemma4VisionLayer,
    frame=_Gemma4TowerFrame,
    prefixes=tuple(Prefixes(f"{model}vision_tower.", f"{model}embed_vision.") for model in ("model.", "")),
    marks=("patch",),
)
FAMILIES = {
    "Gemma4ForCausalLM": Family(
        config_from_hf=_gemma4_config, names=GEMMA4_NAMES, layer=Gemma4Layer, frame=Gemma4Frame, is_text_part=True
    ),
    "Gemma4ForConditionalGeneration": Family(
        config_from_hf=_gemma4_multimodal_config,
        names=GEMMA4_NAMES,
        layer=Gemma4Layer,
        frame=Gemma4Frame,
        is_wrapper=True,
        vision=GEMMA4_TOWER,
        audio=GEMMA4_AUDIO,
    ),
}
