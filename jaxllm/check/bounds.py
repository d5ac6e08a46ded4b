"""Bound the tokens per second by the memory bandwidth and arithmetic of devices; no program reaches these bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jax.sharding import Mesh

from jaxllm.check.report import Bound
from jaxllm.execution.mesh import param_bytes
from jaxllm.models.config import LayerSpec, ModelConfig, MoESpec
from jaxllm.models.mixer_specs import IndexerSpec
from jaxllm.models.params import ParamSpec
from jaxllm.models.plan import LayerPlan

EMBEDDING, LOOKED_UP = "embed.table", ("positions", "types", "layer_embed.table")
"""The table that may serve as the head, and the tables from which a step only reads its tokens' rows."""
_OF_FRAMES = (".cross.k", ".cross.v", ".cross.k_bias", ".cross.v_bias")
"""The ends of the paths of weights that only an encoder's frames are multiplied by."""
_POOLING_HEAD = "head."
"""The prefixes of the paths of a head that makes outputs of hidden states."""


class LayerWork(NamedTuple):
    """The cost of attention in one layer, or of its recurrent state."""

    window: int | None
    kv_bytes: float
    """Bytes of one token's keys and values, on one device."""
    pair_flops: int
    """Operations of one query token and one key, on all devices together."""
    attention_chunk: int | None = None
    causal: bool = True
    num_frames: int | None = None
    """The frames that every token attends to, in cross-attention; None where tokens attend to tokens."""
    state_bytes: float = 0
    """Bytes of one sequence's recurrent state, on one device: a step reads and writes them."""

    def num_keys(self, length: int) -> int:
        """Return the number of keys that the last of `length` tokens reads."""
        if self.num_frames is not None:
            return self.num_frames
        if self.attention_chunk is not None:
            return (length - 1) % self.attention_chunk + 1
        return min(length, self.window or length)

    def num_pairs(self, length: int) -> int:
        """Return the (query, key) pairs of a prompt."""
        if self.num_frames is not None:
            return length * self.num_frames
        behind = self._num_behind(length)
        return behind if self.causal else 2 * behind - length

    def _num_behind(self, length: int) -> int:
        """Return the number of pairs with the key not after the query."""
        if self.attention_chunk is not None:
            num_chunks, rest = divmod(length, self.attention_chunk)
            return num_chunks * _triangle(self.attention_chunk) + _triangle(rest)
        window = min(length, self.window or length)
        return _triangle(window) + (length - window) * window


class ExpertWork(NamedTuple):
    """The cost of the experts of some layers; each token chooses `top_k` of them."""

    num_experts: int
    top_k: int
    bytes: int
    """Bytes of all their weights, on one device."""

    def expected_bytes(self, num_tokens: int) -> float:
        """Return the bytes of the experts that `num_tokens` tokens choose on average, if they choose at random."""
        return self.bytes * (1 - (1 - self.top_k / self.num_experts) ** num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The cost of tokens and the devices' speed; only matmuls count, without collectives."""

    num_devices: int
    bytes_per_second: float
    """The memory bandwidth of one device."""
    flops_per_second: float
    """The arithmetic of one device."""
    param_bytes: int
    """Bytes of one device's parameters that every step reads: all but the experts'."""
    token_flops: int
    """Operations of a token's matmuls with all layers' weights, with its experts', on all devices together.
    """
    head_flops: int
    """Operations of the logits, or of the output, of one row, on all devices together."""
    layers: tuple[LayerWork, ...]
    max_num_batched_tokens: int
    experts: tuple[ExpertWork, ...] = ()

    def decode(self, batch: int, length: int) -> Bound:
        """Return the bound on decoding `batch` requests that have `length` tokens in the KV cache each."""
        keys = [layer.num_keys(length) for layer in self.layers]
        pairs = list(zip(keys, self.layers, strict=True))
        cached = sum(num * layer.kv_bytes + 2 * layer.state_bytes for num, layer in pairs)
        moved = self._read_bytes(batch) + batch * cached
        flops = batch * (self.token_flops + self.head_flops + sum(num * layer.pair_flops for num, layer in pairs))
        return self._bound("decode", batch, length, batch, moved, flops)

    def prefill(self, length: int) -> Bound:
        """Return the bound on reading one prompt, alone."""
        return self._read("prefill", 1, length)

    def pool(self, batch: int, length: int) -> Bound:
        """Return the bound on reading `batch` texts, each for one output."""
        return self._read("pool", batch, length)

    def _read(self, phase: str, batch: int, length: int) -> Bound:
        num_tokens = batch * length
        pair_flops = sum(layer.num_pairs(length) * layer.pair_flops for layer in self.layers)
        full, rest = divmod(num_tokens, self.max_num_batched_tokens)
        moved = full * self._read_bytes(self.max_num_batched_tokens) + (self._read_bytes(rest) if rest else 0)
        flops = num_tokens * self.token_flops + batch * (self.head_flops + pair_flops)
        return self._bound(phase, batch, length, num_tokens, moved, flops)

    def _read_bytes(self, num_tokens: int) -> float:
        """Return the bytes of weights that a step of `num_tokens` tokens reads on one device."""
        return self.param_bytes + sum(experts.expected_bytes(num_tokens) for experts in self.experts)

    def _bound(self, phase: str, batch: int, length: int, tokens: int, moved: float, flops: float) -> Bound:
        memory_seconds = moved / self.bytes_per_second
        matmul_seconds = flops / (self.num_devices * self.flops_per_second)
        return Bound(
            phase=phase,
            batch=batch,
            length=length,
            tokens_per_second=tokens / max(memory_seconds, matmul_seconds),
            limited_by="bandwidth" if memory_seconds >= matmul_seconds else "matmul",
        )


def count_work(
    model: ModelConfig,
    specs: Mapping[str, ParamSpec],
    mesh: Mesh,
    *,
    kv_itemsize: int,
    max_num_batched_tokens: int,
    bytes_per_second: float,
    flops_per_second: float,
    generates: bool = True,
) -> Work:
    """Count the cost of a model's tokens; `kv_itemsize` is the size of a number in the KV cache.

    Learned positions, and an embedding table that does not serve as the head, are looked up, not read. A step
    reads the experts that its tokens choose, on average, if choices are spread evenly over experts and tokens.
    `generates`: rows go through the output head, else through the pooling head.
    """
    pooling_head = {path: spec for path, spec in specs.items() if path.startswith(_POOLING_HEAD)}
    is_head = generates and model.tie_word_embeddings
    of_frames = [path for path in specs if path.endswith(_OF_FRAMES)]
    unread = (*LOOKED_UP, *of_frames, *(() if is_head else (EMBEDDING,)), *(pooling_head if generates else ()))
    experts = {path: _experts_of(path, spec, model) for path, spec in specs.items() if spec.num_experts is not None}
    read = {path: spec for path, spec in specs.items() if path not in (*unread, *experts)}
    head = math.prod(specs[EMBEDDING].shape) if generates else _num_weights(pooling_head)
    weights = _num_weights(read)
    chosen = sum(
        math.prod(specs[path].shape) // moe.num_experts * moe.top_k
        for path, moe in experts.items()
        if specs[path].num_inputs  # not their biases
    )
    itemsize = specs[EMBEDDING].dtype.itemsize
    return Work(
        num_devices=mesh.size,
        bytes_per_second=bytes_per_second,
        flops_per_second=flops_per_second,
        param_bytes=param_bytes(mesh, read),
        token_flops=2 * (weights - head + chosen),
        head_flops=2 * head,
        layers=(
            *(_layer_work(layer, model, mesh.size, kv_itemsize, itemsize) for layer in model.layers),
            *(
                _indexer_work(layer.indexer, mesh.size, itemsize)
                for layer in model.layers
                if layer.indexer is not None and not layer.borrows_choice
            ),
        ),
        max_num_batched_tokens=max_num_batched_tokens,
        experts=tuple(
            ExpertWork(moe.num_experts, moe.top_k, param_bytes(mesh, {path: specs[path]}))
            for path, moe in experts.items()
        ),
    )


def _layer_work(layer: LayerSpec, model: ModelConfig, num_devices: int, kv_itemsize: int, itemsize: int) -> LayerWork:
    """Count the cost of a layer's attention, or of its recurrent state.

    Every device has all latents, which serve as keys and values.
    """
    if not layer.has_mixer:
        return LayerWork(None, kv_bytes=0, pair_flops=0)
    state_bytes = 0 if layer.state is None else layer.state.num_bytes(itemsize) / num_devices
    if not layer.attends:
        return LayerWork(None, kv_bytes=0, pair_flops=0, state_bytes=state_bytes)
    value_dim = layer.cached_dim if layer.latent is None else layer.latent.rank
    numbers = layer.cached_dim if layer.latent else 2 * layer.num_kv_heads // num_devices * layer.cached_dim
    clips = model.encoder.clips if layer.is_cross and model.encoder else None
    return LayerWork(
        # An indexer leaves as many tokens as a window, though not the last ones.
        layer.window if layer.indexer is None else layer.indexer.top_k,
        kv_bytes=numbers * kv_itemsize,
        pair_flops=2 * layer.num_heads * (layer.cached_dim + value_dim),
        attention_chunk=layer.attention_chunk,
        causal=layer.causal,
        num_frames=None if clips is None else clips.num_frames,
        state_bytes=state_bytes,
    )


def _indexer_work(indexer: IndexerSpec, num_devices: int, itemsize: int) -> LayerWork:
    """Count the cost of an indexer, which scores all tokens on every device."""
    pair_flops = 2 * indexer.num_heads * indexer.head_dim * num_devices
    return LayerWork(None, kv_bytes=indexer.head_dim * itemsize, pair_flops=pair_flops)


def _num_weights(specs: Mapping[str, ParamSpec]) -> int:
    """Return the number of weights that a row is multiplied by."""
    return sum(math.prod(spec.shape) // spec.repeats for spec in specs.values() if len(spec.hf_shape) == 2)


def _experts_of(path: str, spec: ParamSpec, model: ModelConfig) -> MoESpec:
    """Return the experts that a parameter belongs to; its path has the index of its kind of layers, or of its layer."""
    number = int(path.split(".")[1])
    moe = (LayerPlan(model.layers).kinds if spec.stacked else model.layers)[number].moe
    assert moe is not None
    return moe


def _triangle(length: int) -> int:
    """Return the (query, key) pairs of `length` tokens that each attend to themselves and all tokens before."""
    return length * (length + 1) // 2
