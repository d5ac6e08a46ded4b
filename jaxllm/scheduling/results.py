"""Take the results of a step into its requests, and make their outputs; the scheduler ends requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from jaxllm.core_messages import (
    EngineCoreOutput,
    HiddenStates,
    NextTokens,
    Pooled,
    PromptLogprobs,
    RequestError,
    TokenLogprobs,
    no_tokens,
)
from jaxllm.scheduling.cache.kv_cache_manager import KVCacheManager
from jaxllm.scheduling.plan import StepPlan, StepResult
from jaxllm.scheduling.request import Request, find_end
from jaxllm.scheduling.speculation import Speculation


class Taken(NamedTuple):
    """What a step gave to its requests."""

    outputs: list[EngineCoreOutput]
    next_tokens: NextTokens
    """The tokens of requests that go on, and that `outputs` says nothing of."""
    ended: list[tuple[Request, str]]
    """The requests that end with it, and their finish reasons."""

    def add(self, request: Request, output: EngineCoreOutput) -> None:
        """Add the output of a request; one with a finish reason ends it."""
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.ended.append((request, output.finish_reason))


def take_samples(
    cache: KVCacheManager,
    plan: StepPlan,
    requests: Sequence[Request],
    result: StepResult,
    end_ids: Collection[int],
    speculation: Speculation | None = None,
) -> Taken:
    """Append the tokens that a step sampled to their requests. `end_ids` has all tokens that may end a request."""
    taken = Taken([], no_tokens(), [])
    tables, block_size, first = cache.tables, cache.block_size, len(plan.decodes.starts)
    if first:
        _take_decodes(cache, plan, requests, result, end_ids, taken)
    of_others = [each[first:] for each in (requests, result.token_ids, result.logprobs, result.prompt_logprobs)]
    rows = enumerate(zip(plan.others, *of_others, strict=True), start=first)
    for row, (chunk, request, token_id, logprobs, prompt_logprobs) in rows:
        if request.finish_reason is not None:
            continue  # ended while this step was in flight
        table = tables[request.request_id]
        scores = PromptLogprobs(chunk.score_start, prompt_logprobs) if prompt_logprobs else None
        if not chunk.samples:
            table.num_computed_tokens += len(chunk.token_ids)
            if scores is not None or row in result.hidden_states:
                taken.add(request, make_output(request, [], None, scores, hidden_states=result.hidden_states.get(row)))
            continue
        sampled_ids = [*result.before_drafts.get(row, ()), token_id]
        num_new, end = _append_checked(request, sampled_ids, chunk.drafts if chunk.num_drafts else ())
        # The drafts that were right are computed, except one that ended the request.
        table.num_computed_tokens += len(chunk.token_ids) - chunk.num_drafts + num_new - 1
        if chunk.num_drafts:
            cache.settle_drafts(request, table, num_new - 1)
        if speculation is not None:
            speculation.record(request, num_new, chunk.num_drafts)
        if table.num_computed_tokens >= (table.num_registered + 1) * block_size:
            cache.register(request, table, table.num_computed_tokens)
        if table.state is not None:
            cache.register_saved(request, table)
        new_ids = sampled_ids if num_new == len(sampled_ids) else sampled_ids[:num_new]
        shown = None if logprobs is None else list(logprobs[:num_new])
        states = result.hidden_states.get(row)
        taken.add(request, make_output(request, new_ids, shown, scores, *(end or (None, None)), hidden_states=states))
    return taken


def _take_decodes(
    cache: KVCacheManager,
    plan: StepPlan,
    requests: Sequence[Request],
    result: StepResult,
    end_ids: Collection[int],
    taken: Taken,
) -> None:
    """Take the decodes of a step, its first rows: look closer at those alone that need it."""
    first = len(plan.decodes.starts)
    requests, sampled_ids, logprobs = requests[:first], result.token_ids[:first], result.logprobs[:first]
    tables = cache.tables
    for request, token_id in zip(requests, sampled_ids, strict=True):
        if request.finish_reason is None:
            request.num_planned -= 1
            request.num_unknown -= 1
            request.token_ids.append(token_id)
            tables[request.request_id].num_computed_tokens += 1
    others = {row for row, request in enumerate(requests) if request.finish_reason is not None}
    rows = {row for row, token_id in enumerate(sampled_ids) if token_id in end_ids}
    rows.update(plan.decodes.events, [row for row, of_row in enumerate(logprobs) if of_row is not None])
    for row in sorted(rows - others):
        if _finish_decode(cache, requests[row], logprobs[row], taken):
            others.add(row)
    sequence_ids, token_ids = taken.next_tokens
    sequence_ids += [request.request_id for request in requests]
    token_ids += sampled_ids
    for row in sorted(others, reverse=True):
        del sequence_ids[row], token_ids[row]


def _finish_decode(
    cache: KVCacheManager, request: Request, logprobs: Sequence[TokenLogprobs] | None, taken: Taken
) -> bool:
    """Register a block that a decode has filled; return whether its token has an output, which is then in `taken`."""
    table = cache.tables[request.request_id]
    cache.register(request, table, table.num_computed_tokens)
    end = find_end(request)
    if end is None and logprobs is None:
        return False
    shown = None if logprobs is None else list(logprobs)
    taken.add(request, make_output(request, [request.token_ids[-1]], shown, None, *(end or (None, None))))
    return True


def _append_checked(
    request: Request, sampled_ids: Sequence[int], drafts: Sequence[int]
) -> tuple[int, tuple[str, int | str | None] | None]:
    """Append sampled tokens up to the first that ends the request, or that is not the draft it was computed with.

    Return their number, and why the request ends, if it does.
    """
    for index, token_id in enumerate(sampled_ids):
        request.token_ids.append(token_id)
        end = find_end(request)
        if end is not None or (index < len(drafts) and token_id != drafts[index]):
            return index + 1, end
    return len(sampled_ids), None


def take_pooled(cache: KVCacheManager, plan: StepPlan, requests: Sequence[Request], result: StepResult) -> Taken:
    """Collect the pooled outputs of chunks, until their prompts are done."""
    taken = Taken([], no_tokens(), [])
    for chunk, request, pooled in zip(plan.chunks, requests, result.pooled, strict=True):
        if request.finish_reason is not None:
            continue  # ended while this step was in flight
        cache.tables[request.request_id].num_computed_tokens += len(chunk.token_ids)
        if isinstance(pooled, RequestError):
            taken.add(request, make_output(request, [], finish_reason="error", error=pooled))
            continue
        if pooled is not None:
            request.pooled.append(pooled)
        if chunk.start + len(chunk.token_ids) == request.num_tokens:
            taken.add(request, make_output(request, [], finish_reason="stop", pooled=request.all_pooled()))
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
    hidden_states: HiddenStates | None = None,
) -> EngineCoreOutput:
    """Return the output of one step for a request; `logprobs` are those of its new tokens."""
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=new_token_ids,
        new_logprobs=None if request.params.num_logprobs is None else logprobs,
        new_prompt_logprobs=prompt_logprobs,
        new_hidden_states=hidden_states,
        pooled=pooled,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        error=error,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        queued_ts=request.queued_ts,
        scheduled_ts=request.scheduled_ts or 0.0,
    )
