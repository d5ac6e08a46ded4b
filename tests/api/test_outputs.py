"""Outputs have vLLM's fields, and `RequestOutput.add` puts deltas together."""

from __future__ import annotations

import dataclasses

import jaxllm
from jaxllm.outputs import (
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
    RequestStateStats,
    ScoringOutput,
    ScoringRequestOutput,
)


def names(kind: type) -> str:
    return " ".join(field.name for field in dataclasses.fields(kind))


def completion(index: int, text: str, token_ids: list[int], *, reason: str | None = None) -> CompletionOutput:
    logprobs = [{token_id: Logprob(-1.0, 1, text)} for token_id in token_ids]
    return CompletionOutput(index, text, token_ids, -float(len(token_ids)), logprobs, finish_reason=reason)


def request(*outputs: CompletionOutput, finished: bool = False) -> RequestOutput:
    return RequestOutput("0", "prompt", [1, 2], None, list(outputs), finished)


def test_fields_are_those_of_vllm():
    assert names(RequestOutput) == (
        "request_id prompt prompt_token_ids prompt_logprobs outputs finished metrics lora_request encoder_prompt "
        "encoder_prompt_token_ids num_cached_tokens num_cache_creation_tokens kv_transfer_params ec_transfer_params"
    )
    assert names(CompletionOutput) == (
        "index text token_ids cumulative_logprob logprobs routed_experts finish_reason stop_reason lora_request "
        "sampling_mask"
    )
    assert names(Logprob) == "logprob rank decoded_token"
    assert names(RequestStateStats) == (
        "num_generation_tokens arrival_time queued_ts scheduled_ts first_token_ts last_token_ts first_token_latency "
        "is_corrupted"
    )


def test_finished_is_a_method():
    assert not completion(0, "a", [1]).finished()
    assert completion(0, "a", [1], reason="stop").finished()


def test_add_aggregates_deltas():
    whole = request(completion(0, "ab", [1]))
    whole.add(request(completion(0, "c", [2, 3]), completion(1, "x", [9])), aggregate=True)
    whole.add(request(completion(0, "d", [4], reason="stop"), finished=True), aggregate=True)
    first, second = whole.outputs
    assert (first.text, first.token_ids, first.finish_reason, whole.finished) == ("abcd", [1, 2, 3, 4], "stop", True)
    assert first.logprobs is not None
    assert [next(iter(position)) for position in first.logprobs] == [1, 2, 3, 4]
    assert (second.index, second.text) == (1, "x")


def test_add_replaces_cumulative_outputs():
    whole = request(completion(0, "ab", [1]))
    whole.add(request(completion(0, "abc", [1, 2])), aggregate=False)
    assert (whole.outputs[0].text, whole.outputs[0].token_ids, whole.finished) == ("abc", [1, 2], False)


def test_add_leaves_tuples_of_the_caller_alone():
    whole = request(CompletionOutput(0, "a", (1,), None, None))
    whole.add(request(CompletionOutput(0, "b", (2,), None, None)), aggregate=True)
    assert whole.outputs[0].token_ids == [1, 2]


def test_pooling_outputs():
    embedding = EmbeddingRequestOutput("0", EmbeddingOutput([0.5, 0.5]), [1], 0, True)
    assert (embedding.outputs.embedding, embedding.outputs.hidden_size) == ([0.5, 0.5], 2)
    assert ScoringRequestOutput("0", ScoringOutput(0.5), [1], 0, True).outputs.score == 0.5
    assert ClassificationOutput([0.25, 0.75]).num_classes == 2


def test_every_export_resolves():
    for name in jaxllm.__all__:
        assert getattr(jaxllm, name) is not None
    assert set(jaxllm.__all__) <= set(dir(jaxllm))
