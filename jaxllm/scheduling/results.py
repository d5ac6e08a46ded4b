"""Take the results of a step into its requests, and make their outputs; the scheduler ends requests."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.core_messages import EngineCoreOutput, Pooled, PromptLogprobs, RequestError, TokenLogprobs
from jaxllm.scheduling.kv_cache_manager import KVCacheManager
from jaxllm.scheduling.plan import StepPlan, StepResult
from jaxllm.scheduling.request import Request, find_end
from jaxllm.scheduling.speculation import Speculation

type _Taken = list[tuple[Request, EngineCoreOutput]]
"""The requests that a step gave something, each with its output; an output with a finish_reason ends its request."""


def take_samples(
    cache: KVCacheManager,
    max_model_len: int,
    plan: StepPlan,
    requests: Sequence[Request],
    result: StepResult,
    speculation: Speculation | None = None,
) -> _Taken:
    """Append the tokens that a step sampled to their requests."""
    taken: _Taken = []
    if speculation is not None:
        speculation.take_time(plan, result.seconds)
    for chunk, request, sampled_ids, logprobs, prompt_logprobs in zip(
        plan.chunks, requests, result.token_ids, result.logprobs, result.prompt_logprobs, strict=True
    ):
        if request.finish_reason is not None:
            continue  # ended while this step was in flight
        table = cache.tables[request.request_id]
        scores = PromptLogprobs(chunk.score_start, prompt_logprobs) if prompt_logprobs else None
        if not chunk.samples:
            table.num_computed_tokens += len(chunk.token_ids)
            if scores is not None:
                taken.append((request, make_output(request, [], None, scores)))
            continue
        num_new, end = _append(request, sampled_ids, chunk.drafts if chunk.num_drafts else (), max_model_len)
        # The drafts that were right are computed, except one that ended the request.
        table.num_computed_tokens += len(chunk.token_ids) - chunk.num_drafts + num_new - 1
        if speculation is not None:
            speculation.record(request, num_new, chunk.num_drafts)
        cache.register(request, table, table.num_computed_tokens)
        cache.register_saved(request, table)
        shown = None if logprobs is None else list(logprobs[:num_new])
        taken.append((request, make_output(request, list(sampled_ids[:num_new]), shown, scores, *end)))
    return taken


def _append(
    request: Request, sampled_ids: Sequence[int], drafts: Sequence[int], max_model_len: int
) -> tuple[int, tuple[str | None, int | str | None]]:
    """Append sampled tokens up to the first that ends the request, or that is not the draft it was computed with.

    Return their number, and why the request ends, if it does.
    """
    for index, token_id in enumerate(sampled_ids):
        request.token_ids.append(token_id)
        end = find_end(request, max_model_len)
        if end is not None or (index < len(drafts) and token_id != drafts[index]):
            return index + 1, end or (None, None)
    return len(sampled_ids), (None, None)


def take_pooled(cache: KVCacheManager, plan: StepPlan, requests: Sequence[Request], result: StepResult) -> _Taken:
    """Collect the pooled outputs of chunks, until their prompts are done."""
    taken: _Taken = []
    for chunk, request, pooled in zip(plan.chunks, requests, result.pooled, strict=True):
        if request.finish_reason is not None:
            continue  # ended while this step was in flight
        cache.tables[request.request_id].num_computed_tokens += len(chunk.token_ids)
        if isinstance(pooled, RequestError):
            taken.append((request, make_output(request, [], finish_reason="error", error=pooled)))
            continue
        if pooled is not None:
            request.pooled.append(pooled)
        if chunk.start + len(chunk.token_ids) == request.num_tokens:
            taken.append((request, make_output(request, [], finish_reason="stop", pooled=request.all_pooled())))
    return taken


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
    """Return the output of one step for a request; `logprobs` are those of its new tokens."""
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
