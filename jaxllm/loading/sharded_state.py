"""Weights as vLLM's save_sharded_state writes them, a slice of every parameter for each rank, under HF's names.

The rules of slicing are those of vLLM's parallel layers (layers/linear.py, layers/vocab_parallel_embedding.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple, override

import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.checkpoint import Checkpoint, TensorInfo, WrappedCheckpoint
from jaxllm.loading.json_file import model_error
from jaxllm.loading.weight_files import rank_prefix

_QKV, _GATE_UP = "qkv_proj", "gate_up_proj"
_MEMBERS = {_QKV: ("q_proj", "k_proj", "v_proj"), _GATE_UP: ("gate_proj", "up_proj")}
"""The HF modules that vLLM joins into one, in order."""
_CUT_ALONG_OUTPUTS = ("up_proj.weight", "up_proj.bias", "embed_tokens.weight", "lm_head.weight")
_CUT_ALONG_INPUTS = ("o_proj.weight", "down_proj.weight")
_WHOLE = ("o_proj.bias", "down_proj.bias", "norm.weight")
"""The ends of the names of tensors that each rank has in full."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_VOCABULARY_MULTIPLE = 64
"""vLLM pads a vocabulary to a multiple of this number of rows."""
_BUFFERS = re.compile(r".+\.attn\._(q|k|v|prob)_scale|model\.normalizer")
"""Tensors that vLLM makes from the config: the scales of an FP8 cache, and Gemma's factor of embeddings."""
_ARCHITECTURES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "ArceeForCausalLM",
                "Exaone4ForCausalLM",
                "Gemma2ForCausalLM",
                "Gemma3ForCausalLM",
                "GemmaForCausalLM",
                "GraniteForCausalLM",
                "LlamaForCausalLM",
                "MistralForCausalLM",
                "Olmo2ForCausalLM",
                "Olmo3ForCausalLM",
                "Qwen2ForCausalLM",
                "Qwen3ForCausalLM",
                "SeedOssForCausalLM",
            ),
            (),
        ),
        **dict.fromkeys(("Glm4ForCausalLM", "GlmForCausalLM"), (_GATE_UP,)),
        "Phi3ForCausalLM": (_QKV, _GATE_UP),
    }
)
"""The architectures whose parallel layers are those above, and the modules that are joined in HF's files too."""


class _Slice(NamedTuple):
    """A part of a tensor: `rows` of what each of `ranks` has, joined along `axis`."""

    stored: str
    ranks: range
    axis: int = 0
    rows: slice = slice(None)


class ShardedCheckpoint(WrappedCheckpoint):
    """A checkpoint of slices. `inner` has all tensors of all ranks, under names with `rank_prefix`.

    A tensor is joined when it is read. Raises VLLMValidationError for a model with other parallel layers, for slices
    that do not fit together, and for a rank without files.
    """

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        self.dtype = inner.dtype
        self._fused = self._check_model()
        self._num_ranks = self._count_ranks()
        self._slices: dict[str, tuple[_Slice, ...]] = {}
        for name in self._stored_names():
            self._slices |= self._find_slices(name)
        if _EMBEDDING not in self._slices and _HEAD in self._slices:  # of two names of one tensor, vLLM has the first
            self._slices[_EMBEDDING] = self._slices.pop(_HEAD)
        self.tensors: Mapping[str, TensorInfo] = {name: self._info(name) for name in self._slices}

    @override
    def read(self, name: str, index: int | None = None) -> np.ndarray:
        parts = [
            self._inner.read(rank_prefix(rank) + part.stored)[part.rows]
            for part in self._slices[name]
            for rank in part.ranks
        ]
        tensor = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=self._slices[name][0].axis)
        tensor = tensor[: self.tensors[name].shape[0]]  # without the rows that pad a vocabulary
        return tensor if index is None else tensor[index]

    @override
    def _sources(self, name: str) -> Sequence[str]:
        names = [rank_prefix(rank) + part.stored for part in self._slices[name] for rank in part.ranks]
        return list(dict.fromkeys(names))

    def _check_model(self) -> tuple[str, ...]:
        """Return the modules that HF's files join too, for an architecture that can be read."""
        names = self.config.get("architectures")
        architecture = str(names[0]) if isinstance(names, list) and names else "an unknown architecture"
        if architecture not in _ARCHITECTURES:
            why = f"the files do not tell how vLLM has cut and ordered the layers of {architecture}"
        elif self.config.get("quantization_config"):
            why = "vLLM has repacked its quantized weights for the kernels of one GPU"
        else:
            return _ARCHITECTURES[architecture]
        raise VLLMValidationError(
            f'{self.source}: load_format="sharded_state" is not supported for this model: {why}. Give the checkpoint '
            f"that it was saved from, or one of {', '.join(sorted(_ARCHITECTURES))}.",
            parameter="load_format",
            value="sharded_state",
        )

    def _count_ranks(self) -> int:
        """Return the number of ranks, and check that each has files, with the same tensors of the same shapes."""
        ranks = {int(match[1]) for name in self._inner.tensors if (match := re.match(r"rank-(\d+)\.", name))}
        tensors = self._inner.tensors.items()
        by_rank = [
            {name.removeprefix(start): info.shape for name, info in tensors if name.startswith(start)}
            for start in map(rank_prefix, range(len(ranks)))
        ]
        lacking = next((rank for rank, tensors in enumerate(by_rank) if not tensors), None)
        if lacking is not None:
            raise model_error(f"rank {max(ranks)} has files, and rank {lacking} has none: fetch them too", self.source)
        for rank, shapes in enumerate(by_rank):
            for name, _ in sorted(shapes.items() ^ by_rank[0].items()):
                raise model_error(f"{name} is not of one shape on ranks 0 and {rank}", self.source)
        return len(ranks)

    def _stored_names(self) -> Iterator[str]:
        """Yield the names of the parameters, without those of vLLM's buffers."""
        start = rank_prefix(0)
        for name, info in self._inner.tensors.items():
            stored = name.removeprefix(start)
            if not name.startswith(start) or _BUFFERS.fullmatch(stored):
                continue
            if len(info.shape) < 1 + stored.endswith(_CUT_ALONG_INPUTS):
                raise model_error(f"{stored} has shape {list(info.shape)}", self.source)
            yield stored

    def _find_slices(self, stored: str) -> dict[str, tuple[_Slice, ...]]:
        """Return the HF tensors that a stored one holds parts of."""
        every = range(self._num_ranks)
        before, _, end = stored.rpartition(".")
        for module, members in _MEMBERS.items():
            if before.endswith(f".{module}"):
                parts = self._heads(stored) if module == _QKV else self._halves(stored)
                names = [f"{before.removesuffix(module)}{member}.{end}" for member in members]
                if module in self._fused:
                    return {stored: parts}
                return {name: (part,) for name, part in zip(names, parts, strict=True)}
        if stored.endswith(_CUT_ALONG_OUTPUTS):
            return {stored: (_Slice(stored, every),)}
        if stored.endswith(_CUT_ALONG_INPUTS):
            return {stored: (_Slice(stored, every, axis=1),)}
        if stored.endswith(_WHOLE):
            return {stored: (_Slice(stored, range(1)),)}
        raise model_error(f"the rule for the slices of {stored} is not known", self.source)

    def _heads(self, stored: str) -> tuple[_Slice, ...]:
        """Return the slices of queries, keys and values; several ranks may have the same KV head."""
        rows, num_ranks = self._stored_rows(stored), self._num_ranks
        heads = self.config.get("num_attention_heads")
        kv_heads = self.config.get("num_key_value_heads") or heads
        if type(heads) is int and type(kv_heads) is int and min(heads, kv_heads) > 0:
            copies = max(1, num_ranks // kv_heads)
            parts = heads // num_ranks, kv_heads * copies // num_ranks  # on each rank
            divides = (parts[0] * num_ranks, parts[1] * num_ranks) == (heads, kv_heads * copies)
            if divides and rows % (total := parts[0] + 2 * parts[1]) == 0:
                keys, values = (rows // total * (parts[0] + count * parts[1]) for count in (0, 1))
                owners = range(0, num_ranks, copies)
                return (
                    _Slice(stored, range(num_ranks), rows=slice(keys)),
                    _Slice(stored, owners, rows=slice(keys, values)),
                    _Slice(stored, owners, rows=slice(values, rows)),
                )
        text = f"{stored} has {rows} rows on each of {num_ranks} ranks, which do not fit"
        raise model_error(f"{text} num_attention_heads {heads} and num_key_value_heads {kv_heads}", self.source)

    def _halves(self, stored: str) -> tuple[_Slice, ...]:
        rows, every = self._stored_rows(stored), range(self._num_ranks)
        return _Slice(stored, every, rows=slice(rows // 2)), _Slice(stored, every, rows=slice(rows // 2, rows))

    def _stored_rows(self, stored: str) -> int:
        return self._inner.tensors[rank_prefix(0) + stored].shape[0]

    def _info(self, name: str) -> TensorInfo:
        """Return the shape, dtype and size of a joined tensor."""
        parts = self._slices[name]
        axis, first = parts[0].axis, self._inner.tensors[rank_prefix(0) + parts[0].stored]
        shape = list(first.shape)
        shape[axis] = sum(len(range(*part.rows.indices(shape[axis]))) * len(part.ranks) for part in parts)
        if name in (_EMBEDDING, _HEAD):
            shape[0] = self._vocabulary(name, shape[0])
        num_bytes = first.num_bytes // max(1, prod(first.shape)) * prod(shape)
        return TensorInfo(tuple(shape), first.dtype, num_bytes)

    def _vocabulary(self, name: str, rows: int) -> int:
        """Return the number of rows without those that pad the vocabulary."""
        size = self.config.get("vocab_size")
        if type(size) is not int or rows != -(-size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE:
            text = f"{name} has {rows} rows on all ranks, which are not vocab_size {size} padded to a multiple of"
            raise model_error(f"{text} {_VOCABULARY_MULTIPLE}, as with tokens that LoRA adds", self.source)
        return size
