"""A request as the scheduler knows it: its tokens, what ends it, and its place in line."""

from __future__ import annotations

import enum
from array import array

from jaxllm.engine.messages import EngineCoreRequest


class RequestStatus(enum.Enum):
    """Where a request stands; follows from which queue holds it."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waiting again, after its blocks were taken away."""


class Request:
    """One sequence being generated. Its tokens and its end change in commit and abort only."""

    __slots__ = (
        "banned_token_ids",
        "block_hashes",
        "finish_reason",
        "num_cached_tokens",
        "num_prompt_tokens",
        "order",
        "params",
        "queued_ts",
        "request_id",
        "scheduled_ts",
        "source",
        "token_ids",
    )

    def __init__(self, source: EngineCoreRequest, order: tuple[float, ...], queued_ts: float) -> None:
        self.source = source
        self.request_id = source.request_id
        self.params = source.sampling_params
        self.order = order
        """Unique; the smaller runs first and is preempted last."""
        self.token_ids = array("i", source.prompt_token_ids)
        """int32, prompt and outputs."""
        self.num_prompt_tokens = len(source.prompt_token_ids)
        self.block_hashes: list[bytes] = []
        """The hash chain of the leading full blocks, as far as anyone has asked for it."""
        self.banned_token_ids = _ending_token_ids(source)
        """What must not be sampled while there are fewer than min_tokens outputs."""
        self.queued_ts = queued_ts
        self.scheduled_ts: float | None = None
        """time.monotonic() when first scheduled; None before."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache when first scheduled."""
        self.finish_reason: str | None = None
        """"stop", "length" or "abort" once it has ended."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def reaches_length(self, num_tokens: int, max_model_len: int) -> bool:
        """Say whether the request ends, at the latest, once it has num_tokens tokens."""
        return num_tokens >= self.num_prompt_tokens + self.source.max_tokens or num_tokens >= max_model_len


def find_end(request: Request, max_model_len: int) -> tuple[str, int | None] | None:
    """Return (finish_reason, stop_reason) if the request ends with its last token, else None."""
    source, params = request.source, request.params
    if request.num_output_tokens >= params.min_tokens:
        token_id = request.token_ids[-1]
        if token_id == source.eos_token_id:
            return "stop", None
        if params.stop_token_ids and token_id in params.stop_token_ids:
            return "stop", token_id
    if request.reaches_length(len(request.token_ids), max_model_len):
        return "length", None
    return None


def _ending_token_ids(source: EngineCoreRequest) -> tuple[int, ...]:
    """List EOS and the stop ids if min_tokens ever bans them, else nothing."""
    if not source.sampling_params.min_tokens:
        return ()
    params = source.sampling_params
    eos = () if source.eos_token_id is None else (source.eos_token_id,)
    # As in vLLM min_tokens holds EOS back even where ignore_eos would let it pass.
    return tuple(dict.fromkeys((*eos, *(params.stop_token_ids or ()), *sorted(params.all_stop_token_ids))))
