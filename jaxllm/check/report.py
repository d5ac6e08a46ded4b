"""The findings of `jaxllm check` as plain values, which its --json prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The nominal figures of one device, from which the bounds follow."""

    device_kind: str
    memory_bytes: int
    usable_bytes: int
    bytes_per_second: float
    flops_per_second: float


ENCODE_CLIP = "encode a clip"
"""The name of the program of an encoder-decoder's encoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """The KV cache of a cache group on each device: layers with one shape of keys and values, and one window."""

    num_layers: int
    window: int | None
    """The number of tokens whose keys a token reads, itself included; None for all before it, or in its chunk."""
    attention_chunk: int | None
    """The size of the chunks of positions within which tokens attend; None where there are none."""
    num_blocks: int
    block: int
    """The bytes of a block, over all these layers."""
    causal: bool = True
    """False if keys and values are only read in the step that writes them."""
    is_indexer: bool = False
    """The keys are those of indexers, and there are no values."""
    num_frames: int | None = None
    """The frames of a clip whose keys and values these are; None for those of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """One device's memory, in bytes; it is the same on all devices."""

    limit: int
    """The bytes that the engine may use."""
    params: int
    scratch: int | None
    """Bytes of the largest step's scratch; None if the parameters alone are too large, and nothing was compiled."""
    num_blocks: int
    """KV blocks of the largest group, the null block included; 0 if there is no room for one request."""
    kv_cache: int
    groups: list[GroupReport]
    state_slots: int
    """Slots of recurrent state, the null slot included; 0 for a model without it."""
    state_slot: int
    """The bytes of a slot, over all layers."""
    replicated_params: list[str]
    """Parameters that every device holds whole, though there are several devices."""
    draft_params: int = 0
    """Parameters of the draft model. Those that a draft head shares with the model are in `params`."""
    draft_block: int = 0
    """The bytes of a block of the draft model's keys and values, and of the features that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureRows:
    """The rows, each in place of a token, that a square picture takes after its processor has resized it."""

    side: int
    """The side of the picture in pixels."""
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundRows:
    """The rows, each in place of a token, that a sound takes."""

    seconds: float
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaReport:
    """The cost of images, videos and sounds; each device holds all of it."""

    tower_params: int
    """Bytes of the tower's parameters, which are among the model's."""
    cache_rows: int
    """The rows of the feature cache: an item with more is refused."""
    cache: int
    """Bytes of the feature cache, which are in the scratch."""
    pictures: list[PictureRows]
    """Empty if the checkpoint names no image processor."""
    sounds: list[SoundRows] = field(default_factory=list)
    """A short sound and the longest; empty for a model that hears none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """The number of requests of a length, prompt and output, that run at once; or of texts that pool in one step."""

    length: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Collectives of one kind in one step; of a conditional, those of the costliest branch."""

    kind: str
    count: int
    bytes: int
    """The bytes of their results on one device, together."""
    repeated: bool
    """True in a loop with a length that depends on the batch: the figures are those of one pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One compiled step, with all KV blocks, or a program that encodes an image or video."""

    name: str
    num_tokens: int
    """The tokens of a step, or the patches of a program that encodes an image or video."""
    num_seqs: int
    """The most requests of a step; 0 of a program that encodes."""
    scratch_bytes: int
    code_bytes: int
    compile_seconds: float
    collectives: list[Collective]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The most tokens a second that the devices' memory and arithmetic allow."""

    phase: str
    """ "decode", "prefill" (the tokens are the prompt's) or "pool" (the tokens are those of all texts)."""
    batch: int
    length: int
    """Tokens of each request in the KV cache when decoding, else of its prompt or text."""
    tokens_per_second: float
    limited_by: str
    """ "bandwidth" or "matmul"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Settings that make the model fit, found by trying them."""

    settings: dict[str, Any]
    num_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The answer of `jaxllm check`."""

    model: str
    architecture: str
    topology: str
    num_devices: int
    """The number of devices of the topology."""
    tensor_parallel_size: int
    """The number of devices in use."""
    versions: dict[str, str]
    hardware: Figures
    engine: dict[str, Any]
    """The engine's settings that decide shapes, and its settings of pooling."""
    fits: bool
    reason: str | None
    """The reason why it does not fit, or None."""
    memory: MemoryReport
    media: MediaReport | None = None
    """None for a model that takes text only."""
    concurrency: list[Concurrency] = field(default_factory=list)
    programs: list[Program] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    """Changes that would make it fit, the smallest first."""
    notes: list[str] = field(default_factory=list)
