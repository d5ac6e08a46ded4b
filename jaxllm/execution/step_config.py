"""The settings that fix the shapes of an engine's steps."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.execution.host_processors import HostProcessors
from jaxllm.execution.kv_pool import FeatureGroup, KVGroup, KVLayout, StateGroup
from jaxllm.sampling.processors import LogitsProcessor
from jaxllm.sampling.transcripts import TranscriptRules


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConfig:
    """The part of the engine's configuration that fixes the shapes of steps."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    groups: tuple[KVGroup, ...]
    """The cache groups of one device."""
    cross_groups: tuple[KVGroup, ...] = ()
    """The groups of an encoder's frames, which come after these."""
    num_frames: int = 0
    """The frames of a clip; 0 without an encoder of clips."""
    alignment_heads: tuple[tuple[int, int], ...] | None = None
    """The (layer, head) of the cross-attention by which transcripts are aligned; None for all heads of later layers."""
    states: tuple[StateGroup, ...] = ()
    """The groups of layers with recurrent state, which come last."""
    draft_groups: tuple[KVGroup, ...] = ()
    """The cache groups of the draft model, which take blocks of their own."""
    features: FeatureGroup | None = None
    """The features that are kept for a draft head; None if there is none."""
    reads: FeatureGroup | None = None
    """The features that a draft head's steps read; None for other models."""
    max_logprobs: int
    """The most log-probabilities that a row can ask for, no more than the vocabulary has tokens."""
    platform: str
    sizes: tuple[int, ...] | None = None
    """The tokens of the buckets besides the largest; None: from the smallest on, doubled each time."""
    logprobs_mode: str = "raw_logprobs"
    processors: tuple[LogitsProcessor, ...] = ()
    """The functions that the step calls, on the device or on the host."""
    transcript_rules: TranscriptRules | None = None
    """The rules of transcripts that outputs follow; None if they follow none."""
    host_processors: HostProcessors | None = None
    """The host's side of the processors that are classes, which the step's calls reach."""
    batch_invariant: bool = False
    max_drafts: int = 0
    """The most drafts that a chunk can have."""
    num_media_rows: int = 0
    """The rows of the feature cache of images and videos; 0 for a model that sees none."""
    num_video_frames: int = 0
    """The most frames of a video; 0 where there are no videos."""
    keeps_evicted: bool = False
    """True if the host keeps what the pools evict."""
    vectors_shape: tuple[int, ...] | None = None
    """The sizes of the steering vectors, [layers, 1 + vectors, d]; None if there are none."""
    takes_embeds: bool = False
    """True if items may come encoded."""
    generates: bool = True
    """True if requests may generate."""
    pools_sequences: bool = False
    pools_tokens: bool = False
    """True if requests may ask for an output of each sequence, or of each token."""

    @property
    def block_size(self) -> int:
        return self.groups[0].attention.shape.block_size

    @property
    def row_alignment(self) -> int:
        """Chunks of two tokens or more must start at a multiple of this row."""
        return max(group.attention.row_alignment for group in (*self.groups, *self.cross_groups))

    @property
    def kv_layout(self) -> KVLayout:
        """Return the form of the KV cache, which decides the number of blocks of each group."""
        return KVLayout(
            groups=self.groups,
            cross_groups=self.cross_groups,
            num_frames=self.num_frames,
            states=self.states,
            max_drafts=self.max_drafts,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            draft_groups=self.draft_groups,
            features=self.features,
        )
