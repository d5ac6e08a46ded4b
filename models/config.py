"""The frozen values that describe a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .mixer_specs import IndexerSpec, LatentSpec, RelativeSpec, StateSpec
from .towers.settings import ClipSettings, TowerSettings

HIDDEN_ACTS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "relu", "relu2")
HEAD_ACTS = (*HIDDEN_ACTS, "tanh")
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional", "ntk")


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
    """The fraction of a head's dimensions that is rotated, starting with the first."""
    axes: tuple[int, ...] = ()
    """For each frequency, which of a token's three positions it turns with, in multimodal RoPE; empty if tokens have
    one position."""
    interleaved: bool = False
    """The checkpoint rotates dimensions 2i and 2i + 1 together, instead of i and i + rotary_dim / 2."""
    learned: bool = False
    """Frequencies are multiplied by the exponentials of numbers in the checkpoint."""
    is_split: bool = False
    """In a vision tower: the checkpoint rotates the first half of a head by the column and the second by the row, each
    like a head of its own, whose pairs may be interleaved."""

    def __post_init__(self) -> None:
        """Raise ValueError for settings that give no frequencies."""
        if self.rope_type not in _ROPE_TYPES:
            raise ValueError(f"rope_type is {self.rope_type!r}, which is not supported, only {', '.join(_ROPE_TYPES)}")
        if self.theta <= 1:
            raise ValueError(f"rope_theta is {self.theta}, expected more than 1")
        if self.rotated > 1:
            raise ValueError(f"partial_rotary_factor is {self.rotated}, expected 1 at most")
        if self.low_freq_factor > self.high_freq_factor:
            raise ValueError(f"low_freq_factor is {self.low_freq_factor}, expected high_freq_factor at most")

    def depends_on_length(self, max_length: int) -> bool:
        """Return whether a token's rotation depends on its sequence's length, for lengths of up to `max_length`."""
        match self.rope_type:
            case "dynamic":
                return max_length > self.max_position_embeddings
            case "longrope":
                return max_length > self.original_max_position_embeddings
            case _:
                return False

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of a head's dimensions that the table covers: all, some with angle 0, if it is
        proportional."""
        return head_dim if self.rope_type == "proportional" else int(head_dim * self.rotated)

    def head_order(self, head_dim: int) -> tuple[int, ...] | None:
        """Return the checkpoint's index of each dimension of a head in the model's order; None if the orders are equal.

        The model rotates dimension i together with i + head_dim / 2, and pairs that are not rotated come last.
        Attention
        does not depend on the order, which queries and keys share.
        """
        rotary_dim = self.rotary_dim(head_dim)
        if self.is_split:
            columns, rows = range(head_dim // 2), range(head_dim // 2, head_dim)
            pairs = slice(0, None, 2), slice(1, None, 2)
            if not self.interleaved:
                pairs = slice(head_dim // 4), slice(head_dim // 4, None)
            return tuple(number for part in pairs for half in (rows, columns) for number in half[part])
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
    """The number that is added to positions, which count from 0; it is 1 in Llama 4."""


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """The experts of one layer, and how a token's experts are chosen and weighted."""

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
    """The number of groups that a token can choose experts from; the `num_groups` groups have equal sizes."""
    group_best: int = 2
    """The number of best experts in a group by whose sum groups are ranked."""
    normalizes: bool = False
    """The weights of a token's experts are divided by their sum plus `normalizer_eps`."""
    normalizer_eps: float = 0.0
    routed_scale: float = 1.0
    scales_inputs: bool = False
    """An expert's weight multiplies its input, instead of its output."""
    expert_bias: bool = False
    swiglu_limit: float | None = None
    """The bound to which the clamped SwiGLU clips gates and ups; None for the layer's `hidden_act`."""
    act_limit: float | None = None
    """The bound of activated gates, and of ups on both sides; None for no bound."""
    shared_size: int | None = None
    """The width of the shared expert, which all tokens go through; None if there is none."""
    shared_gate: bool = False
    shared_scale: float = 1.0
    """The factor on the shared expert's output."""
    latent_size: int | None = None
    """The width of experts' inputs and outputs, if the stream is projected to it and back; else None."""

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that do not fit together."""
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
        """Return whether an expert is a gated MLP without biases and clipping."""
        return not self.expert_bias and self.swiglu_limit is None and self.act_limit is None


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
    residual: str | None = None
    """The name of the module whose weight projects the input, which is added after the activation; "" if the input is
    added unchanged, None if nothing is added."""
    rows: tuple[int, ...] | None = None
    """The one or two rows of the output head or embedding that are the weight; None if the layer has its own weight."""

    def __post_init__(self) -> None:
        """Raise ValueError for an activation that does not exist."""
        if self.act not in (None, *HEAD_ACTS):
            raise ValueError(f"activation {self.act!r} of a head is not supported, only {', '.join(HEAD_ACTS)}")


@dataclass(frozen=True, kw_only=True)
class TokenHead:
    """The head of one task of tokens, in a model whose tasks have heads of their own."""

    task: str
    layers: tuple[HeadLayer, ...]
    activation: str
    """The last operation on an output, which requests may leave out: "normalize" or "relu"."""
    first_id: int | None = None
    last_id: int | None = None
    """The tokens that have no output if a prompt begins, or ends, with them; None for none."""

    @property
    def size(self) -> int:
        """Return the size of one output."""
        return self.layers[-1].size


class TaskAdapters(NamedTuple):
    """The LoRA adapters in a model's own checkpoint, one for each task, for all matrices of layers and embeddings."""

    names: tuple[str, ...]
    rank: int
    scale: float
    """The factor on the product of an adapter's matrices."""


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """How hidden states become one output for each sequence, or for each token."""

    tasks: tuple[str, ...]
    """The tasks of the head: embed and token_embed, or classify and token_classify; with `token_heads` also both."""
    kind: str
    """The hidden state that represents a sequence: that of its first (CLS) or last (LAST) token, or the mean (MEAN)."""
    head: tuple[HeadLayer, ...] = ()
    is_difference: bool = False
    """The output is one number: the head's second output minus its first."""
    filler_id: int | None = None
    """The token that fills up queries at their end (ColBERT), which no token attends to; None if there is none."""
    token_heads: tuple[TokenHead, ...] = ()
    """The heads of the tasks of tokens, if these do not share `head`. A step computes the outputs of all of them, side
    by side."""

    def __post_init__(self) -> None:
        """Raise ValueError for a kind that does not exist."""
        if self.kind not in POOLING_TYPES:
            raise ValueError(f"pooling_type is {self.kind!r}, which is not supported, only {', '.join(POOLING_TYPES)}")

    @property
    def layers(self) -> tuple[HeadLayer, ...]:
        """Return the layers of all heads, those of `head` first."""
        return (*self.head, *(layer for head in self.token_heads for layer in head.layers))

    def size(self, hidden_size: int) -> int:
        """Return the size of one output of the first task."""
        own_head = next((head for head in self.token_heads if head.task == self.tasks[0]), None)
        if own_head is not None:
            return own_head.size
        return 1 if self.is_difference else self.head[-1].size if self.head else hidden_size


class Factors(NamedTuple):
    """The factors on the input of a part of a layer, and on its output as it is added to the residual stream."""

    taken: float = 1.0
    added: float = 1.0


_NO_FACTORS = Factors()


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer of a model. Layers with equal specs have weights of equal shapes, and share a loop's body."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    scale: float
    """The factor on attention scores."""
    hidden_act: str = "silu"
    causal: bool = True
    """A token does not attend to later tokens."""
    is_cross: bool = False
    """Tokens attend to all frames that an encoder makes of the request's clip, and not to each other."""
    sees_both_sides: bool = False
    """The tokens of an image attend to all of that image, even if attention is causal."""
    window: int | None = None
    """The number of tokens that a token attends to, itself included, and as many ahead unless attention is causal; None
    for global or chunked attention."""
    attention_chunk: int | None = None
    """The size of the chunks that positions are cut into, if a token attends only within its chunk; else None."""
    rope: int | None = 0
    """The index of the RoPE table, among the model's, that rotates queries and keys; None for no rotation."""
    relative: RelativeSpec | None = None
    """Scores depend on distances by keys and queries of these; None if they depend on contents alone."""
    latent: LatentSpec | None = None
    """Attention over latents; None for keys and values of heads. There is one kv head, and `head_dim` is that of the
    latents with their rotated part."""
    indexer: IndexerSpec | None = None
    """The indexer that chooses the tokens that attention over latents reads; None if it reads all earlier ones."""
    borrows_choice: bool = False
    """The tokens are those that the nearest earlier layer with an indexer has chosen; this layer's has no weights."""
    state: StateSpec | None = None
    """The recurrence in place of attention, with a state of fixed size; None for attention. With it, the sizes of
    attention have no meaning, unless the layer `attends_too`."""
    attends_too: bool = False
    """Attention runs beside the recurrent state; both take the same normed input, and both outputs are added."""
    output_gate: bool = False
    """The output of attention is multiplied by the sigmoids of a gate, which is projected as queries are."""
    gate_by_head: bool = False
    """The gate has one number for each head, instead of as many as the head has."""
    query_scaling: QueryScaling | None = None
    """A factor on queries, besides `scale`, that depends on the position; None for no such factor."""
    log_scaling: bool = False
    """The queries of each head of attention over latents, and of its indexer, are multiplied by a learned number times
    the logarithm of the position, counted from 1, plus another learned number."""
    soft_cap: float | None = None
    norms_stream: bool = False
    """The residual stream is normed after each addition to it, instead of the inputs of attention and MLP."""
    norms_attention: bool = True
    """The input of attention is normed, if inputs are; the frame may have normed that of the first layer."""
    qkv_bias: bool = False
    k_bias: bool = True
    """With `qkv_bias`, keys have a bias too."""
    o_bias: bool = False
    mlp_bias: bool = False
    gate_bias: bool = True
    """With `mlp_bias`, gates and ups have biases too."""
    qk_norm: bool = False
    qk_norm_all_heads: bool = False
    """The norms of q and k are over all heads together instead of over single heads."""
    qk_norm_by_head: bool = False
    """The norms of q and k are LayerNorms of single heads, each with scales of its own."""
    qk_norms_apart: bool = False
    """The checkpoint has a tensor for the scales of each head, instead of one for all heads."""
    rotated_norm: float | None = None
    """The epsilon of the norms of q and k, if they come after the rotation; None if they come before it."""
    qk_unit_norm: float | None = None
    """The epsilon for dividing each head's queries and keys by their root mean square; None for no division."""
    qkv_limit: float | None = None
    """The bound to which queries, keys and values are clipped before the rotation; None for no bound."""
    v_norm: bool = False
    """Values are divided by their root mean square."""
    v_dim: int | None = None
    """The size of a head's values, if they are smaller than keys; the cache holds them filled up with zeros."""
    padded_dim: int | None = None
    """The size to which queries, keys and values are filled up with zeros for attention and its cache, as kernels have
    few sizes of heads; None for `head_dim`."""
    v_scale: float = 1.0
    """The factor on values."""
    k_is_v: bool = False
    """One projection serves for both: values are the keys before their norm."""
    borrows_kv: bool = False
    """Keys and values are those of the nearest earlier layer in the same cache group that computes keys and values."""
    pre_norms: bool = True
    """The inputs of attention and MLP are normed."""
    post_norms: bool = False
    """The outputs of attention and MLP are normed before they are added to the residual stream."""
    parallel: bool = False
    """The MLP takes the stream before attention is added, instead of after."""
    shares_norm: bool = False
    """With `parallel`, the MLP's input is normed by attention's norm instead of its own."""
    residual_scale: float = 1.0
    """The factor on the outputs of attention and MLP, as they are added to the residual stream."""
    attention_factors: Factors = _NO_FACTORS
    state_factors: Factors = _NO_FACTORS
    mlp_factors: Factors = _NO_FACTORS
    """Factors of single parts, besides `residual_scale`."""
    sinks: bool = False
    """Each query head has an attention sink: a learned score in its softmax that has no value."""
    has_mixer: bool = True
    """The layer has attention or a recurrent state; without them it is an MLP or experts alone."""
    has_mlp: bool = True
    """The layer has an MLP or experts; without them it is attention or a recurrent state alone."""
    gated: bool = True
    """The MLP, or each expert, multiplies by a gate."""
    mlp_limit: float | None = None
    """The bound of the activated gates of the MLP or the shared expert, and of ups on both sides; None for no bound."""
    moe: MoESpec | None = None
    """The experts in place of the MLP, or in Gemma 4 beside it; None for a dense layer."""
    input_size: int | None = None
    """The width of the per-layer input that the frame computes, besides the stream; None if there is none."""
    adds_media: bool = False
    """A further slice of media's rows is added to the stream after this layer."""
    kv_repeats: int = 1
    """The number of consecutive kv heads that copy one of the checkpoint's, which are fewer than the devices."""

    def __post_init__(self) -> None:
        """Raise ValueError for sizes that do not fit together."""
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
            shape = f"{self.num_kv_heads} kv heads of size {self.head_dim}"
            raise ValueError(f"{shape} do not fit latent attention, which has 1 of size {self.latent.key_dim}")
        if self.latent is not None and self.attention_chunk is not None:
            raise ValueError("attention over latents has no chunks")
        if self.indexer is not None and (self.latent is None or self.window or self.indexer.head_dim < self.rope_dim):
            raise ValueError(
                f"an indexer of heads of {self.indexer.head_dim} needs attention over latents without a window, and a "
                f"rotated part that is no larger than {self.rope_dim}"
            )
        if self.padded_dim is not None and (self.padded_dim < self.head_dim or self.borrows_kv):
            raise ValueError(f"head_dim is {self.head_dim}, which does not fit into {self.padded_dim}")
        if self.v_dim is not None and (self.v_dim > self.head_dim or self.k_is_v or self.borrows_kv or self.qkv_bias):
            raise ValueError(f"v_head_dim is {self.v_dim}, and head_dim {self.head_dim}; larger values do not fit")
        if self.window is not None and self.attention_chunk is not None:
            raise ValueError(f"a layer has a window of {self.window} and chunks of {self.attention_chunk} tokens")

    @property
    def attends(self) -> bool:
        """Return whether the layer has attention, alone or beside a recurrent state."""
        return self.has_mixer and (self.state is None or self.attends_too)

    @property
    def has_indexer(self) -> bool:
        """Return whether the layer itself chooses the tokens that it attends to."""
        return self.indexer is not None and not self.borrows_choice

    @property
    def rope_dim(self) -> int:
        """Return the size of the last part of a query or key, which the RoPE table covers."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def cached_dim(self) -> int:
        """Return the size of a head's keys and of its values in the cache."""
        return self.padded_dim or self.head_dim


class FeatureSpec(NamedTuple):
    """The features that a draft head reads of each token, or that requests may have returned."""

    layers: tuple[int, ...]
    """Numbers of layers: the features are the residual streams that go into them, side by side in this order. The
    number of
    all layers stands for the stream after the last one. Empty for the hidden state after the final norm."""
    size: int
    """The size of a token's features."""
    is_returned: bool = False
    """True if no head reads them: steps return them, for requests that ask for hidden states."""


@dataclass(frozen=True, kw_only=True)
class DraftHead:
    """The settings of a draft head, which a complete model lacks."""

    features: FeatureSpec
    first_layer: int = 0
    """The number of its first layer in the checkpoint, where its layers come after those of its model."""
    num_guessed_ids: int | None = None
    """The number of ids that it can guess; None for all."""
    norms_stream: bool = False
    """Its residual stream begins with normed features."""


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
    scales_inputs: bool = False
    """Embeddings that come in place of tokens are scaled like theirs; elsewhere they are scaled already."""
    norm_offset: float = 0.0
    """The number that RMSNorms and LayerNorms add to their scales, 1 in Gemma."""
    layer_norms: bool = False
    """Norms of decoders are LayerNorms instead of RMSNorms."""
    norm_bias: bool = True
    """LayerNorms add a bias."""
    head_bias: bool = False
    """The output head adds a bias."""
    logits_divisor: float = 1.0
    """The divisor of logits."""
    num_token_types: int = 0
    """The rows of the embedding of token types; 0 if there is none."""
    pooling: Pooling | None = None
    """The pooling of a model that pools; None for a model that only generates."""
    task_adapters: TaskAdapters | None = None
    num_shards: int = 1
    """The number of devices that heads and MLPs are sharded over."""
    num_expert_shards: int = 1
    """The number of groups of devices that have different experts; the devices of a group share each expert's width."""
    draft_head: DraftHead | None = None
    """The settings of a draft head; None for a complete model."""
    media_token_id: int = 0
    """The token whose per-layer inputs the tokens of images take."""
    layer_parts: int = 1
    """The number of consecutive layers that are one of the checkpoint's: 2 in a decoder with cross-attention, whose
    layers have self-attention, and cross-attention with an MLP."""
    encoder: ModelConfig | None = None
    """The tower of a wrapper, if its config.json describes one, or the encoder of an encoder-decoder; else None."""
    audio: ModelConfig | None = None
    """The tower that hears, in a wrapper with another one that sees; else None."""
    tower: TowerSettings | None = None
    """The further settings of a tower, in its own config; None for other models."""
    clips: ClipSettings | None = None
    """The further settings of an encoder of sound, in its own config; None for other models."""

    def __post_init__(self) -> None:
        """Raise ValueError for layers, tables and towers that do not fit together."""
        if len(sizes := {tower.output_size for tower in self.towers.values()}) > 1:
            raise ValueError(f"the towers give rows of {' and '.join(map(str, sorted(sizes)))} numbers, and not of one")
        if len({layer.indexer.top_k for layer in self.layers if layer.indexer is not None}) > 1:
            raise ValueError("index_topk differs between layers")
        if next((layer.borrows_choice for layer in self.layers if layer.indexer is not None), False):
            raise ValueError("the first indexer is shared, and there is no earlier one")
        for layer in self.layers:
            if layer.rope is None:
                continue
            if not 0 <= layer.rope < len(self.ropes):
                raise ValueError(f"a layer has RoPE table {layer.rope}, and there are {len(self.ropes)}")
            rope = self.ropes[layer.rope]
            rotary_dim = rope.rotary_dim(layer.rope_dim)
            if rotary_dim % 2:
                raise ValueError(f"partial_rotary_factor rotates an odd part of a head of {layer.rope_dim}")
            if rope.axes and len(rope.axes) != rotary_dim // 2:
                raise ValueError(f"mrope_section has {len(rope.axes)} frequencies, and a head has {rotary_dim // 2}")
            if layer.k_is_v and rope.head_order(layer.head_dim) is not None:
                raise ValueError("keys that are also values need heads in RoPE's order")
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

    @property
    def encoders(self) -> dict[str, ModelConfig]:
        """Return the configs of towers, or of an encoder, by the part of the parameters that holds theirs."""
        parts = {"encoder": self.encoder, "audio": self.audio}
        return {part: config for part, config in parts.items() if config is not None}

    @property
    def towers(self) -> dict[str, TowerSettings]:
        """Return the settings of towers, by the part of the parameters that holds theirs."""
        return {part: config.tower for part, config in self.encoders.items() if config.tower is not None}

    @property
    def sees_both_sides(self) -> bool:
        """Return whether the tokens of an image attend to all of that image in some layers."""
        return any(layer.sees_both_sides for layer in self.layers)

    def within(self, length: int) -> ModelConfig:
        """Return the model for sequences of up to `length` tokens, without what cuts nothing off.

        These are windows, chunks, and indexers that choose as many tokens as there are.
        """
        # Windows distinguish cache groups, and so decide which layer's keys and values a layer borrows.
        keeps_windows = any(layer.borrows_kv for layer in self.layers)

        def needed(size: int | None) -> int | None:
            return None if size is None or size >= length else size

        def without(layer: LayerSpec) -> LayerSpec:
            if not keeps_windows:
                layer = replace(layer, window=needed(layer.window), attention_chunk=needed(layer.attention_chunk))
            if layer.indexer is None or needed(layer.indexer.top_k):
                return layer
            return replace(layer, indexer=None, borrows_choice=False)

        layers = map(without, self.layers)
        return replace(self, layers=tuple(layers))

    def with_encoder(self, encoder: ModelConfig | None) -> ModelConfig:
        """Return the config with a tower or an encoder, whose further outputs the first layers take, or without one."""
        num_slices = 0 if encoder is None or encoder.tower is None else len(encoder.tower.deepstack)
        layers = (replace(layer, adds_media=number < num_slices) for number, layer in enumerate(self.layers))
        return replace(self, encoder=encoder, layers=tuple(layers))

    def with_layers(self, **fields: Any) -> ModelConfig:
        """Return the config with these fields replaced in all layers."""
        return replace(self, layers=tuple(replace(layer, **fields) for layer in self.layers))
