"""The part of an engine's configuration that its programs depend on."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.execution.feature_group import FeatureGroup
from jaxllm.execution.host_processors import HostProcessors
from jaxllm.execution.kv_pool import KVGroup, KVLayout, StateGroup
from jaxllm.sampling.processors import LogitsProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """The part of the engine's configuration that fixes the shapes of steps."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    groups: tuple[KVGroup, ...]
    """The cache groups of one device."""
    states: tuple[StateGroup, ...] = ()
    """The groups of layers with recurrent state, which come after those."""
    draft_groups: tuple[KVGroup, ...] = ()
    """The cache groups of the draft model, which take blocks of their own beside these."""
    features: FeatureGroup | None = None
    """The features that are kept for a draft head; None if there is none."""
    reads: FeatureGroup | None = None
    """The features that a draft head's steps read; None for other models."""
    max_logprobs: int
    """The most log-probabilities that a row can ask for, no more than the vocabulary has tokens."""
    platform: str
    sizes: tuple[int, ...] | None = None
    """The tokens of the buckets besides the largest; None: the smallest, each time twice as many."""
    logprobs_mode: str = "raw_logprobs"
    processors: tuple[LogitsProcessor, ...] = ()
    """The functions that the step calls, on the device or on the host."""
    host_processors: HostProcessors | None = None
    """The host's side of the processors that are classes, which the step's calls reach."""
    batch_invariant: bool = False
    max_drafts: int = 0
    """The most drafts that a chunk can have."""
    generates: bool = True
    """Requests may generate."""
    pools_sequences: bool = False
    pools_tokens: bool = False
    """Requests may ask for an output of each sequence, or of each token."""

    @property
    def block_size(self) -> int:
        return self.groups[0].attention.shape.block_size

    @property
    def row_alignment(self) -> int:
        """Chunks of two tokens or more must start at a multiple of this row."""
        return max(group.attention.row_alignment for group in self.groups)

    @property
    def kv_layout(self) -> KVLayout:
        """Return what decides how many blocks each group has."""
        return KVLayout(
            groups=self.groups,
            states=self.states,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            draft_groups=self.draft_groups,
            features=self.features,
        )
