"""GPT-2: OPT with matrices stored [in, out], and q, k and v in one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_float, read_int, require
from ..layers import GPTFrame, GPTLayer
from ..names import Fused, Prefixes, TensorName, plain_mlp_names
from ..pooling import token_classification
from ..reading import read_decoder, read_num_layers
from .opt import own_heads

_QKV, _QKV_BIAS = Fused(("q", "k", "v"), axis=1), Fused(("q_bias", "k_bias", "v_bias"))
_GPT2_NAMES = MappingProxyType(
    {
        "embed.table": TensorName("{body}wte.weight", "v d -> v d"),
        "positions": TensorName("{body}wpe.weight", "p d -> p d"),
        "final_norm.scale": TensorName("{body}ln_f.weight", "d -> d"),
        "final_norm.bias": TensorName("{body}ln_f.bias", "d -> d"),
        "lm_head.table": TensorName("{head}lm_head.weight", "v d -> v d"),
        "layers.attn_norm.scale": TensorName("{body}h.{l}.ln_1.weight", "d -> d"),
        "layers.attn_norm.bias": TensorName("{body}h.{l}.ln_1.bias", "d -> d"),
        "layers.attn.q": TensorName("{body}h.{l}.attn.c_attn.weight", "d (n h) -> n h d", _QKV),
        "layers.attn.k": TensorName("{body}h.{l}.attn.c_attn.weight", "d (k h) -> k h d", _QKV),
        "layers.attn.v": TensorName("{body}h.{l}.attn.c_attn.weight", "d (k h) -> k h d", _QKV),
        "layers.attn.q_bias": TensorName("{body}h.{l}.attn.c_attn.bias", "(n h) -> n h", _QKV_BIAS),
        "layers.attn.k_bias": TensorName("{body}h.{l}.attn.c_attn.bias", "(k h) -> k h", _QKV_BIAS),
        "layers.attn.v_bias": TensorName("{body}h.{l}.attn.c_attn.bias", "(k h) -> k h", _QKV_BIAS),
        "layers.attn.o": TensorName("{body}h.{l}.attn.c_proj.weight", "c d -> d c"),
        "layers.attn.o_bias": TensorName("{body}h.{l}.attn.c_proj.bias", "d -> d"),
        "layers.mlp_norm.scale": TensorName("{body}h.{l}.ln_2.weight", "d -> d"),
        "layers.mlp_norm.bias": TensorName("{body}h.{l}.ln_2.bias", "d -> d"),
        **plain_mlp_names("{body}h.{l}.mlp.c_fc", "{body}h.{l}.mlp.c_proj", inputs_first=True),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "vocab_size": 50_257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
"""GPT-2's name for each key of other architectures; a config.json may have either."""


def _gpt2_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a GPT-2 config.json; `reorder_and_upcast_attn` is not read, as attention scores are always float32."""
    hf = DEFAULTS | {_KEYS[name]: hf[name] for name in _KEYS if name in hf} | dict(hf)
    require(hf, add_cross_attention=False)
    hf |= {name: read_int(hf, key) for name, key in _KEYS.items()}
    hidden_size = hf["hidden_size"]
    hf |= own_heads(hidden_size, hf["num_attention_heads"])
    scale = hf["head_dim"] ** -0.5 if read_bool(hf, "scale_attn_weights", True) else 1.0
    divides = read_bool(hf, "scale_attn_by_inverse_layer_idx")
    return read_decoder(
        hf | {"intermediate_size": read_int(hf, "n_inner", 4 * hidden_size)},
        architecture="GPT2LMHeadModel",
        act_key="activation_function",
        norm_eps=read_float(hf, "layer_norm_epsilon"),
        ropes=(),
        rope=None,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        layers={"scale": tuple(scale / (layer + 1 if divides else 1) for layer in range(read_num_layers(hf)))},
    )


def _gpt2_token_classifier_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a GPT-2 that classifies tokens."""
    return token_classification(_gpt2_config(hf), hf, "classifier")


_GPT2 = Family(
    config_from_hf=_gpt2_config,
    names=_GPT2_NAMES,
    layer=GPTLayer,
    frame=GPTFrame,
    prefixes=(Prefixes("transformer.", ""), Prefixes("", "")),
    # Masks, which older versions of HF saved.
    leaves_out=("*.attn.bias", "*.attn.masked_bias"),
)
FAMILIES = {
    "GPT2LMHeadModel": _GPT2,
    "GPT2ForTokenClassification": replace(_GPT2, config_from_hf=_gpt2_token_classifier_config),
}
