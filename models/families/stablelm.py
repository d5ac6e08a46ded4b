"""StableLM: Llama with LayerNorms and partial RoPE; some have attention and MLP side by side behind one norm."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_float
from ..names import TensorName
from ..reading import read_decoder
from .llama import LLAMA_NAMES

_STABLELM_NAMES = MappingProxyType(
    {
        **LLAMA_NAMES,
        "layers.attn.q_norm.scale": TensorName("{body}layers.{l}.self_attn.q_layernorm.norms.{e}.weight", "h -> h"),
        "layers.attn.k_norm.scale": TensorName("{body}layers.{l}.self_attn.k_layernorm.norms.{e}.weight", "h -> h"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
}


def _stablelm_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a StableLM config.json; the 12B norms each head of q and k by scales of its own."""
    hf = DEFAULTS | dict(hf)
    parallel, norms_heads = read_bool(hf, "use_parallel_residual"), read_bool(hf, "qk_layernorm")
    return read_decoder(
        hf,
        architecture="StableLmForCausalLM",
        norm_eps=read_float(hf, "layer_norm_eps"),
        rotates_part=True,
        layer_norms=True,
        qk_norm=norms_heads,
        qk_norm_by_head=norms_heads,
        qk_norms_apart=norms_heads,
        parallel=parallel,
        shares_norm=parallel,
        qkv_bias=read_bool(hf, "use_qkv_bias"),
    )


FAMILIES = {"StableLmForCausalLM": Family(config_from_hf=_stablelm_config, names=_STABLELM_NAMES)}
