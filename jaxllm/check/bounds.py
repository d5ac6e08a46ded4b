"""Memory and arithmetic of devices bound the tokens a second; no program reaches these bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import Mesh

from jaxllm.execution.mesh import param_bytes
from jaxllm.models.config import ModelConfig
from jaxllm.models.model import ParamSpec

from .report import Bound

EMBEDDING = "embed.table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The cost of tokens, and what the devices give; collectives and everything but matmuls count for nothing."""

    num_devices: int
    bytes_per_second: float
    """The memory bandwidth of one device."""
    flops_per_second: float
    """The arithmetic of one device."""
    param_bytes: int
    """Bytes of one device's parameters, which every step reads."""
    kv_bytes: float
    """Bytes of one token's keys and values in one layer, on one device."""
    token_flops: int
    """Operations of a token's matmuls with the weights of all layers, on all devices together."""
    head_flops: int
    """Operations of the logits of one row, on all devices together."""
    pair_flops: int
    """Operations of one query token and one key in one layer, on all devices together."""
    windows: tuple[int | None, ...]
    max_num_batched_tokens: int

    def decode(self, batch: int, length: int) -> Bound:
        """Return the bound on decoding `batch` requests that have `length` tokens in the KV cache each."""
        keys = sum(min(length, window or length) for window in self.windows)
        moved = self.param_bytes + batch * keys * self.kv_bytes
        flops = batch * (self.token_flops + self.head_flops + keys * self.pair_flops)
        return self._bound("decode", batch, length, batch, moved, flops)

    def prefill(self, length: int) -> Bound:
        """Return the bound on reading one prompt, alone."""
        pairs = sum(_causal_pairs(length, window or length) for window in self.windows)
        moved = math.ceil(length / self.max_num_batched_tokens) * self.param_bytes
        flops = length * self.token_flops + self.head_flops + pairs * self.pair_flops
        return self._bound("prefill", 1, length, length, moved, flops)

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
    token_bytes: float,
    max_num_batched_tokens: int,
    bytes_per_second: float,
    flops_per_second: float,
) -> Work:
    """Count what a model's tokens cost; `token_bytes` are one device's part of a token's keys and values, all layers.

    An embedding table that does not serve as the head is looked up, not read.
    """
    read = {path: spec for path, spec in specs.items() if path != EMBEDDING or model.tie_word_embeddings}
    matrices = {path: spec for path, spec in read.items() if len(spec.hf_shape) == 2}
    head = model.vocab_size * model.hidden_size
    weights = sum(math.prod(spec.shape) // spec.repeats for spec in matrices.values())
    return Work(
        num_devices=mesh.size,
        bytes_per_second=bytes_per_second,
        flops_per_second=flops_per_second,
        param_bytes=param_bytes(mesh, read),
        kv_bytes=token_bytes / model.num_layers,
        token_flops=2 * (weights - head),
        head_flops=2 * head,
        pair_flops=4 * model.layers[0].num_heads * model.layers[0].head_dim,
        windows=tuple(layer.window for layer in model.layers),
        max_num_batched_tokens=max_num_batched_tokens,
    )


def _causal_pairs(length: int, window: int) -> int:
    """Return the (query, key) pairs of a prompt where a token sees itself and the `window - 1` before it."""
    window = min(length, window)
    return window * (window + 1) // 2 + (length - window) * window
