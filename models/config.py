"""Frozen values say what a decoder is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

HIDDEN_ACTS = ("silu", "gelu", "gelu_pytorch_tanh")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """One RoPE table; fields that a type does not use keep their defaults."""

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    max_position_embeddings: int = 2048
    original_max_position_embeddings: int = 2048
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    rotated: float = 1.0
    """The share of a head that is rotated: its first numbers. The others are left as they are."""
    interleaved: bool = False
    """A checkpoint's pairs are neighbours, where elsewhere they are half of what is rotated apart."""

    def __post_init__(self) -> None:
        """Refuse settings that no frequencies can be made of with ValueError."""
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"RoPE type {self.rope_type!r} is not supported, only {', '.join(ROPE_TYPES)}")
        if self.theta <= 1:
            raise ValueError(f"rope_theta is {self.theta}, expected more than 1")
        if self.rotated > 1:
            raise ValueError(f"partial_rotary_factor is {self.rotated}, expected 1 at most")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor is {self.low_freq_factor}, expected less than high_freq_factor")

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many numbers of a head are rotated."""
        return int(head_dim * self.rotated)

    def head_order(self, head_dim: int) -> tuple[int, ...] | None:
        """Return a checkpoint's place of each number of a head, in the order that heads have here; None if the same.

        Number i is rotated together with number i + head_dim / 2 here; pairs that are not rotated come last. Attention
        does not mind the order, as queries and keys have the same.
        """
        rotary_dim = self.rotary_dim(head_dim)
        if rotary_dim == head_dim and not self.interleaved:
            return None
        rotated, rest = range(rotary_dim), range(rotary_dim, head_dim)
        firsts, seconds = rotated[: rotary_dim // 2], rotated[rotary_dim // 2 :]
        if self.interleaved:
            firsts, seconds = rotated[::2], rotated[1::2]
        middle = len(rest) // 2
        return (*firsts, *rest[:middle], *seconds, *rest[middle:])


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer of a decoder. Layers with equal specs have weights of the same shapes, and are one body of a loop."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    scale: float
    """The factor on attention's scores."""
    hidden_act: str = "silu"
    window: int | None = None
    """A token attends to so many, itself counted; None where attention is global."""
    rope: int | None = 0
    """The index among the model's tables of the one that rotates queries and keys; None where none does."""
    soft_cap: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    kv_repeats: int = 1
    """So many of `num_kv_heads` in a row are one head of the checkpoint, which has fewer of them than devices."""

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together with ValueError."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads are not a multiple of {self.num_kv_heads} kv heads")
        if self.num_kv_heads % self.kv_repeats:
            raise ValueError(f"{self.num_kv_heads} kv heads are not a multiple of {self.kv_repeats} repeats")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embeddings need an even one")
        if self.hidden_act not in HIDDEN_ACTS:
            raise ValueError(f"activation {self.hidden_act!r} is not supported, only {', '.join(HIDDEN_ACTS)}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything the forward pass depends on; hashable, so it can be static under jit."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeConfig, ...]
    """The distinct tables of rotary embeddings."""
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    final_soft_cap: float | None = None
    embed_scale: float = 1.0
    norm_offset: float = 0.0
    num_shards: int = 1
    """The number of devices that heads and MLP are spread over."""

    def __post_init__(self) -> None:
        """Refuse layers and tables that do not fit together with ValueError."""
        for layer in self.layers:
            if layer.rope is None:
                continue
            if not 0 <= layer.rope < len(self.ropes):
                raise ValueError(f"a layer has RoPE table {layer.rope}, and there are {len(self.ropes)}")
            if self.ropes[layer.rope].rotary_dim(layer.head_dim) % 2:
                raise ValueError(f"partial_rotary_factor rotates an odd part of a head of {layer.head_dim}")
            if layer.head_dim < 4 and self.ropes[layer.rope].rope_type == "dynamic":
                raise ValueError(f"head_dim is {layer.head_dim}; dynamic RoPE scaling needs at least 4")

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return len(self.layers)

    def with_layers(self, **fields: Any) -> ModelConfig:
        """Return the config with fields of all its layers replaced."""
        return replace(self, layers=tuple(replace(layer, **fields) for layer in self.layers))
