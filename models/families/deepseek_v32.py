"""DeepSeek V3.2: V3 with an indexer in each layer, which chooses the tokens that attention over latents reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_bool, read_int
from ..mixer_specs import IndexerSpec
from ..names import TensorName
from ..reading import read_num_layers
from .deepseek import DEEPSEEK_NAMES, V3_DEFAULTS, read_latent_decoder
from .glm4_moe import read_sigmoid_experts

_INDEXER = "{body}layers.{l}.self_attn.indexer."

SPARSE_NAMES = MappingProxyType(
    {
        **DEEPSEEK_NAMES,
        "layers.attn.indexer.q": TensorName(_INDEXER + "wq_b.weight", "(n h) q -> n h q"),
        "layers.attn.indexer.k": TensorName(_INDEXER + "wk.weight", "h d -> h d"),
        "layers.attn.indexer.k_norm.scale": TensorName(_INDEXER + "k_norm.weight", "h -> h"),
        "layers.attn.indexer.k_norm.bias": TensorName(_INDEXER + "k_norm.bias", "h -> h"),
        "layers.attn.indexer.weight": TensorName(_INDEXER + "weights_proj.weight", "n d -> n d"),
    }
)

# HF's values for keys that a config.json leaves out.
V32_DEFAULTS: dict[str, Any] = V3_DEFAULTS | {
    "max_position_embeddings": 163_840,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}


def _deepseek_v32_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a DeepSeek V3.2 config.json."""
    return read_sparse_decoder(V32_DEFAULTS | dict(hf), "DeepseekV32ForCausalLM", interleaved=False)


def read_sparse_decoder(
    hf: Mapping[str, Any], architecture: str, *, interleaved: bool, borrows: Sequence[bool] | None = None
) -> ModelConfig:
    """Read a decoder of V3's shape with indexers.

    `interleaved` is whether their RoPE is by default, and `borrows` says for each layer whether it attends to the
    tokens that an earlier one has chosen; None: no layer does.
    """
    num_layers = read_num_layers(hf)
    layers = {
        "indexer": [read_indexer(hf, interleaved=interleaved)] * num_layers,
        "borrows_choice": borrows or [False] * num_layers,
    }
    return read_latent_decoder(hf, architecture, read_sigmoid_experts(hf), layers=layers)


def read_indexer(hf: Mapping[str, Any], *, interleaved: bool) -> IndexerSpec:
    """Return the indexer of a layer; `interleaved` is whether its RoPE is by default."""
    return IndexerSpec(
        num_heads=read_int(hf, "index_n_heads"),
        head_dim=read_int(hf, "index_head_dim"),
        top_k=read_int(hf, "index_topk"),
        interleaved=read_bool(hf, "indexer_rope_interleave", interleaved),
    )


DEEPSEEK_V32 = Family(
    config_from_hf=_deepseek_v32_config,
    names=SPARSE_NAMES,
    # The multi-token-prediction layer, which comes last.
    leaves_out=("model.layers.{after}.*",),
)
FAMILIES = {"DeepseekV32ForCausalLM": DEEPSEEK_V32}
