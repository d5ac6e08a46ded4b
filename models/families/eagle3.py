"""EAGLE-3 heads: one layer that guesses a model's next token from its features at three depths.

Attention reads the embedding of a token beside the features of the token before it, projected to one hidden state; the
residual stream is that of the features alone. For each further guess in a row the model has no features yet: the head's
own last stream takes their place. Heads are checkpoints of their own, with the ids that they can guess: often
only the most frequent of the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import DraftHead, FeatureSpec, LayerSpec, ModelConfig
from ..family import Family
from ..fields import read_bool, read_int, read_ints, read_mapping, require
from ..inputs import TokenBatch
from ..layers import Attention, DecoderLayer, Embedding, RMSNorm, declare, linear
from ..layers.params import declare_merged
from ..loop import Heads, LatentHeads
from ..names import Prefixes, TensorName
from ..reading import read_decoder
from .llama import LLAMA_NAMES

_EAGLE3_NAMES = {
    **{path: name._replace(name=name.name.replace("layers.{l}.", "")) for path, name in LLAMA_NAMES.items()},
    "embed.table": TensorName("embed_tokens.weight", "v d -> v d"),
    "final_norm.scale": TensorName("norm.weight", "d -> d"),
    "lm_head.table": TensorName("lm_head.weight", "v d -> v d"),
    "fuse": TensorName("fc.weight", "d f -> d f"),
    "id_offsets": TensorName("d2t", "v -> v"),
    "layers.feature_norm.scale": TensorName("{body}hidden_norm.weight", "d -> d"),
}


class _EagleFrame(nnx.Module):
    """The parts around the layer of an EAGLE-3 head."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert cfg.draft_head is not None
        d, num_ids = cfg.hidden_size, cfg.draft_head.num_guessed_ids
        self.vocab_size = cfg.vocab_size
        self.embed = Embedding(cfg, dtype)
        self.fuse = declare((d, cfg.draft_head.features.size), ("embed", "features"), dtype, 1)
        self.final_norm = RMSNorm(d, "embed", cfg, dtype)
        self.lm_head = Embedding(cfg if num_ids is None else replace(cfg, vocab_size=num_ids), dtype)
        # The head's i-th id is the model's id i + offset i.
        self.id_offsets = None if num_ids is None else declare((num_ids,), ("ids",), jnp.int32)

    def read_features(self, features_tf: Array) -> Array:
        """Return the model's features at all depths as one hidden state [t, d]."""
        return linear(features_tf, self.fuse)

    def join(self, tokens: TokenBatch, features_td: Array) -> Array:
        """Return tokens and the features before them side by side, [t, 2 d], which the layer takes."""
        return jnp.concatenate((self.embed.embed(tokens.token_ids_t, 1.0), features_td), axis=-1)

    def end(self, x_td: Array) -> Array:
        """Return the stream unchanged: it is the feature of the next guess, and not normed."""
        return x_td

    def logits(self, hidden_sd: Array) -> Array:
        """Return float32 logits [s, v], -inf for ids that the head cannot guess."""
        logits_sg = self.lm_head.logits(self.final_norm(hidden_sd))
        if self.id_offsets is None:
            return logits_sg
        offsets_g = self.id_offsets[...]
        ids_g = jnp.arange(len(offsets_g)) + offsets_g
        return jnp.full((len(logits_sg), self.vocab_size), -jnp.inf).at[:, ids_g].set(logits_sg)


class _EagleLayer(DecoderLayer):
    """A decoder layer whose attention reads tokens beside features, and whose residual stream is that of features."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert cfg.draft_head is not None
        super().__init__(spec, cfg, dtype)
        assert isinstance(self.attn, Attention)
        shape = spec.head_dim, 2 * cfg.hidden_size
        self.attn.qkv = declare_merged(self.attn.heads, shape, ("head_dim", "features"), cfg.num_shards, dtype, 1)
        self.feature_norm = RMSNorm(cfg.hidden_size, "embed", cfg, dtype)
        self.norms_stream = cfg.draft_head.norms_stream

    def project(self, x_td: Array) -> Heads | LatentHeads:
        """Return what attention takes from tokens and features [t, 2 d]."""
        tokens_td, features_td = jnp.split(x_td, 2, axis=-1)
        assert self.attn_norm is not None
        both = self.attn_norm(tokens_td), self.feature_norm(features_td)
        return self.attn.project(jnp.concatenate(both, axis=-1))

    def finish(self, x_td: Array, attended_tnh: Array) -> Array:
        """Return the stream [t, d] after the layer."""
        _, features_td = jnp.split(x_td, 2, axis=-1)
        return super().finish(self.feature_norm(features_td) if self.norms_stream else features_td, attended_tnh)


def _eagle3_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of an EAGLE-3 head, also in the speculators library's form, with the layer's keys apart.

    `num_target_layers`, the layers of the model whose tokens it guesses, decides at which depths it reads features,
    unless its config.json has them.
    """
    is_speculators = "transformer_layer_config" in hf
    hf = read_mapping(hf, "transformer_layer_config") | dict(hf)
    require(hf, num_hidden_layers=1, norm_before_fc=False, norm_output=False, layer_types=["full_attention"])
    depths = _read_depths(hf)
    bias, vocab_size = read_bool(hf, "attention_bias"), read_int(hf, "vocab_size")
    num_ids = read_int(hf, "draft_vocab_size", vocab_size, maximum=vocab_size)
    features = FeatureSpec(depths, len(depths) * read_int(hf, "target_hidden_size", read_int(hf, "hidden_size")))
    return read_decoder(
        hf,
        architecture="LlamaForCausalLMEagle3",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=read_bool(hf, "mlp_bias"),
        tie_word_embeddings=False,
        draft_head=DraftHead(
            features=features,
            num_guessed_ids=None if num_ids == vocab_size else num_ids,
            norms_stream=read_bool(hf, "norm_before_residual", is_speculators),
        ),
    )


def _read_depths(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers whose inputs are the features."""
    eagle, name = read_mapping(hf, "eagle_config"), "eagle_aux_hidden_state_layer_ids"
    require(eagle, use_aux_hidden_state=True)
    layers = read_ints(hf, name) or read_ints(eagle, name)
    if layers:
        # Some name the layers whose outputs are read. Their first is 1, as the usual depths begin with layer 2's input.
        return tuple(layer + 1 for layer in layers) if layers[0] == 1 else layers
    if hf.get("num_target_layers") is None:
        raise ValueError(
            "it is a draft head, which guesses another model's tokens: name that model, and the head in "
            "speculative_config with method='eagle3'"
        )
    num_layers = read_int(hf, "num_target_layers", minimum=7)
    return 2, num_layers // 2, num_layers - 3


EAGLE3_HEAD = "LlamaForCausalLMEagle3"
FAMILIES = {
    EAGLE3_HEAD: Family(
        config_from_hf=_eagle3_config,
        names=_EAGLE3_NAMES,
        layer=_EagleLayer,
        frame=_EagleFrame,
        prefixes=(Prefixes("midlayer.", ""), Prefixes("layers.0.", "")),
        marks=("layers.attn.q",),
        # Checkpoints hold the ids that it can guess in two forms, and a head that can guess all may hold them too.
        leaves_out=("t2d", "d2t"),
    )
}
