"""Heads that predict the token after the next (MTP): an extra layer in checkpoints of DeepSeek V3, GLM-4.5 and Qwen3.5.

The layer is one of the model's own kind. Its input is the model's hidden state of a token beside the embedding of the
token that follows, each normed and both projected together; embedding and output head are the model's. For each further
guess in a row the model has no hidden state yet, and the head's own normed one takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from ..config import DraftHead, FeatureSpec, ModelConfig
from ..family import Family
from ..fields import read_int, read_mapping
from ..inputs import TokenBatch
from ..layers import Frame, RMSNorm, declare, linear
from ..names import TensorName
from .deepseek import DEEPSEEK_V3
from .glm4_moe import GLM4_MOE
from .glm4_moe_lite import GLM4_MOE_LITE
from .qwen3_5 import FAMILIES as QWEN3_5
from .qwen3_next import FAMILIES as QWEN3_NEXT

_MTP_NAMES = {
    "final_norm.scale": TensorName("{body}layers.{l}.shared_head.norm.weight", "d -> d"),
    "token_norm.scale": TensorName("{body}layers.{l}.enorm.weight", "d -> d"),
    "feature_norm.scale": TensorName("{body}layers.{l}.hnorm.weight", "d -> d"),
    "fuse": TensorName("{body}layers.{l}.eh_proj.weight", "d f -> d f"),
}
_APART_NAMES = {
    "final_norm.scale": TensorName("mtp.norm.weight", "d -> d"),
    "token_norm.scale": TensorName("mtp.pre_fc_norm_embedding.weight", "d -> d"),
    "feature_norm.scale": TensorName("mtp.pre_fc_norm_hidden.weight", "d -> d"),
    "fuse": TensorName("mtp.fc.weight", "d f -> d f"),
}


class _MTPFrame(Frame):
    """The parts around the layer of an MTP head."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        super().__init__(cfg, dtype)
        self.token_norm = RMSNorm(cfg.hidden_size, "embed", cfg, dtype)
        self.feature_norm = RMSNorm(cfg.hidden_size, "embed", cfg, dtype)
        self.fuse = declare((cfg.hidden_size, 2 * cfg.hidden_size), ("embed", "features"), dtype, 1)

    def read_features(self, features_td: Array) -> Array:
        """Return the model's hidden states unchanged."""
        return features_td

    def join(self, tokens: TokenBatch, features_td: Array) -> Array:
        """Return the stream [t, d] that goes into the layer, of tokens and the hidden states before them."""
        both = self.token_norm(self.start(tokens)), self.feature_norm(features_td)
        return linear(jnp.concatenate(both, axis=-1), self.fuse)


def _mtp_of(family: Family, architecture: str) -> Family:
    """Return the family of MTP heads of a family of models, whose layer follows the model's last one."""

    def read_config(hf: Mapping[str, Any]) -> ModelConfig:
        if not read_int(hf, "num_nextn_predict_layers", 0, minimum=0):
            raise ValueError("num_nextn_predict_layers is 0: the checkpoint has no layer that predicts further tokens")
        config = family.config_from_hf(hf)
        head = DraftHead(features=FeatureSpec((), config.hidden_size), first_layer=config.num_layers)
        return replace(config, architecture=architecture, layers=config.layers[-1:], draft_head=head)

    # All other tensors belong to the model, which checks them itself.
    names = {**family.names, **_MTP_NAMES}
    return replace(family, config_from_hf=read_config, names=names, frame=_MTPFrame, leaves_out=("*",))


def _apart_mtp_of(family: Family, architecture: str) -> Family:
    """Return the family of MTP heads of a family of hybrids: a layer of attention, apart from the model's layers."""

    def read_config(hf: Mapping[str, Any]) -> ModelConfig:
        text = read_mapping(hf, "text_config") if family.is_wrapper else hf
        if not read_int(text, "mtp_num_hidden_layers", 1, minimum=0):
            raise ValueError("mtp_num_hidden_layers is 0: the checkpoint has no layer that predicts further tokens")
        config = family.config_from_hf(hf)
        layer = next(layer for layer in reversed(config.layers) if layer.state is None)
        head = DraftHead(features=FeatureSpec((), config.hidden_size), first_layer=0)
        return replace(config, architecture=architecture, layers=(layer,), draft_head=head)

    def apart(names: Mapping[str, TensorName]) -> dict[str, TensorName]:
        return {
            path: name._replace(name=name.name.replace("{body}layers.", "mtp.layers.")) for path, name in names.items()
        }

    return replace(
        family,
        config_from_hf=read_config,
        names={**apart(family.names), **_APART_NAMES},
        other_names=tuple(map(apart, family.other_names)),
        frame=_MTPFrame,
        vision=None,
        leaves_out=("*",),
    )


MTP_HEADS = MappingProxyType(
    {
        "DeepseekV3ForCausalLM": "DeepSeekMTPModel",
        "Glm4MoeForCausalLM": "Glm4MoeMTPModel",
        "Glm4MoeLiteForCausalLM": "Glm4MoeLiteMTPModel",
        "Qwen3NextForCausalLM": "Qwen3NextMTP",
        "Qwen3_5ForCausalLM": "Qwen3_5TextMTP",
        "Qwen3_5ForConditionalGeneration": "Qwen3_5MTP",
        "Qwen3_5MoeForCausalLM": "Qwen3_5MoeTextMTP",
        "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeMTP",
    }
)
"""The draft head that checkpoints of an architecture may have."""
_FOLLOWING = {
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "Glm4MoeLiteForCausalLM": GLM4_MOE_LITE,
}
FAMILIES = {MTP_HEADS[name]: _mtp_of(family, MTP_HEADS[name]) for name, family in _FOLLOWING.items()} | {
    MTP_HEADS[name]: _apart_mtp_of(family, MTP_HEADS[name]) for name, family in {**QWEN3_NEXT, **QWEN3_5}.items()
}
