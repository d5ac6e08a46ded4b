"""GLM-5: DeepSeek V3.2 with indexers whose RoPE is interleaved, and layers that share an earlier one's choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from ..fields import read_int
from ..reading import read_num_layers
from .deepseek_v32 import DEEPSEEK_V32, V32_DEFAULTS, read_sparse_decoder

# HF's values for keys that a config.json leaves out.
DEFAULTS = V32_DEFAULTS | {
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
}
_LETTERS = {"F": "full", "S": "shared"}


def _glm_moe_dsa_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a GLM-5 config.json."""
    hf = DEFAULTS | dict(hf)
    return read_sparse_decoder(hf, "GlmMoeDsaForCausalLM", interleaved=True, borrows=read_borrowed(hf))


def read_borrowed(hf: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return for each layer whether it attends to the tokens that an earlier layer has chosen.

    `indexer_types` names each layer's kind, and `index_topk_pattern` the first letter of each; without them every
    `index_topk_freq`-th layer chooses, from layer `index_skip_topk_offset` - 1 on, and all layers before that one.
    """
    num_layers, kinds = read_num_layers(hf), hf.get("indexer_types")
    if kinds is None:
        pattern = hf.get("index_topk_pattern")
        kinds = [_LETTERS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else pattern
    if kinds is None:
        every = max(1, read_int(hf, "index_topk_freq", 1, minimum=0))
        offset = read_int(hf, "index_skip_topk_offset", 2, minimum=0)
        return tuple(max(layer - offset + 1, 0) % every != 0 for layer in range(num_layers))
    if not isinstance(kinds, list | tuple) or any(kind not in _LETTERS.values() for kind in kinds):
        raise ValueError(f"indexer_types is {kinds!r}, expected full or shared for each layer")
    if len(kinds) < num_layers:
        raise ValueError(f"indexer_types is {kinds!r}, expected one for each of {num_layers} layers")
    return tuple(kind == "shared" for kind in kinds[:num_layers])


FAMILIES = {"GlmMoeDsaForCausalLM": replace(DEEPSEEK_V32, config_from_hf=_glm_moe_dsa_config)}
