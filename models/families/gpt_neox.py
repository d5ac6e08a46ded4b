"""GPT-NeoX, such as Pythia: attention and MLP side by side, each with a LayerNorm, and partial RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_float, read_int
from ..names import Fused, Prefixes, TensorName, plain_mlp_names
from ..reading import read_decoder
from .opt import own_heads

_LAYER = "{body}layers.{l}."
_QKV = Fused(("q", "k", "v"), by_head=True)
_QKV_BIAS = Fused(("q_bias", "k_bias", "v_bias"), by_head=True)
_GPT_NEOX_NAMES = MappingProxyType(
    {
        "embed.table": TensorName("{body}embed_in.weight", "v d -> v d"),
        "final_norm.scale": TensorName("{body}final_layer_norm.weight", "d -> d"),
        "final_norm.bias": TensorName("{body}final_layer_norm.bias", "d -> d"),
        "lm_head.table": TensorName("{head}.weight", "v d -> v d"),
        "layers.attn_norm.scale": TensorName(_LAYER + "input_layernorm.weight", "d -> d"),
        "layers.attn_norm.bias": TensorName(_LAYER + "input_layernorm.bias", "d -> d"),
        **{
            f"layers.attn.{part}": TensorName(_LAYER + "attention.query_key_value.weight", "(n h) d -> n h d", _QKV)
            for part in "qkv"
        },
        **{
            f"layers.attn.{part}_bias": TensorName(_LAYER + "attention.query_key_value.bias", "(n h) -> n h", _QKV_BIAS)
            for part in "qkv"
        },
        "layers.attn.o": TensorName(_LAYER + "attention.dense.weight", "d c -> d c"),
        "layers.attn.o_bias": TensorName(_LAYER + "attention.dense.bias", "d -> d"),
        "layers.mlp_norm.scale": TensorName(_LAYER + "post_attention_layernorm.weight", "d -> d"),
        "layers.mlp_norm.bias": TensorName(_LAYER + "post_attention_layernorm.bias", "d -> d"),
        **plain_mlp_names(_LAYER + "mlp.dense_h_to_4h", _LAYER + "mlp.dense_4h_to_h"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "rotary_pct": 0.25, "rotary_emb_base": 10_000}


def _gpt_neox_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a GPT-NeoX config.json, which has its own names for the base of RoPE and the rotated part."""
    hf = DEFAULTS | dict(hf)
    hf |= own_heads(read_int(hf, "hidden_size"), read_int(hf, "num_attention_heads"))
    hf |= {"rope_theta": hf["rotary_emb_base"], "partial_rotary_factor": hf["rotary_pct"]}
    if hf["hidden_act"] == "gelu_fast":  # another way to write the same function
        hf["hidden_act"] = "gelu_new"
    bias = read_bool(hf, "attention_bias", True)
    return read_decoder(
        hf,
        architecture="GPTNeoXForCausalLM",
        norm_eps=read_float(hf, "layer_norm_eps"),
        rotates_part=True,
        layer_norms=True,
        parallel=read_bool(hf, "use_parallel_residual", True),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
    )


FAMILIES = {
    "GPTNeoXForCausalLM": Family(
        config_from_hf=_gpt_neox_config,
        names=_GPT_NEOX_NAMES,
        # The output head has one name on the hub, and another in newer versions of HF.
        prefixes=tuple(Prefixes(body, head) for head in ("embed_out", "lm_head") for body in ("gpt_neox.", "")),
        marks=("embed.table", "lm_head.table"),
        # Masks, which older versions of HF saved.
        leaves_out=("*.attention.bias", "*.attention.masked_bias"),
    )
}
