"""OLMo 2 and 3: norms after attention and MLP instead of before, and norms of q and k over all heads together."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_optional_int
from ..names import TensorName
from ..reading import read_decoder, read_layer_types, read_num_layers, read_ropes_by_type, windows_of
from .llama import LLAMA_NAMES

_OLMO_NAMES = MappingProxyType(
    {
        **{name: tensor for name, tensor in LLAMA_NAMES.items() if not name.startswith("layers.mlp_norm")},
        "layers.attn.q_norm.scale": TensorName("{body}layers.{l}.self_attn.q_norm.weight", "(n h) -> n h"),
        "layers.attn.k_norm.scale": TensorName("{body}layers.{l}.self_attn.k_norm.weight", "(k h) -> k h"),
        "layers.post_attn_norm.scale": TensorName("{body}layers.{l}.post_attention_layernorm.weight", "d -> d"),
        "layers.post_mlp_norm.scale": TensorName("{body}layers.{l}.post_feedforward_layernorm.weight", "d -> d"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {"vocab_size": 50_304, "rms_norm_eps": 1e-5}
_OLMO3_DEFAULTS = DEFAULTS | {"sliding_window": 4096, "rope_theta": 500_000.0}


def _olmo2_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read an OLMo 2 config.json."""
    return _read("Olmo2ForCausalLM", DEFAULTS | dict(hf))


def _olmo3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read an OLMo 3 config.json: three layers of four have a sliding window, and plain RoPE."""
    hf = _OLMO3_DEFAULTS | dict(hf)
    pattern = ("sliding_attention", "sliding_attention", "sliding_attention", "full_attention")
    layer_types = read_layer_types(hf, tuple(pattern[layer % 4] for layer in range(read_num_layers(hf))))
    ropes, rope_of = read_ropes_by_type(hf, layer_types, hf["rope_theta"], hf["rope_theta"])
    windows = windows_of(layer_types, read_optional_int(hf, "sliding_window"))
    return _read("Olmo3ForCausalLM", hf, ropes=ropes, layers={"window": windows, "rope": rope_of})


def _read(architecture: str, hf: Mapping[str, Any], **fields: Any) -> ModelConfig:
    bias = read_bool(hf, "attention_bias")
    return read_decoder(
        hf,
        architecture=architecture,
        qk_norm=True,
        qk_norm_all_heads=True,
        pre_norms=False,
        post_norms=True,
        qkv_bias=bias,
        o_bias=bias,
        **fields,
    )


FAMILIES = {
    "Olmo2ForCausalLM": Family(config_from_hf=_olmo2_config, names=_OLMO_NAMES),
    "Olmo3ForCausalLM": Family(config_from_hf=_olmo3_config, names=_OLMO_NAMES),
}
