"""The frozen values that describe a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .state_specs import StateSpec

HIDDEN_ACTS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2")
HEAD_ACTS = (*HIDDEN_ACTS, "tanh")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")


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
    short_factors: tuple[float, ...] = ()
    """The divisor of each frequency in sequences of up to `original_max_position_embeddings` tokens."""
    long_factors: tuple[float, ...] = ()
    """The divisor of each frequency in longer sequences."""
    rotated: float = 1.0
    """The fraction of a head's dimensions that is rotated, from the first on."""
    interleaved: bool = False
    """The checkpoint rotates dimensions 2i and 2i + 1 together, instead of i and i + rotary_dim / 2."""

    def __post_init__(self) -> None:
        """Refuse settings that no frequencies can be made of with ValueError."""
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type is {self.rope_type!r}, which is not supported, only {', '.join(ROPE_TYPES)}")
        if self.theta <= 1:
            raise ValueError(f"rope_theta is {self.theta}, expected more than 1")
        if self.rotated > 1:
            raise ValueError(f"partial_rotary_factor is {self.rotated}, expected 1 at most")
        if self.low_freq_factor > self.high_freq_factor:
            raise ValueError(f"low_freq_factor is {self.low_freq_factor}, expected high_freq_factor at most")

    def depends_on_length(self, max_length: int) -> bool:
        """Say whether a token's rotation depends on its sequence's length, for lengths of up to `max_length`."""
        match self.rope_type:
            case "dynamic":
                return max_length > self.max_position_embeddings
            case "longrope":
                return max_length > self.original_max_position_embeddings
            case _:
                return False

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many of a head's dimensions the table covers; a proportional one covers all, some with angle 0."""
        return head_dim if self.rope_type == "proportional" else int(head_dim * self.rotated)

    def head_order(self, head_dim: int) -> tuple[int, ...] | None:
        """Return the checkpoint's index of each dimension of a head, in the order used here; None if it is the same.

        Here dimension i is rotated together with i + head_dim / 2, and pairs that are not rotated come last. Attention
        does not depend on the order, which queries and keys share.
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


@dataclass(frozen=True)
class QueryScaling:
    """A factor on queries that grows with the position: 1 + beta * log(1 + floor((position + first) / length))."""

    beta: float
    length: int
    first: int = 0
    """What is added to positions, which count from 0: 1 in Llama 4."""


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """The sizes of multi-head latent attention: a token's keys and values of all heads are made of one latent."""

    rank: int
    """The numbers of a latent."""
    q_rank: int | None
    """The numbers that queries are made of; None if they are made of the hidden state."""
    nope_dim: int
    """The numbers of a head's queries and keys that RoPE leaves as they are."""
    rope_dim: int
    """The numbers behind them that RoPE rotates: those of a key are the same for all heads."""
    v_dim: int
    """The numbers of a head's values."""
    norm_eps: float = 1e-6
    """The epsilon of the norms of latents, and of what queries are made of."""

    @property
    def key_dim(self) -> int:
        """Return the size of a token's entry in the cache, and of an absorbed query."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """The experts of one layer, and how each token's are chosen and weighted."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """The width of each expert."""
    sigmoid: bool = False
    """Scores are sigmoids of the router's logits, instead of their softmax over all experts."""
    router_bias: bool = False
    correction_bias: bool = False
    """Experts are chosen by their score plus a learned bias, and weighted by the score alone."""
    num_groups: int = 1
    top_groups: int = 1
    """The number of groups, of the `num_groups` of equal size, whose experts a token can choose."""
    group_best: int = 2
    """Groups are ranked by the sum of so many of their best experts."""
    normalizes: bool = False
    """The weights of a token's experts are divided by their sum plus `normalizer_eps`."""
    normalizer_eps: float = 0.0
    routed_scale: float = 1.0
    scales_inputs: bool = False
    """An expert's weight multiplies its input, instead of its output."""
    expert_bias: bool = False
    swiglu_limit: float | None = None
    """The bound to which the clamped SwiGLU clips gates and ups; None for the layer's own activation."""
    shared_size: int | None = None
    """The width of the shared expert, which all tokens go through; None if there is none."""
    shared_gate: bool = False
    latent_size: int | None = None
    """The width of what experts take and give, to which the stream is projected, and back; None for the stream's."""

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together with ValueError."""
        if self.top_k > self.num_experts:
            raise ValueError(f"num_experts_per_tok is {self.top_k}, and there are {self.num_experts} experts")
        if self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"topk_group is {self.top_groups} of n_group {self.num_groups}, of {self.num_experts} experts"
            )
        group_size = self.num_experts // self.num_groups
        if self.top_groups < self.num_groups and group_size < self.group_best:
            raise ValueError(
                f"n_group is {self.num_groups}, of {self.num_experts} experts; a group needs at least {self.group_best}"
            )
        if self.top_k > group_size * self.top_groups:
            raise ValueError(f"num_experts_per_tok is {self.top_k}, more than {self.top_groups} groups have")
        if self.scales_inputs and self.top_k > 1:
            raise ValueError(f"num_experts_per_tok is {self.top_k}; an expert that scales its inputs needs 1")

    @property
    def is_plain(self) -> bool:
        """Say whether an expert is a gated MLP without biases and clipping."""
        return not self.expert_bias and self.swiglu_limit is None


POOLING_TYPES = ("CLS", "LAST", "MEAN")


@dataclass(frozen=True, kw_only=True)
class HeadLayer:
    """A layer of a pooling model's head: a matmul, an activation, and a LayerNorm, in this order."""

    source: str
    """HF's name of the module that holds the matmul's weight and bias, with `{body}` and `{head}` as in a
    `TensorName`."""
    size: int
    """The number of outputs."""
    bias: bool = True
    act: str | None = None
    norm: str | None = None
    """HF's name of the LayerNorm; None if there is none."""
    rows: tuple[int, ...] | None = None
    """The rows of the output head, or of the embedding, that are the weight, one or two; None for a weight of the
    layer's own."""

    def __post_init__(self) -> None:
        """Refuse an activation that does not exist with ValueError."""
        if self.act not in (None, *HEAD_ACTS):
            raise ValueError(f"activation {self.act!r} of a head is not supported, only {', '.join(HEAD_ACTS)}")


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """How hidden states become one output for each sequence, or for each token."""

    tasks: tuple[str, ...]
    """The tasks that the head is made for: embed and token_embed, or classify and token_classify."""
    kind: str
    """The hidden state that stands for a sequence: that of its first token (CLS) or of its last one (LAST), or the mean
    of all (MEAN)."""
    head: tuple[HeadLayer, ...] = ()
    is_difference: bool = False
    """The output is one number: what the head gives second, less what it gives first."""

    def __post_init__(self) -> None:
        """Refuse a kind that does not exist with ValueError."""
        if self.kind not in POOLING_TYPES:
            raise ValueError(f"pooling_type is {self.kind!r}, which is not supported, only {', '.join(POOLING_TYPES)}")

    def size(self, hidden_size: int) -> int:
        """Return the numbers in one output."""
        return 1 if self.is_difference else self.head[-1].size if self.head else hidden_size


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer of a model. Layers with equal specs have weights of the same shapes, and share a loop's body."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    scale: float
    """The factor on attention scores."""
    hidden_act: str = "silu"
    causal: bool = True
    """A token does not attend to those after it."""
    window: int | None = None
    """How many tokens back a token attends to, itself included, and as many ahead unless attention is causal; None for
    global or chunked attention."""
    attention_chunk: int | None = None
    """The size of the chunks that positions are cut into, where a token attends only within its own; else None."""
    rope: int | None = 0
    """The index of the RoPE table, among the model's, that rotates queries and keys; None for no rotation."""
    latent: LatentSpec | None = None
    """Attention over latents; None for keys and values of heads. There is one kv head, and `head_dim` is that of the
    latents with their rotated part."""
    state: StateSpec | None = None
    """What takes the place of attention, with a state of fixed size; None for attention. Then the sizes of attention
    are without meaning."""
    output_gate: bool = False
    """The output of attention is multiplied by the sigmoids of a gate, which is projected as queries are."""
    query_scaling: QueryScaling | None = None
    """A factor on queries, besides `scale`, that depends on the position; None for no such factor."""
    soft_cap: float | None = None
    norms_stream: bool = False
    """The residual stream is normed after each addition to it, instead of the inputs of attention and MLP."""
    norms_attention: bool = True
    """The input of attention is normed, if inputs are; the frame may have normed that of the first layer."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_all_heads: bool = False
    """The norms of q and k are over all heads together, instead of over each head."""
    qk_unit_norm: float | None = None
    """The epsilon with which the queries and keys of each head are divided by their root mean square; None if they are
    not."""
    v_norm: bool = False
    """Values are divided by their root mean square."""
    k_is_v: bool = False
    """One projection serves for both: values are the keys before their norm."""
    borrows_kv: bool = False
    """Keys and values are those of the nearest earlier layer of the same cache group that computes its own."""
    pre_norms: bool = True
    """The inputs of attention and MLP are normed."""
    post_norms: bool = False
    """The outputs of attention and MLP are normed before they are added to the residual stream."""
    residual_scale: float = 1.0
    """The factor on the outputs of attention and MLP, as they are added to the residual stream."""
    sinks: bool = False
    """Each query head has an attention sink: a learned score in its softmax that has no value."""
    has_mixer: bool = True
    """There is attention, or a recurrent state; a layer without them is its MLP or experts alone."""
    has_mlp: bool = True
    """There is an MLP, or there are experts; a layer without them is attention or a recurrent state alone."""
    gated: bool = True
    """The MLP, or each expert, multiplies by a gate."""
    moe: MoESpec | None = None
    """The experts in place of the MLP, or in Gemma 4 beside it; None for a dense layer."""
    input_size: int | None = None
    """The width of the per-layer input that the frame computes, besides the stream; None if there is none."""
    kv_repeats: int = 1
    """How many consecutive kv heads are copies of one of the checkpoint, which has fewer than there are devices."""

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together with ValueError."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_kv_heads}, which does not divide {self.num_heads} query heads"
            )
        if self.num_kv_heads % self.kv_repeats:
            raise ValueError(f"{self.num_kv_heads} kv heads are not a multiple of {self.kv_repeats} repeats")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embeddings need an even one")
        if self.hidden_act not in HIDDEN_ACTS:
            raise ValueError(f"activation {self.hidden_act!r} is not supported, only {', '.join(HIDDEN_ACTS)}")
        if self.latent is not None and (self.num_kv_heads, self.head_dim) != (1, self.latent.key_dim):
            raise ValueError(f"{self.num_kv_heads} kv heads of {self.head_dim} numbers are not those of latents")
        if self.window is not None and self.attention_chunk is not None:
            raise ValueError(f"a layer has a window of {self.window} and chunks of {self.attention_chunk} tokens")

    @property
    def rope_dim(self) -> int:
        """Return the numbers of a query or key that the RoPE table is for, which are its last."""
        return self.head_dim if self.latent is None else self.latent.rope_dim


class FeatureSpec(NamedTuple):
    """The features that a draft head reads of each token."""

    layers: tuple[int, ...]
    """Numbers of layers: the features are the residual stream that goes into each of them, side by side in this order,
    and the number of layers stands for the stream that comes out of the last. Empty for the hidden state after the
    final norm."""
    size: int
    """How many numbers a token's features are."""


@dataclass(frozen=True, kw_only=True)
class DraftHead:
    """What sets a draft head apart from a model of its own."""

    features: FeatureSpec
    first_layer: int = 0
    """The number that its first layer has in the checkpoint, where its layers come after those of its model."""
    num_guessed_ids: int | None = None
    """How many of the ids it can guess; None for all."""
    norms_stream: bool = False
    """Its residual stream begins with features after their norm, not before it."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything the forward pass depends on; hashable, so it can be static under jit."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeConfig, ...]
    """The distinct RoPE tables; empty where positions are learned."""
    max_position_embeddings: int
    norm_eps: float
    tie_word_embeddings: bool
    final_soft_cap: float | None = None
    final_norm: bool = True
    """The stream is normed after the last layer."""
    embed_size: int | None = None
    """The width of the embedding, if it is projected to the residual stream's and back."""
    position_offset: int = 0
    """The row of the learned positions that position 0 takes."""
    embed_scale: float = 1.0
    norm_offset: float = 0.0
    norm_bias: bool = True
    """LayerNorms add a bias."""
    logits_divisor: float = 1.0
    """What logits are divided by."""
    num_token_types: int = 0
    """The rows of the embedding of token types; 0 if there is none."""
    pooling: Pooling | None = None
    """How a pooling model's hidden states become outputs; None for a model that only generates."""
    num_shards: int = 1
    """The number of devices that heads and MLPs are sharded over."""
    num_expert_shards: int = 1
    """The number of devices that experts are dealt out among: so many times fewer share the width of each."""
    draft_head: DraftHead | None = None
    """What sets a draft head apart; None for a model of its own."""

    def __post_init__(self) -> None:
        """Refuse layers and tables that do not fit together with ValueError."""
        for layer in self.layers:
            if layer.rope is None:
                continue
            if not 0 <= layer.rope < len(self.ropes):
                raise ValueError(f"a layer has RoPE table {layer.rope}, and there are {len(self.ropes)}")
            rope = self.ropes[layer.rope]
            rotary_dim = rope.rotary_dim(layer.rope_dim)
            if rotary_dim % 2:
                raise ValueError(f"partial_rotary_factor rotates an odd part of a head of {layer.rope_dim}")
            if layer.k_is_v and rope.head_order(layer.head_dim) is not None:
                raise ValueError("keys that are values too need heads whose order RoPE leaves as it is")
            if rope.rope_type == "longrope" and {len(rope.short_factors), len(rope.long_factors)} != {rotary_dim // 2}:
                raise ValueError(f"short_factor and long_factor need {rotary_dim // 2} numbers, one for each pair")
            if rotary_dim < 4 and rope.rope_type == "dynamic":
                raise ValueError(
                    f"head_dim and partial_rotary_factor leave {rotary_dim} of 4 dimensions to dynamic RoPE"
                )

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return len(self.layers)

    def within(self, length: int) -> ModelConfig:
        """Return the model for sequences of up to `length` tokens: sizes that never cut anything off become None."""
        # Windows tell cache groups apart, and so whose keys and values a layer borrows.
        if any(layer.borrows_kv for layer in self.layers):
            return self

        def needed(size: int | None) -> int | None:
            return None if size is None or size >= length else size

        layers = (
            replace(layer, window=needed(layer.window), attention_chunk=needed(layer.attention_chunk))
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    def with_layers(self, **fields: Any) -> ModelConfig:
        """Return the config with fields of all its layers replaced."""
        return replace(self, layers=tuple(replace(layer, **fields) for layer in self.layers))
