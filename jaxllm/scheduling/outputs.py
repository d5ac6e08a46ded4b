"""The scheduler reports these outputs of a request."""

from __future__ import annotations

from jaxllm.core_messages import EngineCoreOutput, Pooled, PromptLogprobs, RequestError, TokenLogprobs
from jaxllm.scheduling.request import Request


def make_output(
    request: Request,
    new_token_ids: list[int],
    logprobs: list[TokenLogprobs] | None = None,
    prompt_logprobs: PromptLogprobs | None = None,
    finish_reason: str | None = None,
    stop_reason: int | str | None = None,
    error: RequestError | None = None,
    pooled: Pooled | None = None,
) -> EngineCoreOutput:
    """Return what one step did to a request; `logprobs` are those of its new tokens."""
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=new_token_ids,
        new_logprobs=None if request.params.num_logprobs is None else logprobs,
        new_prompt_logprobs=prompt_logprobs,
        pooled=pooled,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        error=error,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        queued_ts=request.queued_ts,
        scheduled_ts=request.scheduled_ts or 0.0,
    )
