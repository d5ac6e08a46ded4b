"""The frozen values that describe mixers besides plain attention: over latents, by distances, and recurrent states.

A sequence has a recurrent state of fixed size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RelativeSpec:
    """Scores that depend on the distance of two tokens too, by keys and queries of distances."""

    num_buckets: int
    """The rows of distances on each side."""
    max_distance: int | None
    """The distance at which the last row is reached, if far ones share rows; None if each has a row, up to the last."""


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """The sizes of multi-head latent attention: a token's keys and values of all heads are computed from one latent."""

    rank: int
    """The size of a latent."""
    q_rank: int | None
    """The size of the latent that queries are computed from; None if they are computed from the hidden state."""
    nope_dim: int
    """The size of the part of a head's queries and keys that RoPE does not rotate."""
    rope_dim: int
    """The size of the part after it that RoPE rotates; this part of a key is the same for all heads."""
    v_dim: int
    """The size of a head's values."""
    norm_eps: float = 1e-6
    """The epsilon of the norms of both kinds of latents."""
    grows: bool = False
    """Normed latents of both kinds are multiplied by the root of the stream's width over theirs."""
    norms_rotated: bool = False
    """The rotated part of keys is normed before its rotation."""

    @property
    def key_dim(self) -> int:
        """Return the size of a token's entry in the cache, and of an absorbed query."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class IndexerSpec:
    """The indexer of sparse attention over latents: it scores tokens, and attention reads those of highest score alone.

    A token's score for another one is the sum over heads of a weight times the ReLU of query times key; all heads have
    one key.
    """

    num_heads: int
    head_dim: int
    """The size of a query and of a key; RoPE rotates the first part, of the size that it rotates in attention."""
    top_k: int
    """The number of tokens that a token attends to at most."""
    interleaved: bool = False
    """The checkpoint rotates dimensions 2i and 2i + 1 together, see `RopeConfig`."""
    norms_inputs: bool = False
    """Queries are projected from the layer's input with a further LayerNorm, not from the latents of queries."""


@dataclass(frozen=True, kw_only=True)
class DeltaSpec:
    """A gated delta net: a short convolution of queries, keys and values, then the gated delta rule.

    With `decays_by_key` it is Kimi's delta attention.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    """The number of tokens that the convolution covers, including the current one."""
    decays_by_key: bool = False
    """Each number of a head's key has a decay of its own, instead of one for the head."""
    gate_rank: int | None = None
    """With `decays_by_key`, the rank of the projections to the output's gates and to the decays; None if they are not
    divided in two."""
    least_log_decay: float | None = None
    """With `decays_by_key`, the bound of a decay's logarithm, which is a sigmoid's part of it; None: it has no bound,
    and is computed by a softplus."""

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that do not fit together."""
        if self.num_value_heads % self.num_key_heads:
            heads = f"{self.num_value_heads} value heads"
            raise ValueError(f"linear_num_key_heads is {self.num_key_heads}, which does not divide {heads}")

    @property
    def num_channels(self) -> int:
        """Return the number of channels of the convolution."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def num_bytes(self, itemsize: int) -> int:
        """Return the bytes of a sequence's state; `itemsize` is that of the model's dtype."""
        matrix = 4 * self.key_dim * self.value_dim
        return (self.conv_size - 1) * self.num_channels * itemsize + self.num_value_heads * matrix

    def shard_refusal(self, num_devices: int) -> str | None:
        """Return the reason why its heads cannot be divided among the devices, or None if they can."""
        if self.num_key_heads % num_devices:
            return f"its {self.num_key_heads} key heads of linear attention do not divide"
        return None


@dataclass(frozen=True, kw_only=True)
class ConvSpec:
    """A short convolution between two gates."""

    num_channels: int
    conv_size: int
    bias: bool

    def num_bytes(self, itemsize: int) -> int:
        """Return the bytes of a sequence's state; `itemsize` is that of the model's dtype."""
        return (self.conv_size - 1) * self.num_channels * itemsize

    def shard_refusal(self, num_devices: int) -> str | None:
        """Return the reason why its channels cannot be divided among the devices, or None if they can."""
        if self.num_channels % num_devices:
            return f"its {self.num_channels} channels of convolutions do not divide"
        return None


@dataclass(frozen=True, kw_only=True)
class ScanSpec:
    """A layer of Mamba-2: a short convolution of x, b and c, then the scan of a state space, and a gated norm."""

    num_heads: int
    head_dim: int
    num_groups: int
    """The heads of a group share b and c, and are normed together."""
    state_dim: int
    conv_size: int
    """The number of tokens that the convolution covers, including the current one."""
    conv_bias: bool = True
    bias: bool = False
    """The projections into the layer and out of it add biases."""
    has_norm: bool = True
    """The output is normed."""
    norms_before_gate: bool = False
    """The norm comes before the gate, instead of behind it."""
    factors: tuple[float, ...] = (1.0,) * 5
    """The factors on the projected gate, x, b, c and time steps."""
    dt_limits: tuple[float, float] = (0.0, math.inf)
    """The least and the greatest time step."""

    def __post_init__(self) -> None:
        """Raise ValueError for sizes and limits that do not fit together."""
        if self.num_heads % self.num_groups:
            raise ValueError(f"{self.num_groups} groups of a state space do not divide its {self.num_heads} heads")
        if not 0 <= self.dt_limits[0] <= self.dt_limits[1]:
            raise ValueError(f"time_step_limit is {self.dt_limits}, expected two numbers from 0 on, the lesser first")

    @property
    def num_inner(self) -> int:
        """Return the size of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Return the number of channels of the convolution."""
        return self.num_inner + 2 * self.num_groups * self.state_dim

    def num_bytes(self, itemsize: int) -> int:
        """Return the bytes of a sequence's state; `itemsize` is that of the model's dtype."""
        return (self.conv_size - 1) * self.num_channels * itemsize + 4 * self.num_inner * self.state_dim

    def shard_refusal(self, num_devices: int) -> str | None:
        """Return the reason why its groups cannot be divided among the devices, or None if they can."""
        if self.num_groups % num_devices:
            return f"its {self.num_groups} groups of heads of state spaces do not divide"
        return None


@dataclass(frozen=True, kw_only=True)
class SelectiveSpec:
    """A layer of Mamba: a short convolution of x, from which time steps, b and c are projected, a scan, and a gate."""

    num_channels: int
    state_dim: int
    """The numbers of a channel's state."""
    dt_rank: int
    """The size of the latent from which time steps are projected."""
    conv_size: int
    """The number of tokens that the convolution covers, including the current one."""
    conv_bias: bool = True
    bias: bool = False
    """The projections into the layer and out of it add biases."""
    norm_eps: float | None = None
    """The epsilon of the norms of the latent, of b and of c; None if they are not normed."""
    norm_scales: bool = False
    """These norms have scales."""

    def num_bytes(self, itemsize: int) -> int:
        """Return the bytes of a sequence's state; `itemsize` is that of the model's dtype."""
        return self.num_channels * ((self.conv_size - 1) * itemsize + 4 * self.state_dim)

    def shard_refusal(self, num_devices: int) -> str | None:
        """Return the reason why its channels cannot be divided among the devices, or None if they can."""
        if self.num_channels % num_devices:
            return f"its {self.num_channels} channels of state spaces do not divide"
        return None


type StateSpec = DeltaSpec | ConvSpec | ScanSpec | SelectiveSpec
