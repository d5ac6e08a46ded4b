"""Weights in Mistral's own form, under HF's names and in HF's order of rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import override

import numpy as np

from jaxllm.loading.checkpoint import Checkpoint, TensorInfo, WrappedCheckpoint
from jaxllm.loading.json_file import model_error
from jaxllm.loading.mistral.config import sees

_TEXT_ONLY = "Mistral's own form of the model is read for text alone; to see, use the form with config.json"
_OUTSIDE = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.gate": "block_sparse_moe.gate",
}
_ENDS = {"weight": "weight", "bias": "bias", "qscale_weight": "weight_scale", "qscale_act": "input_scale"}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"feed_forward\.(experts\.\d+\.w[123])")
_VISION = ("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.")
"""The starts of the names of tensors that only a model that sees has."""
_ROTATED = (".self_attn.q_proj.weight", ".self_attn.k_proj.weight", ".self_attn.q_proj.bias", ".self_attn.k_proj.bias")


class MistralCheckpoint(WrappedCheckpoint):
    """A checkpoint with Mistral's names of tensors. Raises VLLMValidationError for a name that is not known."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        self.dtype = inner.dtype
        self.text_only = _TEXT_ONLY if sees(inner.config) else ""
        self._names = {hf: name for name in inner.tensors if (hf := self._hf_name(name))}
        self.tensors: Mapping[str, TensorInfo] = {hf: inner.tensors[name] for hf, name in self._names.items()}

    @override
    def read(self, name: str, index: int | None = None) -> np.ndarray:
        tensor = self._inner.read(self._names[name])
        if name.endswith(_ROTATED):
            tensor = _halves_first(tensor, self._num_heads(name), name, self.source)
        return tensor if index is None else tensor[index]

    @override
    def _sources(self, name: str) -> Sequence[str]:
        return (self._names[name],)

    def _hf_name(self, name: str) -> str | None:
        """Return HF's name of a tensor; None for the tensors of a tower."""
        if name.startswith(_VISION):
            return None
        stem, _, end = name.rpartition(".")
        layer = _LAYER.fullmatch(stem)
        expert = layer and _EXPERT.fullmatch(layer[2])
        if expert and layer:
            hf = f"model.layers.{layer[1]}.block_sparse_moe.{expert[1]}"
        elif layer:
            hf = f"model.layers.{layer[1]}.{_IN_LAYER[layer[2]]}" if layer[2] in _IN_LAYER else None
        else:
            hf = _OUTSIDE.get(stem)
        if hf is None or end not in _ENDS:
            raise model_error(f"it has the tensor {name}, which no known model of Mistral's own form has", self.source)
        return f"{hf}.{_ENDS[end]}"

    def _num_heads(self, name: str) -> int:
        key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
        return self.config[key]


def _halves_first(rows: np.ndarray, num_heads: int, name: str, source: str) -> np.ndarray:
    """Return the rows of each head with the even ones first, [out, ...]: HF rotates halves, Mistral rotates pairs."""
    if type(num_heads) is not int or num_heads <= 0 or not rows.ndim or len(rows) % (2 * num_heads):
        raise model_error(f"{name} has shape {list(rows.shape)}, which {num_heads} heads do not divide", source)
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
