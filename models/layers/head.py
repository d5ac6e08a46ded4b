"""The head of a pooling model: hidden states become embeddings, or the scores of classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.paged_attention import AttentionBatch

from ..config import HeadLayer, ModelConfig, Pooling
from ..names import TensorName
from ..params import ParamSpec
from .linear import ACTIVATIONS, linear
from .norm import LayerNorm
from .params import declare


class Dense(nnx.Module):
    """A layer of a head."""

    def __init__(self, layer: HeadLayer, num_inputs: int, cfg: ModelConfig, dtype: DTypeLike) -> None:
        self.act = layer.act
        self.weight = declare((layer.size, num_inputs), ("outputs", "embed"), dtype, 1)
        self.bias = declare((layer.size,), ("outputs",), dtype) if layer.bias else None
        self.norm = LayerNorm(layer.size, "outputs", cfg, dtype) if layer.norm else None
        self.adds_input = layer.residual is not None
        self.residual = declare((layer.size, num_inputs), ("outputs", "embed"), dtype, 1) if layer.residual else None

    def __call__(self, x_rd: Array) -> Array:
        """Return [r, outputs] of rows [r, inputs]."""
        x_ro = linear(x_rd, self.weight)
        if self.bias is not None:
            x_ro = x_ro + self.bias[...][None]
        if self.act is not None:
            x_ro = ACTIVATIONS[self.act](x_ro)
        if self.adds_input:
            x_ro = x_ro + (x_rd if self.residual is None else linear(x_rd, self.residual))
        return x_ro if self.norm is None else self.norm(x_ro)


class PoolingHead(nnx.Module):
    """The layers between a hidden state and an output; none if the model does not pool or returns the states."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        pooling = cfg.pooling
        self.num_layers: list[int] = []
        """The numbers of layers of `Pooling.head`, and of each of the token heads."""
        for layers in (pooling.head, *(head.layers for head in pooling.token_heads)) if pooling else ((),):
            sizes = [cfg.hidden_size, *(layer.size for layer in layers)]
            for number, (layer, num_inputs) in enumerate(zip(layers, sizes, strict=False), sum(self.num_layers)):
                setattr(self, _name(number), Dense(layer, num_inputs, cfg, dtype))
            self.num_layers.append(len(layers))
        self.is_difference = pooling is not None and pooling.is_difference

    def __call__(self, x_rd: Array) -> Array:
        """Return the float32 outputs [r, o] of hidden states [r, d]."""
        out_ro = self._run(0, x_rd)
        return out_ro[:, 1:] - out_ro[:, :1] if self.is_difference else out_ro

    def of_tokens(self, x_td: Array) -> Array:
        """Return the float32 outputs [t, o] of tokens: those of all token heads side by side, if there are any."""
        outputs = [self._run(index, x_td) for index in range(1, len(self.num_layers))]
        return jnp.concatenate(outputs, axis=1) if outputs else self(x_td)

    def _run(self, index: int, x_rd: Array) -> Array:
        first = sum(self.num_layers[:index])
        for number in range(first, first + self.num_layers[index]):
            x_rd = getattr(self, _name(number))(x_rd)
        return x_rd.astype(jnp.float32)


def pooled_states(hidden_td: Array, batch: AttentionBatch, kind: str) -> Array:
    """Return the state that represents each sequence, [s, d], from its tokens' hidden states; see `Pooling.kind`.

    A mean is summed in float32, token by token, so that it does not depend on the rest of the batch.
    """
    starts_s, ends_s = batch.query_starts_s, batch.query_ends_s
    if kind == "CLS":
        return hidden_td[starts_s]
    if kind == "LAST":
        return hidden_td[ends_s - 1]
    rows_t = jnp.arange(len(hidden_td), dtype=jnp.int32)
    seqs_t = jnp.searchsorted(ends_s, rows_t, side="right", method="compare_all")
    # Rows of padding between sequences belong to none.
    seqs_t = jnp.where(rows_t >= starts_s.at[seqs_t].get(mode="clip"), seqs_t, len(ends_s))
    sums_sd = jax.ops.segment_sum(hidden_td.astype(jnp.float32), seqs_t, len(ends_s), indices_are_sorted=False)
    lengths_s1 = jnp.maximum(ends_s - starts_s, 1).astype(jnp.float32)[:, None]
    return (sums_sd / lengths_s1).astype(hidden_td.dtype)


def taken_rows(cfg: ModelConfig, specs: Mapping[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Return new specs for the weights that are one or two rows of the checkpoint's output head; see `HeadLayer`."""
    taken: dict[str, ParamSpec] = {}
    for number, layer in enumerate(cfg.pooling.layers if cfg.pooling else ()):
        if layer.rows is not None:
            path, (first, *others) = f"head.{_name(number)}.weight", layer.rows
            step = others[0] - first if others else 1
            end = first + step * len(layer.rows)
            rows = slice(first, end if end >= 0 else None, step)
            hf_shape = (cfg.vocab_size, cfg.hidden_size)
            taken[path] = replace(specs[path], hf_shape=hf_shape, hf_index=(rows,))
    return taken


def _name(number: int) -> str:
    return f"dense{number}"


def head_names(pooling: Pooling | None) -> Mapping[str, TensorName]:
    """Return the checkpoint's tensor for each parameter of the heads; their paths begin with "head."."""
    names: dict[str, TensorName] = {}
    for number, layer in enumerate(pooling.layers if pooling else ()):
        path = f"head.{_name(number)}"
        names[f"{path}.weight"] = TensorName(f"{layer.source}.weight", "o d -> o d")
        names[f"{path}.bias"] = TensorName(f"{layer.source}.bias", "o -> o")
        names[f"{path}.residual"] = TensorName(f"{layer.residual}.weight", "o d -> o d")
        if layer.norm is not None:
            names[f"{path}.norm.scale"] = TensorName(f"{layer.norm}.weight", "o -> o")
            names[f"{path}.norm.bias"] = TensorName(f"{layer.norm}.bias", "o -> o")
    return names
