"""These types cross the engine-core client: every one round-trips through msgpack."""

from __future__ import annotations

import msgspec

from jaxllm.sampling_params import SamplingParams


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request is one sequence to generate, complete: nothing is looked up or defaulted after this point."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_id: int | None
    """The tokenizer's EOS, or None when the request ignores it."""
    max_tokens: int
    """The most tokens to generate, at least 1; already cut to the model's context."""
    seed: int
    """A number in [0, 2**64): all of the request's randomness comes from it and the position."""
    arrival_time: float
    """The time of arrival in seconds, as of time.time()."""
    priority: int = 0
    cache_salt: str | None = None
    fork_of: str | None = None
    """Another request that begins with the same tokens: this one waits for its prompt, then shares its blocks."""
    keeps_blocks: bool = False
    """True if the blocks stay for forks after the request has ended, until `release` or until blocks run short."""


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities at one position: of the token itself, then of the most likely ones in falling order, then of
    those that were asked for by id.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """The rank of the token itself in the vocabulary, from 1."""


class PromptLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities of some prompt tokens that follow one another."""

    start: int
    """The position of the first one in the prompt."""
    positions: list[TokenLogprobs]


class EngineCoreOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one step for one request."""

    request_id: str
    new_token_ids: list[int]
    """It is empty when a chunk of the prompt was scored, and at an abort or error."""
    new_logprobs: list[TokenLogprobs] | None = None
    new_prompt_logprobs: PromptLogprobs | None = None
    """A preempted request reports positions again."""
    finish_reason: str | None = None
    """It is None while the request goes on; else "stop", "length", "repetition", "abort" or "error"."""
    stop_reason: int | str | None = None
    """The stop token id that ended the request (None for EOS); for "error", what went wrong."""
    num_cached_tokens: int = 0
    """So many prompt tokens were taken from the prefix cache when the request was first scheduled."""
    num_preemptions: int = 0
    """The request's blocks have been taken away so often so far."""
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    """time.monotonic() when the request entered the queue and when it was first scheduled."""


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
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
    """Prompt tokens that were found."""
    num_steps: int
    num_scheduled_tokens: int


class BlockEviction(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A stay of content in a KV block that has ended; all in seconds."""

    lifetime: float
    idle: float
    """The time from when it was last found in the prefix cache, or from its beginning, to its end."""
    reuse_gaps: list[float]
    """The times between the last few times it was found."""


class EngineCoreOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one call of EngineCore.step."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats
    timestamp: float
    """time.monotonic() when the step's tokens reached the host."""
    evictions: list[BlockEviction] = []
    """The evictions among the blocks that are followed (kv_cache_metrics)."""
    num_deferred_reqs: int = 0
    """Requests that the scheduler does not know yet, because their grammars are being compiled."""
