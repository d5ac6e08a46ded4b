"""The findings of `jaxllm check` are these plain values, which its --json prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The nominal figures of one device that the bounds are made of."""

    device_kind: str
    memory_bytes: int
    usable_bytes: int
    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """The KV cache of the layers whose keys and values have one shape and reach as far back, on each device."""

    num_layers: int
    window: int | None
    """A token reads the keys of so many, itself counted; None for all before it, or in its chunk."""
    attention_chunk: int | None
    """Positions are cut into chunks of so many, and a token reads the keys of its own; None where there are none."""
    num_blocks: int
    block: int
    """The bytes of a block, over all these layers."""
    causal: bool = True
    """False: keys and values are read in the step that writes them, and never again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """One device's memory, in bytes; all devices hold as much."""

    limit: int
    """The bytes that the engine may use."""
    params: int
    scratch: int | None
    """Bytes of the largest step's scratch; None where the parameters alone are too many, and nothing was compiled."""
    num_blocks: int
    """KV blocks of the largest group, the null block counted; 0 where there is not room for one request."""
    kv_cache: int
    groups: list[GroupReport]
    state_slots: int
    """Slots of recurrent state, the null slot counted; 0 for a model without."""
    state_slot: int
    """The bytes of a slot, over all layers."""
    replicated_params: list[str]
    """Parameters that every device holds whole, though there are several devices."""
    draft_params: int = 0
    """Parameters of the draft model. A draft head shares some with the model, which `params` has."""
    draft_block: int = 0
    """The bytes of a block of the draft model's keys and values, and of the features that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """How many requests of a length, prompt and output together, run at once; of an engine that pools, in one step."""

    length: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Collectives of one kind in one step; of conditional ones, those of the costliest case."""

    kind: str
    count: int
    bytes: int
    """The bytes of their results on one device, together."""
    repeated: bool
    """True in a loop whose length depends on the batch: the figures are those of one pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One compiled step, with all KV blocks."""

    name: str
    num_tokens: int
    num_seqs: int
    scratch_bytes: int
    code_bytes: int
    compile_seconds: float
    collectives: list[Collective]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The most tokens a second that the devices' memory and arithmetic allow."""

    phase: str
    """ "decode", or "prefill", whose tokens are the prompt's, or "pool", whose tokens are those of all texts."""
    batch: int
    length: int
    """Tokens of each request in the KV cache when decoding; else of its prompt, or text."""
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
    """How many devices the topology has."""
    tensor_parallel_size: int
    """How many devices are in use."""
    versions: dict[str, str]
    hardware: Figures
    engine: dict[str, Any]
    """The engine's settings that decide shapes, and those of pooling if it pools."""
    fits: bool
    reason: str | None
    """The reason why it does not fit, or None."""
    memory: MemoryReport
    concurrency: list[Concurrency] = field(default_factory=list)
    programs: list[Program] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    """Changes that would make it fit, the smallest first."""
    notes: list[str] = field(default_factory=list)
