"""The scheduler's request: its tokens, the conditions that end it, and its place in line."""

from __future__ import annotations

import sys
from array import array

from jaxllm.core_messages import EngineCoreRequest, Pooled, PromptMedia
from jaxllm.exceptions import VLLMValidationError
from jaxllm.pooling_params import TOKEN_TASKS
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.config import SchedulerConfig
from jaxllm.scheduling.media import extents, row_counts
from jaxllm.scheduling.plan import Owner, StepKind
from jaxllm.scheduling.repetition import repeats

NO_TOKEN = -1
"""The id of tokens that are embeddings alone."""


class Request:
    """One sequence being generated, or pooled. Its tokens change in commit only."""

    __slots__ = (
        "adapter",
        "block_hashes",
        "clip",
        "donor",
        "finish_reason",
        "keeps_blocks",
        "kind",
        "media",
        "most_tokens",
        "num_cached_tokens",
        "num_planned",
        "num_preemptions",
        "num_prompt_tokens",
        "num_seats",
        "num_unknown",
        "order",
        "owner",
        "params",
        "pooled",
        "pooling",
        "queued_ts",
        "request_id",
        "row",
        "row_step",
        "runs_whole",
        "salt",
        "scheduled_ts",
        "score_start",
        "source",
        "token_ids",
        "waits_for_last_token",
    )

    def __init__(
        self,
        source: EngineCoreRequest,
        order: tuple[float, ...],
        queued_ts: float,
        donor: Request | None = None,
        whole_tasks: frozenset[str] = frozenset(),
        max_model_len: int = sys.maxsize,
    ) -> None:
        self.source, self.request_id = source, source.request_id
        self.params, self.pooling = source.sampling_params, source.pooling_params
        task = None if self.pooling is None else self.pooling.task
        self.kind = kind_of(task)
        self.runs_whole = task in whole_tasks
        """True if all its tokens must be in one step."""
        self.pooled: list[Pooled] = []  # of the chunks so far, in order
        self.order = order
        """The place in line, which is unique: the smaller runs first and is preempted last."""
        self.token_ids = _prompt_ids(source)
        """int32, prompt and outputs; NO_TOKEN for an embedding."""
        self.num_prompt_tokens = len(source.prompt_token_ids)
        self.most_tokens = min(self.num_prompt_tokens + source.max_tokens, max_model_len)
        """The most tokens that it can have, prompt and outputs."""
        self.owner: Owner | None = None  # while it runs
        self.num_planned = self.num_unknown = 0
        """The number of its tokens that the steps in flight compute, and of those that they sample."""
        self.row, self.row_step = -1, -1
        """The row, -1 if unknown, that samples its last token in the latest step that has it, and that step's id."""
        self.media, self.clip, self.adapter = source.media, source.clip, source.adapter
        # Encoded now, so that a salt that cannot be encoded is this request's error: hashes are made during a step.
        self.salt = _encode_salt(source)
        self.block_hashes: list[bytes] = []
        """The hash chain of the leading full blocks, as far as it was needed."""
        self.donor = donor
        """The request whose blocks this one shares where their tokens agree; None once this one has ended."""
        self.keeps_blocks = source.keeps_blocks
        """True if its table outlives it, even if no fork waits for it."""
        self.num_seats = source.num_seats
        """The number of seats, of max_num_seqs, that it takes."""
        self.score_start = self.params.first_scored_position
        """The first prompt position to score, if any."""
        self.waits_for_last_token = waits_for_last_token(self.params)
        self.queued_ts = queued_ts
        self.scheduled_ts: float | None = None
        """time.monotonic() when first scheduled; None before."""
        self.num_cached_tokens = 0
        """The number of prompt tokens that the prefix cache or the donor had when it was first scheduled."""
        self.num_preemptions = 0
        self.finish_reason: str | None = None
        """The finish reason as in EngineCoreOutput, once it has ended."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_plain(self) -> bool:
        """Return whether its decodes need nothing but its position and its blocks."""
        is_text = self.pooling is None and self.media is None
        return is_text and not self.waits_for_last_token and self.params.repetition_detection is None

    @property
    def end_ids(self) -> set[int]:
        """Return the tokens that end it."""
        eos = self.source.eos_token_id
        return {*(self.params.stop_token_ids or ()), *(() if eos is None else (eos,))}

    @property
    def is_later_step(self) -> bool:
        """Return whether it is a step of a beam search that continues an earlier one."""
        return self.source.keeps_blocks and self.source.fork_of is not None

    @property
    def is_scored(self) -> bool:
        """Return whether its prompt must still be scored, and so be computed from the first token on."""
        return self.score_start is not None and not self.num_output_tokens

    @property
    def reads_cache(self) -> bool:
        """Return whether the prefix cache may save it work; a request with outputs has computed its prompt already."""
        if self.pooling is not None:
            needs_all = self.runs_whole or self.kind is StepKind.POOL_TOKENS
            return not (needs_all or self.pooling.skip_reading_prefix_cache)
        return not self.params.skip_reading_prefix_cache or self.num_output_tokens > 0

    def reads_media(self, start: int) -> bool:
        """Return whether tokens from a position on may take rows of an image or a video."""
        return self.media is not None and start < self.num_prompt_tokens

    def all_pooled(self) -> Pooled:
        """Return the pooled outputs of all chunks."""
        data, num_rows = b"".join(part.data for part in self.pooled), sum(part.num_rows for part in self.pooled)
        return Pooled(data, num_rows, self.pooled[0].is_flat)

    def scored_positions(self, start: int, num_tokens: int) -> range:
        """Return the prompt positions to score that the tokens from `start` on predict."""
        if self.score_start is None or self.num_output_tokens:
            return range(0)
        return range(max(start + 1, self.score_start), min(start + num_tokens + 1, self.num_prompt_tokens))


def check_limits(request: Request, config: SchedulerConfig) -> None:
    """Raise VLLMValidationError for a request that no step can run."""
    if not 1 <= request.num_prompt_tokens <= config.max_model_len:
        raise VLLMValidationError(
            f"Request {request.request_id!r} has {request.num_prompt_tokens} prompt tokens; "
            f"max_model_len={config.max_model_len} allows 1 to that many.",
            parameter="prompt",
        )
    if request.media is not None:
        _check_media(request, request.media, config)
    if request.is_scored and config.num_rows < 2:
        raise VLLMValidationError(
            f"Request {request.request_id!r} wants prompt_logprobs, which needs max_rows of at least 2.",
            parameter="prompt_logprobs",
        )


def _check_media(request: Request, media: PromptMedia, config: SchedulerConfig) -> None:
    num_rows = row_counts(media)
    if max(num_rows, default=0) > config.num_media_rows:
        raise _media_error(
            f"An image or video takes {max(num_rows)} tokens, and this engine encodes at most "
            f"{config.num_media_rows} at once: make it smaller, or raise max_num_batched_tokens."
        )
    if request.runs_whole and sum(num_rows) > config.num_media_rows:
        raise _media_error(
            f"The images and videos of a prompt that is pooled whole take {sum(num_rows)} tokens, and this engine "
            f"encodes at most {config.num_media_rows} at once: send fewer, or raise max_num_batched_tokens."
        )
    if not config.sees_both_sides:
        return
    most_tokens = min(config.max_num_batched_tokens, config.long_prefill_token_threshold or config.max_model_len)
    num_tokens = max((end - start for start, end in extents(media)), default=0)
    if num_tokens > most_tokens and not request.runs_whole:
        raise _media_error(
            f"An image or frame takes {num_tokens} tokens, which attend to each other, and a step of this engine "
            f"computes at most {most_tokens} of one request: make it smaller, or raise max_num_batched_tokens and "
            f"long_prefill_token_threshold."
        )
    num_scored = max((len(request.scored_positions(start, end - start)) for start, end in extents(media)), default=0)
    if num_scored >= config.num_rows:
        raise VLLMValidationError(
            f"prompt_logprobs of an image whose tokens attend to each other need {num_scored + 1} rows of logits in "
            f"one step, and this engine has {config.num_rows}: do without prompt_logprobs, or make the image smaller.",
            parameter="prompt_logprobs",
        )


def _media_error(message: str) -> VLLMValidationError:
    return VLLMValidationError(message, parameter="multi_modal_data")


def kind_of(task: str | None) -> StepKind:
    """Return the kind of step of a pooling task; None stands for generating."""
    if task is None:
        return StepKind.SAMPLE
    return StepKind.POOL_TOKENS if task in TOKEN_TASKS else StepKind.POOL


def find_end(request: Request) -> tuple[str, int | str | None] | None:
    """Return (finish_reason, stop_reason) if the request ends with its last token, else None."""
    source, params = request.source, request.params
    token_id = request.token_ids[-1]
    # Regardless of min_tokens: its mask allows such a token only if no other token may follow.
    if token_id == source.eos_token_id:
        return "stop", None
    if params.stop_token_ids and token_id in params.stop_token_ids:
        return "stop", token_id
    if len(request.token_ids) >= request.most_tokens:
        return "length", None
    detection = params.repetition_detection
    if detection is None or request.num_output_tokens < params.min_tokens:
        return None
    is_repetition = repeats(request.token_ids, request.num_prompt_tokens, detection)
    return ("repetition", "repetition_detected") if is_repetition else None


def waits_for_last_token(params: SamplingParams) -> bool:
    """Return whether the allowed tokens depend on the token before, so that the host must know it first."""
    if params.structured_outputs is not None or params.thinking_token_budget is not None:
        return True
    return any(len(word) > 1 for word in params.bad_words_token_ids or ())


def needs_token_counts(params: SamplingParams) -> bool:
    """Return whether a penalty reads how often each token has occurred."""
    return bool(params.presence_penalty or params.frequency_penalty) or params.repetition_penalty != 1.0


def _prompt_ids(source: EngineCoreRequest) -> array[int]:
    """Return the ids of a prompt, int32, with NO_TOKEN for each embedding of one that begins with embeddings."""
    ids, num_embeds = array("i", source.prompt_token_ids), 0 if source.media is None else source.media.num_embeds
    ids[:num_embeds] = array("i", (NO_TOKEN,)) * num_embeds
    return ids


def _encode_salt(source: EngineCoreRequest) -> bytes:
    """Return the extra key of a request's block hashes: its salt, and what changes the keys and values of all tokens.

    That is its adapter, its steering, and the clip that it attends to.
    """
    salt = source.cache_salt or ""
    try:
        # No text in UTF-8 has these bytes.
        of_adapter = b"" if source.adapter is None else b"\xff%d" % source.adapter
        of_steering = b"" if source.steered is None else b"\xfb" + source.steered.key
        return salt.encode() + of_adapter + of_steering + (b"" if source.clip is None else b"\xfc" + source.clip.key)
    except UnicodeEncodeError as error:
        message = f"cache_salt must be Unicode text, got {salt!r}."
        raise VLLMValidationError(message, parameter="cache_salt", value=salt) from error
