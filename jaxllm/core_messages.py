"""The messages between a front end and its engine core: plain data, which goes through msgpack unchanged."""

from __future__ import annotations

import copy
from typing import Literal, NamedTuple

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.lora.request import LoRARequest
from jaxllm.params.hidden_states import Positions
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams
from jaxllm.steering.request import Steered

SEED_MASK = 2**64 - 1
PROMPT_EMBEDS = "prompt_embeds"
"""The modality of items that are parts of a prompt of embeddings."""
EMBEDS_PART = 256
"""The rows of such an item; the last of a prompt may have fewer."""


class MediaSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive tokens of a prompt that take consecutive rows of an item in place of their embeddings."""

    offset: int
    """The position of the first token."""
    num_rows: int
    first_row: int
    """The item's row that the first token takes."""


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """An image, a video or a sound of a prompt, as its encoder takes it, or encoded already."""

    key: bytes
    """A hash of all that the item's rows depend on."""
    modality: str
    """"image", "video" or "audio"; PROMPT_EMBEDS for part of a prompt of embeddings."""
    grids: list[tuple[int, int, int]]
    """The (frames, height, width) in patches of the image, or of each of its tiles, or of each group of frames. A sound
    has one of (1, 1, columns of its features)."""
    size: tuple[int, int]
    """The (height, width) in pixels of the picture before it was processed; of a sound, 1 and its samples."""
    patches: bytes
    """float32 [p, c], the numbers of each patch, in the order in which the model's processor gives patches. Of an item
    that is encoded, float32 [r, w], its rows."""
    spans: list[MediaSpan]
    """The tokens that take the item's rows, at least one span, in order; each row is taken once."""
    is_encoded: bool = False
    """True if the item comes as rows, which no tower makes; its grids and its size mean nothing then."""


class PromptMedia(msgspec.Struct, frozen=True, kw_only=True):
    """The images and videos of a prompt, and what they make of its positions."""

    items: list[MediaItem]
    """In the order of their spans, which do not overlap."""
    rope_positions: bytes = b""
    """int32 [n, 3], the positions of each prompt token in multimodal RoPE; empty in a model without it."""
    rope_offset: int = 0
    """What multimodal RoPE adds to the positions of tokens after the prompt."""

    @property
    def is_whole_prompt(self) -> bool:
        """Return whether the user's prompt is embeddings; a step of a beam search has tokens after them."""
        return bool(self.items) and self.items[0].modality == PROMPT_EMBEDS

    @property
    def num_embeds(self) -> int:
        """Return the number of the prompt's first tokens that are embeddings, whose ids mean nothing."""
        return sum(span.num_rows for item in self.items for span in item.spans) if self.is_whole_prompt else 0


class Clip(msgspec.Struct, frozen=True, kw_only=True):
    """The sound that a request's decoder attends to, as an encoder takes it."""

    key: bytes
    """A hash of all that its frames depend on."""
    mels: bytes
    """float32 [m, 2 * num_frames], its spectrogram."""
    num_frames: int
    """The frames that the encoder makes of it."""
    num_heard: int = 0
    """The frames with sound, before the silence that fills it up."""


class Alignment(NamedTuple):
    """Where the tokens of a transcript are in a clip."""

    heard: bytes
    """float32 [tokens, frames with sound], how much each token attends to each frame: above 0 more than others do."""
    logprobs: list[float]
    """The log-probability of each token after those before it."""


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt to continue or to pool, complete: nothing is looked up or defaulted after this point.

    Its `sampling_params.n` outputs are one sequence each; `split` makes the requests of the single sequences.
    """

    request_id: str
    """The front end's own name of the request, which it never gives to another one."""
    prompt_token_ids: list[int]
    """0 for each embedding of a prompt of embeddings."""
    sampling_params: SamplingParams
    """All are defaults in a request that is pooled, because nothing is sampled."""
    eos_token_id: int | None
    """The tokenizer's EOS, or None when the request ignores it."""
    max_tokens: int
    """The most tokens to generate, at least 1; already cut to the model's context."""
    seed: int
    """A number in [0, 2**64): all of the request's randomness comes from it and the position."""
    arrival_time: float
    """The time of arrival in seconds, as of time.time()."""
    arrival: int = 0
    """The front end's count of requests at its arrival, its position in the queue; steps of a beam search share it."""
    num_seats: int = 1
    """Its share of max_num_seqs: the first step of a beam search stands for all that follow it at once."""
    priority: int = 0
    cache_salt: str | None = None
    lora: LoRARequest | None = None
    """The adapter that it is computed with; None for the model alone."""
    adapter: int | None = None
    """The core's own number of that adapter, which it gives once the adapter is loaded."""
    pooling_params: PoolingParams | None = None
    """How the prompt's hidden states become the output; None for a request that generates."""
    pair_start: int | None = None
    """The position of the first token of a pair's second text; None for a single text."""
    fork_of: str | None = None
    """Another request that begins with the same tokens: this one waits for its prompt, then shares its blocks."""
    data_parallel_rank: int | None = None
    """The number of the replica that is to compute it; None for the one where it costs the least."""
    media: PromptMedia | None = None
    """The images and videos of the prompt; None if it has none."""
    clip: Clip | None = None
    """What an encoder-decoder's decoder attends to; None in other models."""
    steered: Steered | None = None
    """The steering vector that is added to its tokens' residual stream; None for none."""
    hidden_states: Positions | None = None
    """The positions of its prompt whose hidden states are returned; None for none."""
    keeps_blocks: bool = False
    """True if the blocks stay for forks after the request has ended, until `release` or until blocks run short."""


def sequence_ids(request: EngineCoreRequest) -> list[str]:
    """Return the ids that the core gives to a request's sequences: its own for the first, and one for each fork."""
    return [request.request_id, *(f"{request.request_id}#{index}" for index in range(1, request.sampling_params.n))]


def split(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """Return one request per sequence: the first scores the prompt for all, the others are forks of it.

    The seed of the i-th sequence is the request's plus i.
    """
    ids = sequence_ids(request)
    if len(ids) == 1:
        return [request]
    params = _without_prompt_scores(request.sampling_params)
    forks = [
        msgspec.structs.replace(
            request,
            request_id=ids[index],
            sampling_params=params,
            seed=(request.seed + index) & SEED_MASK,
            fork_of=request.request_id,
            hidden_states=None,
        )
        for index in range(1, len(ids))
    ]
    return [request, *forks]


def _without_prompt_scores(params: SamplingParams) -> SamplingParams:
    if params.first_scored_position is None:
        return params
    plain = copy.copy(params)
    plain.prompt_logprobs = plain.prompt_logprob_token_ids = plain.prompt_logprob_start = None
    return plain


class RequestError(msgspec.Struct, frozen=True, array_like=True):
    """A reason why a request has ended without what it asked for."""

    kind: Literal["invalid", "internal"]
    """It is "invalid" if the request asks for what cannot be done, "internal" where the engine has failed it."""
    message: str
    parameter: str | None = None
    """The argument that asks for what cannot be done, if one is known."""

    @classmethod
    def of(cls, error: BaseException) -> RequestError:
        """Return the reason that an exception stands for: only VLLMValidationError is the request's own fault."""
        if isinstance(error, VLLMValidationError):
            return cls("invalid", str(error), error.parameter)
        return cls("internal", f"{type(error).__name__}: {error}")


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position: of the token itself, then of the most likely ones in falling order, then of
    those that were asked for by id.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """The rank of the token itself in the vocabulary, from 1."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of some prompt tokens that follow one another."""

    start: int
    """The position of the first one in the prompt."""
    positions: list[TokenLogprobs]


class HiddenStates(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The outputs of some layers for some prompt tokens that follow one another."""

    start: int
    """The position of the first one in the prompt."""
    num_tokens: int
    data: bytes
    """float32 [tokens, layers, d]."""


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One task's part of the outputs of tokens, in a model whose tasks have heads of their own."""

    start: int
    size: int
    """Its columns, among those of all tasks."""
    activation: str
    """What `use_activation` does to it: "normalize" or "relu"."""
    first_id: int | None
    last_id: int | None
    """The tokens that have no output if a prompt begins, or ends, with them; None for none."""


class Pooled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Outputs of a pooling model, end to end, as float32 in the machine's order."""

    data: bytes
    num_rows: int
    """One for a sequence, or as many as there are tokens."""
    is_flat: bool = False
    """A token's output is one number, without an axis of its own."""


class EngineCoreOutput(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The outcome of one step for one sequence."""

    request_id: str
    """The id of the sequence, one of `sequence_ids`."""
    new_token_ids: list[int] = []
    """Empty when a chunk of the prompt was scored, and where the output says only that its sequence was admitted,
    aborted or failed.
    """
    new_logprobs: list[TokenLogprobs] | None = None
    new_prompt_logprobs: PromptLogprobs | None = None
    """A preempted request reports positions again."""
    new_hidden_states: HiddenStates | None = None
    """A preempted request reports positions again."""
    pooled: Pooled | None = None
    """The whole output of a request that was pooled."""
    finish_reason: str | None = None
    """None while the request goes on; else "stop", "length", "repetition", "abort" or "error"."""
    stop_reason: int | str | None = None
    """The stop token id that ended the request (None for EOS), or "repetition_detected"."""
    error: RequestError | None = None
    """The reason of finish_reason "error"."""
    is_admitted: bool = False
    """True once for each sequence of a request with structured outputs: its grammar has compiled."""
    num_cached_tokens: int = 0
    """The number of prompt tokens from the prefix cache when the request was first scheduled."""
    num_preemptions: int = 0
    """How often the request has been preempted so far."""
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    """time.monotonic() when the request entered the queue and when it was first scheduled."""


class NextTokens(NamedTuple):
    """The next tokens of sequences that go on, where there is nothing else to say: nearly all tokens."""

    sequence_ids: list[str]
    token_ids: list[int]

    def outputs(self) -> list[EngineCoreOutput]:
        """Return an output for each token."""
        pairs = zip(self.sequence_ids, self.token_ids, strict=True)
        return [EngineCoreOutput(request_id=name, new_token_ids=[token_id]) for name, token_id in pairs]


def no_tokens() -> NextTokens:
    """Return the next tokens of no sequence, to be added to."""
    return NextTokens([], [])


class SpeculationStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Drafts since the engine's start."""

    num_drafts: int
    """Chunks that had drafts."""
    num_draft_tokens: int
    num_accepted_tokens: int
    """Drafts that equal the sampled token."""
    num_accepted_tokens_per_pos: list[int]
    """Such drafts that were the first ones of their chunks, the second ones, and so on."""

    def plus(self, other: SpeculationStats | None) -> SpeculationStats:
        """Return the sums of these counts and others of as many positions."""
        if other is None:
            return self
        pairs = zip(self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos, strict=True)
        return SpeculationStats(
            num_drafts=self.num_drafts + other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + other.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens + other.num_accepted_tokens,
            num_accepted_tokens_per_pos=[one + more for one, more in pairs],
        )


class TierStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A tier of the KV cache: what it holds, and counts since the engine's start."""

    num_blocks: int = 0
    num_bytes: int = 0
    num_hit_tokens: int = 0
    """Prompt tokens that came from it."""
    num_fetched_blocks: int = 0
    num_evicted_blocks: int = 0

    def plus(self, other: TierStats) -> TierStats:
        """Return the sums of these counts and another's, and what the other holds."""
        return TierStats(
            num_blocks=other.num_blocks,
            num_bytes=other.num_bytes,
            num_hit_tokens=self.num_hit_tokens + other.num_hit_tokens,
            num_fetched_blocks=self.num_fetched_blocks + other.num_fetched_blocks,
            num_evicted_blocks=self.num_evicted_blocks + other.num_evicted_blocks,
        )


class TiersStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The tiers below the devices; counters count from the engine's start."""

    host: TierStats = TierStats()
    disk: TierStats = TierStats()
    num_queried_tokens: int = 0
    """Prompt tokens that were looked up in the prefix cache and that the devices lacked."""
    num_fetches: int = 0
    """The fetches that ended with all blocks."""
    num_failed_fetches: int = 0
    num_refused_fetches: int = 0
    """The fetches that were not made, since computing was expected to be sooner."""
    num_broken_files: int = 0

    def plus(self, other: TiersStats | None) -> TiersStats:
        """Return the sums of these counts and others', and what the others' tiers hold."""
        if other is None:
            return self
        return TiersStats(
            host=self.host.plus(other.host),
            disk=self.disk.plus(other.disk),
            num_queried_tokens=self.num_queried_tokens + other.num_queried_tokens,
            num_fetches=self.num_fetches + other.num_fetches,
            num_failed_fetches=self.num_failed_fetches + other.num_failed_fetches,
            num_refused_fetches=self.num_refused_fetches + other.num_refused_fetches,
            num_broken_files=self.num_broken_files + other.num_broken_files,
        )


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The scheduler at the end of a step; counters count from the engine's start."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_blocks: int
    num_blocks_in_use: int
    num_preemptions: int
    prefix_cache_requests: int
    prefix_cache_queries: int
    """Prompt tokens that were looked up. Requests that may not read the cache do not count."""
    prefix_cache_hits: int
    """Prompt tokens that were found on the devices."""
    num_steps: int
    num_scheduled_tokens: int
    speculation: SpeculationStats | None = None
    """Counts of drafts, in an engine that makes any."""
    tiers: TiersStats | None = None
    """In an engine that keeps blocks on the host."""


class BlockEviction(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A stay of content in a KV block that has ended; all in seconds."""

    lifetime: float
    idle: float
    """The time from when it was last found in the prefix cache, or from its beginning, to its end."""
    reuse_gaps: list[float]
    """The times between the last few times it was found."""


class EngineCoreOutputs(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="outputs"):
    """The outcome of one call of EngineCore.step."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats
    timestamp: float
    """time.monotonic() when the step's tokens reached the host."""
    evictions: list[BlockEviction] = []
    """The evictions among the blocks that are followed (kv_cache_metrics)."""
    num_deferred_reqs: int = 0
    """Requests that the scheduler does not know yet, because their grammars are being compiled."""
    engine_index: int = 0
    """The number of the replica whose step it was; the front end sets it."""
    next_tokens: NextTokens = msgspec.field(default_factory=no_tokens)
    """The tokens that came after `outputs`."""

    def all_outputs(self) -> list[EngineCoreOutput]:
        """Return `outputs`, and one for each of the other tokens."""
        return [*self.outputs, *self.next_tokens.outputs()]
