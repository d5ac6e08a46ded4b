"""StableLM: Llama with LayerNorms and partial RoPE; some have attention and MLP side by side behind one norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_float, require
from ..reading import read_decoder
from .llama import LLAMA_NAMES

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
}


def _stablelm_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a StableLM config.json; norms of single heads, as in the 12B, are not supported."""
    hf = DEFAULTS | dict(hf)
    require(hf, qk_layernorm=False)
    parallel = read_bool(hf, "use_parallel_residual")
    return read_decoder(
        hf,
        architecture="StableLmForCausalLM",
        norm_eps=read_float(hf, "layer_norm_eps"),
        rotates_part=True,
        layer_norms=True,
        parallel=parallel,
        shares_norm=parallel,
        qkv_bias=read_bool(hf, "use_qkv_bias"),
    )


FAMILIES = {"StableLmForCausalLM": Family(config_from_hf=_stablelm_config, names=LLAMA_NAMES)}
