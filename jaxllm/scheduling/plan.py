"""The records that the scheduler and the execution exchange: a step's plan, and its result."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import msgspec

from jaxllm.core_messages import HiddenStates, Pooled, RequestError, TokenLogprobs
from jaxllm.params.hidden_states import Positions
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.cache.state_slots import NO_SLOTS, ChunkSlots
from jaxllm.scheduling.clips import ClipEncode
from jaxllm.scheduling.media import ChunkMedia, Encode
from jaxllm.steering.request import Steered


class StepKind(enum.Enum):
    """The use of a step's hidden states; all requests of a step are of one kind."""

    SAMPLE = "sample"
    POOL = "pool"
    """Each sequence gives one output."""
    POOL_TOKENS = "pool tokens"
    """Each token gives one output."""


NO_IDS = array("i")
"""The scored ids of all chunks without any: making an array for each takes time."""


class Owner(msgspec.Struct, frozen=True, gc=False, kw_only=True, eq=False):
    """What the chunks of a request have in common, from its admission until it ends or is preempted."""

    request_id: str
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    """A number in [0, 2**64)."""
    pooling: PoolingParams | None = None
    """None for a request that generates."""
    pair_start: int | None = None
    """Position of the first token of a pair's second text; None for a single text."""
    adapter_slot: int = 0
    """The slot of the request's adapter, 0 for none."""
    hidden_states: Positions | None = None
    """The positions of its prompt whose hidden states are returned; None for none."""
    steered: Steered | None = None
    """The steering vector that is added to its tokens; None for none."""
    count_row: int | None = None
    """The request's row of the device's token counts, if it needs one."""
    clip_blocks: array[int] | None = None
    """int32, the blocks of the frames of the request's clip; None in a model without clips."""
    token_ids: array[int] | None = None
    """int32, the prompt and the outputs that the host knows by now: the request's own array, which grows, to be read
    when a step is built. None in a model without clips, and in a beam search, where prompts have outputs."""


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One request's tokens in one step."""

    # A struct because hundreds are made per step: a frozen dataclass takes five times as long.

    owner: Owner
    start: int
    """Position of the chunk's first token."""
    token_ids: array[int]
    """int32, one per token of the chunk; 0 where the host does not know the id yet (see previous_row)."""
    previous_row: int | None
    """Row of the step in flight whose sampled token is this chunk's only token; None when token_ids is complete."""
    block_ids: tuple[array[int], ...]
    """int32, in each cache group a copy of the request's blocks; they cover start + num_tokens positions. Blocks that
    were given back are the null block. Chunks of a request whose blocks are the same share the copy."""
    samples: bool
    """True if the chunk ends at the request's last token, so that the step samples the next one."""
    num_output_tokens: int
    """The number of outputs before the token that this chunk's last row samples, with those in flight and drafts."""
    state_slots: ChunkSlots = NO_SLOTS
    """The slots of recurrent state, if the model has any."""
    num_drafts: int = 0
    """The number of the last token_ids that are drafts, guesses of the tokens to sample: a row is sampled before each
    of them too, and the first draft that differs from its row's token ends the chunk's outputs."""
    history: array[int] | None = None
    """int32, all tokens of the request when it gets its count_row, once, for the row to be filled."""
    score_start: int = 0
    """Position of the first prompt token to score."""
    media: ChunkMedia | None = None
    """What the tokens take from images and videos; None for a request without any."""
    scored_ids: array[int] = NO_IDS
    """int32, the prompt tokens from score_start on whose log-probabilities are wanted; this chunk's tokens predict
    them."""

    @property
    def request_id(self) -> str:
        return self.owner.request_id

    @property
    def params(self) -> SamplingParams:
        return self.owner.params

    @property
    def num_extra_rows(self) -> int:
        """Return the rows of logits besides that of the last token: one per draft, or per scored prompt token."""
        return self.num_drafts + len(self.scored_ids)

    @property
    def drafts(self) -> array[int]:
        """Return the drafts, the last of token_ids."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]


UNKNOWN = array("i", (0,))
"""The token of every chunk whose token is not known."""


class Decodes(NamedTuple):
    """Chunks of one token that sample and have no drafts, scores or media, as columns: most rows of most steps.

    The lists must not be changed.
    """

    owners: Sequence[Owner]
    """The owner of each row. It is the list of the step before only if that step's first rows are those of the same
    requests, one token earlier."""
    starts: Sequence[int]
    """The position of each token."""
    token_ids: Sequence[int]
    """Empty if the tokens are being sampled by the step in flight."""
    previous_rows: Sequence[int]
    """The rows of that step, or empty."""
    block_ids: Sequence[tuple[array[int], ...]]
    events: Sequence[int]
    """The rows that fill a block, or whose next token is the last one that the request may have, at least."""
    changed: Sequence[int]
    """If `owners` is the list of the step before: the rows with other blocks than there, at least."""

    def chunks(self) -> list[Chunk]:
        """Return a chunk for each row."""
        tokens = [array("i", (token_id,)) for token_id in self.token_ids] or [UNKNOWN] * len(self.owners)
        rows = self.previous_rows or [None] * len(self.owners)
        return [
            Chunk(owner, start, token, row, block_ids, True, start + 1 - owner.num_prompt_tokens)
            for owner, start, token, row, block_ids in zip(
                self.owners, self.starts, tokens, rows, self.block_ids, strict=True
            )
        ]


NO_DECODES = Decodes((), (), (), (), (), (), ())


class ExtraRows(NamedTuple):
    """The extra rows of a chunk."""

    row: int
    """The chunk's index in the plan, which is its own row."""
    first: int
    """The first of the rows."""
    num_rows: int
    chunk: Chunk


@dataclass(frozen=True)
class StepPlan:
    """The work of one step. Every plan that the scheduler returns must be run, in order, and committed."""

    step_id: int
    others: tuple[Chunk, ...]
    """The chunks besides `decodes`: chunks of one token first, then the longer ones."""
    num_preempted: int
    kind: StepKind = StepKind.SAMPLE
    copies: tuple[tuple[tuple[int, int], ...], ...] = ()
    """In each cache group the (source, target) blocks to copy before the step runs; no target is a source."""
    adapter_loads: Mapping[int, int] = field(default_factory=dict)
    """The adapters to write into slots before the step runs, by slot."""
    has_adapters: bool = False
    """False if no chunk has an adapter."""
    encodes: tuple[Encode, ...] = ()
    """The images and videos to encode before the step runs."""
    decodes: Decodes = NO_DECODES
    """The first rows of the step."""
    clips: tuple[ClipEncode, ...] = ()
    """The clips to encode before the step runs."""

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Return all chunks, at least one: those of one token first. Making those of `decodes` takes time."""
        return (*self.decodes.chunks(), *self.others)

    @property
    def num_chunks(self) -> int:
        return len(self.decodes.starts) + len(self.others)

    @cached_property
    def num_tokens(self) -> int:
        return len(self.decodes.starts) + sum(len(chunk.token_ids) for chunk in self.others)

    @property
    def decodes_only(self) -> bool:
        """Return whether no chunk has more than one token."""
        return not self.others or len(self.others[-1].token_ids) == 1

    @cached_property
    def extra_rows(self) -> tuple[ExtraRows, ...]:
        """Return the extra rows of each chunk that has some."""
        extra, row = [], self.num_chunks
        for index, chunk in enumerate(self.others, start=len(self.decodes.starts)):
            if num_rows := chunk.num_extra_rows:
                extra.append(ExtraRows(index, row, num_rows, chunk))
                row += num_rows
        return tuple(extra)

    @cached_property
    def num_rows(self) -> int:
        """Return the number of rows of logits: one per chunk, then the extra rows, chunk by chunk."""
        return self.num_chunks + sum(extra.num_rows for extra in self.extra_rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: entry i belongs to chunks[i]. Entries of chunks that do not sample must be ignored."""

    token_ids: Sequence[int]
    """The token that each chunk's last row sampled."""
    logprobs: Sequence[Sequence[TokenLogprobs] | None]
    """One entry per token, None if the chunk's request asks for none."""
    prompt_logprobs: Sequence[list[TokenLogprobs]]
    """One entry per scored prompt token of each chunk; empty lists if none was asked for."""
    pooled: Sequence[Pooled | RequestError | None] = ()
    """The result of a pooling step, in place of the others: None for a chunk that does not end its prompt, unless each
    token gives an output."""
    seconds: float = 0.0
    """The time that the step took, from its launch or the end of the step before; 0 if it is not known."""
    before_drafts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """The tokens that were sampled before each draft of the chunks that have some, by the chunks' indices."""
    hidden_states: Mapping[int, HiddenStates] = field(default_factory=dict)
    """The hidden states of chunks whose requests ask for some, by the chunks' indices."""
