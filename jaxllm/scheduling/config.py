"""The scheduler's settings, checked once."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from jaxllm.speculation.drafter import SpeculationSettings

SchedulingPolicy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """The KV cache of a cache group: layers with one shape of keys and values, and one window."""

    num_blocks: int
    """The number of blocks of the pool, including the null block 0."""
    window: int | None = None
    """The number of tokens whose keys a token reads, itself included; None for all before it."""
    attention_chunk: int | None = None
    """The size of the chunks of positions within which tokens attend; None where there are none."""
    tile_blocks: int = 1
    """The number of blocks whose keys attention reads at once, from a multiple of it on."""

    @property
    def is_bounded(self) -> bool:
        """Return whether a request gives blocks back while it runs."""
        return self.window is not None or self.attention_chunk is not None

    def first_wanted(self, position: int, block_size: int) -> int:
        """Return the index in a table of the first block that tokens from a position on read.

        Kernels read whole tiles of keys, and a window begins within a tile. A chunk begins a table of its own.
        """
        if self.attention_chunk is not None:
            return position // self.attention_chunk * self.attention_chunk // block_size
        if self.window is not None:
            return max(0, position - self.window + 1) // block_size // self.tile_blocks * self.tile_blocks
        return 0

    def next_trim(self, position: int, block_size: int) -> int:
        """Return the first position after `position` from which on tokens read fewer of the blocks before it."""
        if self.attention_chunk is not None:
            return (position // self.attention_chunk + 1) * self.attention_chunk
        if self.window is not None:
            return (self.first_wanted(position, block_size) + self.tile_blocks) * block_size + self.window - 1
        return sys.maxsize

    def most_blocks(self, max_model_len: int, max_new: int, block_size: int) -> int:
        """Return the most blocks that one request of max_model_len tokens holds, computed max_new tokens at a time."""
        most = -(-max_model_len // block_size)
        if self.attention_chunk is not None:
            return min(most, self.attention_chunk // block_size)
        if self.window is not None:
            span = self.window - 1 + max_new + self.tile_blocks * block_size
            return min(most, -(-span // block_size) + 1)
        return most


@dataclass(frozen=True, slots=True)
class StepTarget:
    """The longest that a step may take while streams run: what prompts may have of it follows from its measured times.

    Where it is too short for any prompt token, a step still takes a few.
    """

    seconds: float
    by_decodes: float = 1.0
    """The step may also take this many times as long as the streams' next tokens alone take."""
    by_prompts: float = 0.0
    """It may take longer by this factor for each prompt in line by the number of streams, if that is more than 1: few
    streams do not hold up many prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits of a step and of the block pool. Raises ValueError for limits that cannot work together."""

    max_num_seqs: int
    """The most requests that may hold blocks at the same time."""
    max_num_batched_tokens: int
    """The most tokens of one step, over all its chunks."""
    max_model_len: int
    """The most prompt and output tokens of one request."""
    block_size: int
    """Tokens per block."""
    groups: tuple[GroupConfig, ...]
    """The groups of layers, each with blocks of its own."""
    num_state_slots: int = 0
    """The number of slots of recurrent state, including slot 0, which has no owner; 0 for a model without it."""
    num_host_blocks: tuple[int, ...] = ()
    """The blocks of each group, and last the slots of recurrent state if there are any, that the host keeps of what the
    device evicts; empty if it keeps none."""
    root_hash: bytes | None = None
    """What the hashes of blocks begin with, 32 bytes, if other processes are to find them; None for random bytes."""
    num_media_rows: int = 0
    """The number of rows of the feature cache, which holds encoded images and videos; 0 for a model that sees none."""
    sees_both_sides: bool = False
    """True if the tokens of an image attend to all of it, so that a step computes all of them."""
    num_clip_blocks: int = 0
    """The number of blocks of encoded clips, including the null block 0; 0 for a model without an encoder of clips."""
    clip_blocks: int = 0
    """The blocks that each clip takes."""
    num_adapter_slots: int = 0
    """The most adapters in use at the same time."""
    enable_prefix_caching: bool = True
    keys_depend_on_prompt: bool = False
    """True if the same tokens have other keys in a longer prompt, as with dynamic RoPE: then only prompts of one length
    share blocks, and the prefix cache must be off."""
    policy: SchedulingPolicy = "fcfs"
    step_target: StepTarget | None = None
    """How long a step may take while streams run; None for any time."""
    short_prompts_pass: bool = False
    """True if short prompts may pass long ones that are in line before them, under the policy "fcfs": the first in line
    keeps a quarter of each step's prompt tokens, and the rest goes to the shortest prompts."""
    long_prefill_token_threshold: int = 0
    """The most tokens that one request gets in one step; 0 for no such limit."""
    enable_chunked_prefill: bool = True
    """False if a prompt waits for a step that takes it whole."""
    whole_tasks: frozenset[str] = frozenset()
    """The pooling tasks that run each prompt whole in one step, without the prefix cache."""
    max_rows: int | None = None
    """The most rows of logits of one step: one per chunk and one per scored prompt token; None for max_num_seqs.

    With one more than max_num_seqs, a scored prompt makes progress in every step, whatever else runs.
    """
    row_alignment: int = 1
    """The rows of a chunk of two tokens or more start at a multiple of this; skipped rows count for the step's size,
    which is max_num_batched_tokens rounded up to a multiple."""
    speculation: SpeculationSettings | None = None
    """How tokens are guessed ahead; None if they are not."""
    tracks_all_tokens: bool = False
    """True if every request gets a row of the device's token counts, not just those with penalties."""

    kv_cache_metrics_sample: float | None = None
    """The share of the blocks that the residency metrics follow; None for no such metrics."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "row_alignment"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.num_state_slots and self.num_state_slots < 3:
            raise ValueError(
                f"num_state_slots must be at least 3, or 0 for none, got {self.num_state_slots}: one is nobody's, and "
                f"a request writes to one while it reads another."
            )
        if self.clip_blocks and self.num_clip_blocks <= self.clip_blocks:
            raise ValueError(
                f"num_clip_blocks must be at least {self.clip_blocks + 1}, got {self.num_clip_blocks}: a clip takes "
                f"{self.clip_blocks} beside the null block."
            )
        if self.keys_depend_on_prompt and self.enable_prefix_caching:
            raise ValueError("keys_depend_on_prompt needs enable_prefix_caching=False.")
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy must be 'fcfs' or 'priority', got {self.policy!r}.")
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold must be 0 (off) or more, got {self.long_prefill_token_threshold}."
            )
        max_chunks = min(self.max_num_seqs, self.max_num_batched_tokens)
        if self.num_rows < max_chunks:
            raise ValueError(f"max_rows must be at least {max_chunks}, one row per chunk, got {self.max_rows}.")
        for size in self.attention_chunks:
            if size % self.block_size:
                raise ValueError(f"block_size must divide attention_chunk={size}, got {self.block_size}.")
        if self.sees_both_sides and self.attention_chunks:
            raise ValueError(
                f"sees_both_sides needs layers without chunked attention, got attention_chunk={self.attention_chunks}."
            )
        # One request alone must always fit: otherwise preempting all the others could still leave it stuck.
        for group in self.groups:
            needed = group.most_blocks(self.max_model_len, self.max_num_batched_tokens, self.block_size)
            if needed > group.num_blocks - 1:
                raise ValueError(
                    f"max_model_len={self.max_model_len} needs {needed} blocks of {self.block_size} tokens, but the "
                    f"pool has {group.num_blocks - 1} beside the null block: give the KV cache more memory or lower "
                    f"max_model_len."
                )
        if not self.enable_chunked_prefill:
            self._check_whole_prompts("enable_chunked_prefill=False")
        elif self.whole_tasks:
            self._check_whole_prompts("pooling of whole prompts", threshold=False)

    def _check_whole_prompts(self, name: str, *, threshold: bool = True) -> None:
        if self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"{name} needs max_num_batched_tokens >= max_model_len, "
                f"got {self.max_num_batched_tokens} < {self.max_model_len}."
            )
        cut = [size for size in self.attention_chunks if size < self.max_model_len]
        if cut:
            raise ValueError(f"attention_chunk={cut[0]} cuts prompts into chunks: it does not go with {name}.")
        if threshold and self.long_prefill_token_threshold:
            raise ValueError(f"long_prefill_token_threshold cuts prompts into chunks: it does not go with {name}.")

    @property
    def attention_chunks(self) -> tuple[int, ...]:
        """Return the sizes of attention chunks: a step never computes tokens of two chunks for one request."""
        return tuple(sorted({group.attention_chunk for group in self.groups if group.attention_chunk is not None}))

    @property
    def num_rows(self) -> int:
        return self.max_num_seqs if self.max_rows is None else self.max_rows
