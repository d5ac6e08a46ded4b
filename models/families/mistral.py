"""Mistral: Llama with a sliding window over all layers; also the text part of the multimodal `mistral3` wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ModelConfig
from ..family import Family
from ..fields import read_optional_int
from ..reading import is_tied_wrapper, read_decoder, read_num_layers, read_text_config
from .llama import LLAMA_NAMES

# HF's values for keys that a config.json leaves out.
DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096}


def mistral_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Mistral config.json."""
    return _read("MistralForCausalLM", hf)


def mistral3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the text part of a `mistral3` config.json."""
    text = read_text_config(hf, "mistral")
    return _read("Mistral3ForConditionalGeneration", text, tie_word_embeddings=is_tied_wrapper(hf, text))


def _read(architecture: str, hf: Mapping[str, Any], **overrides: Any) -> ModelConfig:
    hf = DEFAULTS | dict(hf)
    windows = (read_optional_int(hf, "sliding_window"),) * read_num_layers(hf)
    return read_decoder(hf, architecture=architecture, layers={"window": windows}, **overrides)


MISTRAL = Family(config_from_hf=mistral_config, names=LLAMA_NAMES)
MISTRAL3 = Family(
    config_from_hf=mistral3_config,
    names=LLAMA_NAMES,
    is_wrapper=True,
)
