"""What a step computed is taken into its requests, and becomes their outputs; requests are ended by the scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.messages import EngineCoreOutput, PromptLogprobs, RequestError
from jaxllm.scheduling.kv_cache_manager import KVCacheManager
from jaxllm.scheduling.outputs import make_output
from jaxllm.scheduling.plan import StepPlan, StepResult
from jaxllm.scheduling.request import Request, find_end

type Taken = list[tuple[Request, EngineCoreOutput]]
"""An output for each request that got something of a step; one with a finish_reason ends its request."""


def take_samples(
    cache: KVCacheManager, max_model_len: int, plan: StepPlan, requests: Sequence[Request], result: StepResult
) -> Taken:
    """Append the tokens that a step sampled to their requests."""
    taken: Taken = []
    for chunk, request, token_id, logprobs, prompt_logprobs in zip(
        plan.chunks, requests, result.token_ids, result.logprobs, result.prompt_logprobs, strict=True
    ):
        if request.finish_reason is not None:
            continue  # ended while this step was in flight
        table = cache.tables[request.request_id]
        table.num_computed_tokens += len(chunk.token_ids)
        scores = PromptLogprobs(chunk.score_start, prompt_logprobs) if prompt_logprobs else None
        if not chunk.samples:
            if scores is not None:
                taken.append((request, make_output(request, [], None, scores)))
            continue
        request.token_ids.append(token_id)
        cache.register(request, table, table.num_computed_tokens)
        cache.register_saved(request, table)
        finish_reason, stop_reason = find_end(request, max_model_len) or (None, None)
        taken.append((request, make_output(request, [token_id], logprobs, scores, finish_reason, stop_reason)))
    return taken


def take_pooled(
    cache: KVCacheManager, _max_model_len: int, plan: StepPlan, requests: Sequence[Request], result: StepResult
) -> Taken:
    """Collect what chunks gave, until their prompts are done."""
    taken: Taken = []
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
