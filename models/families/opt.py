"""OPT: learned positions, LayerNorms, an MLP without gate; OPT-350m norms the stream itself and projects embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_int, require
from ..layers import GPTFrame, GPTLayer
from ..names import Prefixes, TensorName, plain_mlp_names
from ..reading import read_decoder
from .llama import LLAMA_NAMES

_OPT_NAMES = MappingProxyType(
    {
        **{f"layers.attn.{name}": LLAMA_NAMES[f"layers.attn.{name}"] for name in ("q", "k", "v")},
        **{f"layers.attn.{name}_bias": LLAMA_NAMES[f"layers.attn.{name}_bias"] for name in ("q", "k", "v")},
        "embed.table": TensorName("{body}embed_tokens.weight", "v w -> v w"),
        "positions": TensorName("{body}embed_positions.weight", "p d -> p d"),
        "project_in": TensorName("{body}project_in.weight", "d w -> d w"),
        "project_out": TensorName("{body}project_out.weight", "w d -> w d"),
        "final_norm.scale": TensorName("{body}final_layer_norm.weight", "d -> d"),
        "final_norm.bias": TensorName("{body}final_layer_norm.bias", "d -> d"),
        "lm_head.table": TensorName("{head}lm_head.weight", "v w -> v w"),
        "layers.attn_norm.scale": TensorName("{body}layers.{l}.self_attn_layer_norm.weight", "d -> d"),
        "layers.attn_norm.bias": TensorName("{body}layers.{l}.self_attn_layer_norm.bias", "d -> d"),
        "layers.attn.o": TensorName("{body}layers.{l}.self_attn.out_proj.weight", "d c -> d c"),
        "layers.attn.o_bias": TensorName("{body}layers.{l}.self_attn.out_proj.bias", "d -> d"),
        "layers.mlp_norm.scale": TensorName("{body}layers.{l}.final_layer_norm.weight", "d -> d"),
        "layers.mlp_norm.bias": TensorName("{body}layers.{l}.final_layer_norm.bias", "d -> d"),
        **plain_mlp_names("{body}layers.{l}.fc1", "{body}layers.{l}.fc2"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "vocab_size": 50_272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "activation_function": "relu",
    "tie_word_embeddings": True,
}


def _opt_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read an OPT config.json."""
    hf = DEFAULTS | dict(hf)
    require(hf, layer_norm_elementwise_affine=True)
    hidden_size, norms_inputs = read_int(hf, "hidden_size"), read_bool(hf, "do_layer_norm_before", True)
    embed_size, bias = read_int(hf, "word_embed_proj_dim", hidden_size), read_bool(hf, "enable_bias", True)
    hf |= own_heads(hidden_size, read_int(hf, "num_attention_heads"))
    return read_decoder(
        hf | {"intermediate_size": read_int(hf, "ffn_dim")},
        architecture="OPTForCausalLM",
        act_key="activation_function",
        norm_eps=1e-5,
        ropes=(),
        rope=None,
        position_offset=2,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        norms_stream=not norms_inputs,
        final_norm=norms_inputs and not read_bool(hf, "_remove_final_layer_norm"),
        embed_size=None if embed_size == hidden_size else embed_size,
    )


def own_heads(hidden_size: int, num_heads: int) -> dict[str, int]:
    """Return the config keys of multi-head attention with heads that are together as wide as the residual stream."""
    if hidden_size % num_heads:
        raise ValueError(f"a hidden size of {hidden_size} is not a multiple of {num_heads} heads")
    return {"num_key_value_heads": num_heads, "head_dim": hidden_size // num_heads}


FAMILIES = {
    "OPTForCausalLM": Family(
        config_from_hf=_opt_config,
        names=_OPT_NAMES,
        layer=GPTLayer,
        frame=GPTFrame,
        prefixes=(Prefixes("model.decoder.", ""), Prefixes("decoder.", "")),
        leaves_out=("*decoder.version",),
    )
}
