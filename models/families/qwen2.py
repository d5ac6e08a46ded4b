"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v, and an optional sliding window on the upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import HeadLayer, ModelConfig, Pooling
from ..family import Family
from ..fields import read_bool, read_int, read_optional_int
from ..pooling import TOKEN_CLASSIFY, pooled
from ..reading import read_decoder, read_layer_types, read_num_layers, windows_of
from .llama import LLAMA_NAMES

# HF's values for keys that a config.json leaves out.
DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _qwen2_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Qwen2 config.json."""
    hf = DEFAULTS | dict(hf)
    return read_decoder(hf, architecture="Qwen2ForCausalLM", qkv_bias=True, layers={"window": qwen_windows(hf)})


def _qwen2_reward_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Qwen2 reward model, which gives one number for each token."""
    return _rewarding(_qwen2_config(hf), 1)


def _qwen2_process_reward_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Qwen2 that judges the steps of a solution, with two scores for each token."""
    return _rewarding(_qwen2_config(hf), 2)


def _rewarding(config: ModelConfig, num_scores: int) -> ModelConfig:
    head = (
        HeadLayer(source="score.0", size=config.hidden_size, act="relu"),
        HeadLayer(source="score.2", size=num_scores),
    )
    return pooled(config, Pooling(tasks=TOKEN_CLASSIFY, kind="LAST", head=head))


def qwen_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's window: none unless `use_sliding_window`, then from layer `max_window_layers` up."""
    num_layers, first = read_num_layers(hf), read_int(hf, "max_window_layers", minimum=0)
    default = tuple("sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers))
    window = read_optional_int(hf, "sliding_window") if read_bool(hf, "use_sliding_window") else None
    return windows_of(read_layer_types(hf, default), window)


FAMILIES = {
    "Qwen2ForCausalLM": Family(config_from_hf=_qwen2_config, names=LLAMA_NAMES),
    "Qwen2ForRewardModel": Family(config_from_hf=_qwen2_reward_config, names=LLAMA_NAMES),
    "Qwen2ForProcessRewardModel": Family(config_from_hf=_qwen2_process_reward_config, names=LLAMA_NAMES),
}
