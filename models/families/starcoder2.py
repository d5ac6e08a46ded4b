"""StarCoder 2: Llama with LayerNorms, an MLP without gate, biases and a window."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_float, read_optional_int
from ..names import plain_mlp_names
from ..reading import read_decoder
from .llama import LLAMA_NAMES

_STARCODER2_NAMES = MappingProxyType(
    {
        **LLAMA_NAMES,
        **plain_mlp_names("{body}layers.{l}.mlp.c_fc", "{body}layers.{l}.mlp.c_proj"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}


def _starcoder2_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a StarCoder 2 config.json."""
    hf = DEFAULTS | dict(hf)
    bias = read_bool(hf, "use_bias", True)
    return read_decoder(
        hf,
        architecture="Starcoder2ForCausalLM",
        norm_eps=read_float(hf, "norm_epsilon"),
        layer_norms=True,
        window=read_optional_int(hf, "sliding_window"),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


FAMILIES = {"Starcoder2ForCausalLM": Family(config_from_hf=_starcoder2_config, names=_STARCODER2_NAMES)}
