"""EmbeddingGemma 2: Gemma 4's layers with attention to both sides, per-layer inputs of the context alone, a projection.

Images and sounds are not read: the towers' tensors are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..config import HeadLayer, ModelConfig, Pooling
from ..family import OTHER_MODALITIES, Family
from ..fields import read_int, read_mapping
from ..names import DECODER_PREFIXES, NO_PREFIXES, Prefixes, TensorName
from ..pooling import EMBED, pooled
from ..reading import (
    LAYER_TYPES,
    every_nth_global,
    read_decoder,
    read_layer_types,
    read_num_layers,
    read_text_config,
    read_typed_rope,
    windows_of,
)
from .gemma4 import GEMMA4_NAMES, ContextFrame, Gemma4Layer, head_sizes, read_shared

_BLOCK = "{body}layers.{l}.ple_block"
_NAMES = MappingProxyType(
    {
        **GEMMA4_NAMES,
        "layers.input_gate": TensorName(f"{_BLOCK}.per_layer_input_gate.weight", "p d -> p d"),
        "layers.input_out": TensorName(f"{_BLOCK}.per_layer_projection.weight", "d p -> d p"),
        "layers.post_input_norm.scale": TensorName(f"{_BLOCK}.post_per_layer_input_norm.weight", "d -> d"),
        "layer_context": TensorName("{body}ple.per_layer_model_projection.weight", "i d -> i d"),
        "layer_context_norm.scale": TensorName("{body}ple.per_layer_projection_norm.weight", "p -> p"),
    }
)

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 262_144,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "global_head_dim": 512,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 512,
    "embedding_dim": 768,
}
_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def _text_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of the text model alone."""
    return _read("EmbeddingGemma2TextModel", hf)


def _wrapper_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a config.json."""
    return _read("EmbeddingGemma2Model", read_text_config(hf, "embedding_gemma2_text"))


def _read(architecture: str, hf: Mapping[str, Any]) -> ModelConfig:
    hf = DEFAULTS | dict(hf)
    pattern = every_nth_global(read_num_layers(hf), read_int(hf, "sliding_window_pattern"))
    # HF makes the last layer global, whatever the config.
    layer_types = (*read_layer_types(hf, pattern)[:-1], "full_attention")
    kinds = [kind for kind in LAYER_TYPES if kind in layer_types]
    ropes = read_mapping(hf, "rope_parameters") or _ROPES
    if missing := [kind for kind in kinds if kind not in ropes]:
        raise ValueError(f"rope_parameters are per layer type, but there are none for {missing[0]}")
    wide = ("head_dim", "global_head_dim"), ("num_key_value_heads", "num_global_key_value_heads")
    # The window counts the tokens before, or after, a token.
    windows = windows_of(layer_types, read_int(hf, "sliding_window") + 1)
    config = read_decoder(
        hf,
        architecture=architecture,
        causal=False,
        input_size=read_int(hf, "hidden_size_per_layer_input"),
        ropes=tuple(read_typed_rope(hf, read_mapping(ropes, kind)) for kind in kinds),
        layers={
            **head_sizes(hf, layer_types, {name: read_int(hf, key) for name, key in wide}),
            "window": windows,
            "rope": [kinds.index(kind) for kind in layer_types],
        },
        **read_shared(hf),
    )
    head = HeadLayer(source="{body}embedding_projection", size=read_int(hf, "embedding_dim"), bias=False)
    return pooled(config, Pooling(tasks=EMBED, kind="MEAN", head=(head,)))


_TEXT = Family(
    config_from_hf=_text_config,
    names=_NAMES,
    layer=Gemma4Layer,
    frame=ContextFrame,
    prefixes=(NO_PREFIXES, DECODER_PREFIXES),
)
FAMILIES = {
    "EmbeddingGemma2TextModel": _TEXT,
    "EmbeddingGemma2Model": Family(
        config_from_hf=_wrapper_config,
        names=_NAMES,
        layer=Gemma4Layer,
        frame=ContextFrame,
        prefixes=(Prefixes("language_model.", ""), Prefixes("model.language_model.", "")),
        leaves_out=OTHER_MODALITIES,
    ),
}
