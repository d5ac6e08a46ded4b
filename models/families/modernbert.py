"""ModernBERT: an encoder with RoPE, gated MLPs, norms on inputs, and windows on two of three layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import HEAD_ACTS, HeadLayer, LayerSpec, ModelConfig, Pooling
from ..family import Family
from ..fields import read_bool, read_choice, read_float, read_int, require
from ..layers import Attention, EncoderFrame, GatedMLP, LayerNorm
from ..loop import Heads
from ..names import Fused, TensorName
from ..pooling import EMBED, TOKEN_CLASSIFY, as_multi_vector, read_num_labels
from ..reading import read_decoder, read_layer_types, read_num_layers, read_ropes_by_type, windows_of
from .opt import own_heads

_QKV, _QKV_BIAS = Fused(("q", "k", "v")), Fused(("q_bias", "k_bias", "v_bias"))
_GATE_UP, _GATE_UP_BIAS = Fused(("gate", "up")), Fused(("gate_bias", "up_bias"))
_MODERNBERT_NAMES = MappingProxyType(
    {
        "embed.table": TensorName("{body}embeddings.tok_embeddings.weight", "v d -> v d"),
        "embed_norm.scale": TensorName("{body}embeddings.norm.weight", "d -> d"),
        "embed_norm.bias": TensorName("{body}embeddings.norm.bias", "d -> d"),
        "final_norm.scale": TensorName("{body}final_norm.weight", "d -> d"),
        "final_norm.bias": TensorName("{body}final_norm.bias", "d -> d"),
        "layers.attn_norm.scale": TensorName("{body}layers.{l}.attn_norm.weight", "d -> d"),
        "layers.attn_norm.bias": TensorName("{body}layers.{l}.attn_norm.bias", "d -> d"),
        "layers.attn.q": TensorName("{body}layers.{l}.attn.Wqkv.weight", "(n h) d -> n h d", _QKV),
        "layers.attn.k": TensorName("{body}layers.{l}.attn.Wqkv.weight", "(k h) d -> k h d", _QKV),
        "layers.attn.v": TensorName("{body}layers.{l}.attn.Wqkv.weight", "(k h) d -> k h d", _QKV),
        "layers.attn.q_bias": TensorName("{body}layers.{l}.attn.Wqkv.bias", "(n h) -> n h", _QKV_BIAS),
        "layers.attn.k_bias": TensorName("{body}layers.{l}.attn.Wqkv.bias", "(k h) -> k h", _QKV_BIAS),
        "layers.attn.v_bias": TensorName("{body}layers.{l}.attn.Wqkv.bias", "(k h) -> k h", _QKV_BIAS),
        "layers.attn.o": TensorName("{body}layers.{l}.attn.Wo.weight", "d c -> d c"),
        "layers.attn.o_bias": TensorName("{body}layers.{l}.attn.Wo.bias", "d -> d"),
        "layers.mlp_norm.scale": TensorName("{body}layers.{l}.mlp_norm.weight", "d -> d"),
        "layers.mlp_norm.bias": TensorName("{body}layers.{l}.mlp_norm.bias", "d -> d"),
        "layers.mlp.gate": TensorName("{body}layers.{l}.mlp.Wi.weight", "f d -> f d", _GATE_UP),
        "layers.mlp.up": TensorName("{body}layers.{l}.mlp.Wi.weight", "f d -> f d", _GATE_UP),
        "layers.mlp.gate_bias": TensorName("{body}layers.{l}.mlp.Wi.bias", "f -> f", _GATE_UP_BIAS),
        "layers.mlp.up_bias": TensorName("{body}layers.{l}.mlp.Wi.bias", "f -> f", _GATE_UP_BIAS),
        "layers.mlp.down": TensorName("{body}layers.{l}.mlp.Wo.weight", "d f -> d f"),
        "layers.mlp.down_bias": TensorName("{body}layers.{l}.mlp.Wo.bias", "d -> d"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "vocab_size": 50_368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "hidden_activation": "gelu",
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
}
_POOLING_KINDS = {"cls": "CLS", "mean": "MEAN"}


class _ModernBertLayer(nnx.Module):
    """Attention and a gated MLP, each added to the stream, with a LayerNorm before it."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        def norm() -> LayerNorm:
            return LayerNorm(cfg.hidden_size, "embed", cfg, dtype)

        self.attn_norm = norm() if spec.norms_attention else None
        self.attn, self.mlp_norm, self.mlp = Attention(spec, cfg, dtype), norm(), GatedMLP(spec, cfg, dtype)

    def project(self, x_td: Array) -> Heads:
        """Return the inputs of attention, from the stream [t, d]."""
        return self.attn.project(x_td if self.attn_norm is None else self.attn_norm(x_td))

    def finish(self, x_td: Array, attended_tnh: Array) -> Array:
        """Return the stream after this layer, from the stream before it and attention's output."""
        x_td = self.attn.output(attended_tnh, x_td)
        return self.mlp(self.mlp_norm(x_td), x_td)


def _modernbert_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a ModernBERT embedder."""
    return _read(hf, "ModernBertModel", Pooling(tasks=EMBED, kind="CLS"))


def _modernbert_classifier_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a ModernBERT that classifies texts, or pairs of texts."""
    kind = _POOLING_KINDS[read_choice(hf, "classifier_pooling", tuple(_POOLING_KINDS), "cls")]
    pooling = Pooling(tasks=("classify",), kind=kind, head=_read_head(hf))
    return _read(hf, "ModernBertForSequenceClassification", pooling)


def _modernbert_token_classifier_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a ModernBERT that classifies tokens."""
    pooling = Pooling(tasks=TOKEN_CLASSIFY, kind="CLS", head=_read_head(hf))
    return _read(hf, "ModernBertForTokenClassification", pooling)


def _read_head(hf: Mapping[str, Any]) -> tuple[HeadLayer, ...]:
    return (
        HeadLayer(
            source="head.dense",
            size=read_int(hf, "hidden_size", DEFAULTS["hidden_size"]),
            bias=read_bool(hf, "classifier_bias"),
            act=read_choice(hf, "classifier_activation", HEAD_ACTS, "gelu"),
            norm="head.norm",
        ),
        HeadLayer(source="classifier", size=read_num_labels(hf)),
    )


def _read(hf: Mapping[str, Any], architecture: str, pooling: Pooling) -> ModelConfig:
    hf = DEFAULTS | dict(hf)
    require(hf, rope_scaling=None)
    hf |= own_heads(read_int(hf, "hidden_size"), read_int(hf, "num_attention_heads"))
    num_layers, period = read_num_layers(hf), read_int(hf, "global_attn_every_n_layers")
    pattern = tuple("sliding_attention" if layer % period else "full_attention" for layer in range(num_layers))
    layer_types = read_layer_types(hf, pattern)
    thetas = hf.get("global_rope_theta", 160_000.0), hf.get("local_rope_theta", 10_000.0)
    ropes, rope_of = read_ropes_by_type(hf, layer_types, *thetas)
    bias = read_bool(hf, "attention_bias")
    return read_decoder(
        hf,
        architecture=architecture,
        pooling=pooling,
        act_key="hidden_activation",
        norm_eps=read_float(hf, "norm_eps"),
        norm_bias=read_bool(hf, "norm_bias"),
        tie_word_embeddings=True,
        causal=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=read_bool(hf, "mlp_bias"),
        ropes=ropes,
        layers={
            "rope": rope_of,
            # `local_attention` counts the tokens on both sides, and not the token itself.
            "window": windows_of(layer_types, read_int(hf, "local_attention") // 2 + 1),
            "norms_attention": tuple(layer > 0 for layer in range(num_layers)),
        },
    )


_MODERNBERT = Family(
    config_from_hf=_modernbert_config,
    names=_MODERNBERT_NAMES,
    layer=_ModernBertLayer,
    frame=EncoderFrame,
    # The head of pretraining.
    leaves_out=("head.*", "decoder.*"),
)
FAMILIES = {
    "ModernBertModel": _MODERNBERT,
    "ModernBertForMaskedLM": _MODERNBERT,
    "ColBERTModernBertModel": as_multi_vector(_MODERNBERT),
    "ModernBertForSequenceClassification": replace(_MODERNBERT, config_from_hf=_modernbert_classifier_config),
    "ModernBertForTokenClassification": replace(_MODERNBERT, config_from_hf=_modernbert_token_classifier_config),
}
