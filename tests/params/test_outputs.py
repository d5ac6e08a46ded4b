"""Outputs have vLLM's fields, and `RequestOutput.add` puts deltas together."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest

import jaxllm
from jaxllm.logprobs import FlatLogprobs, Logprob
from jaxllm.outputs import (
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
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
        "encoder_prompt_token_ids num_cached_tokens num_cache_creation_tokens kv_transfer_params ec_transfer_params "
        "multi_modal_placeholders prompt_token_id_logprobs "
        "prompt_hidden_states"  # ours
    )
    assert names(CompletionOutput) == (
        "index text token_ids cumulative_logprob logprobs routed_experts finish_reason stop_reason lora_request "
        "sampling_mask spec_decode_metrics weight_versions"
    )
    assert names(Logprob) == "logprob rank decoded_token"
    assert names(RequestStateStats) == (
        "num_generation_tokens num_preemptions arrival_time queued_ts scheduled_ts first_token_ts last_token_ts "
        "first_token_latency is_corrupted is_watermarked is_watermark_skipped"
    )


def test_fields_of_a_later_vllm_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture):
    fields: dict[str, object] = {"colour": "blue", "num_cached_tokens": 3}
    output = RequestOutput("0", "a", [1], None, [], True, **fields)  # type: ignore[arg-type]
    assert (output.request_id, output.num_cached_tokens, hasattr(output, "colour")) == ("0", 3, False)
    assert caplog.messages == ["RequestOutput has no colour here: ignored."]
    assert dataclasses.replace(output, finished=False).finished is False
    assert copy.deepcopy(output) == output


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


POSITIONS = [{4: Logprob(-1.0, 2, "a"), 5: Logprob(-0.5, 1, "b")}, {}, {6: Logprob(-2.0)}, {7: Logprob(-3.0, 9, "c")}]


def test_flat_logprobs_read_as_a_list_does():
    flat = FlatLogprobs()
    flat.append(POSITIONS[0])
    flat.append(None)
    flat.extend(POSITIONS[2:3])
    flat.append_fast([7], [-3.0], [9], ["c"])
    assert names(FlatLogprobs) == "start_indices end_indices token_ids logprobs ranks decoded_tokens"
    assert (flat.start_indices, flat.end_indices) == ([0, 2, 2, 3], [2, 2, 3, 4])
    assert (flat.token_ids, flat.logprobs) == ([4, 5, 6, 7], [-1.0, -0.5, -2.0, -3.0])
    assert (flat.ranks, flat.decoded_tokens) == ([2, 1, None, 9], ["a", "b", None, "c"])
    assert list(flat) == POSITIONS
    assert len(flat) == 4
    assert flat[-1] == POSITIONS[-1]
    for piece in (slice(1, 3), slice(None), slice(-2, None), slice(4, 9), slice(None, None, -2), slice(2, 1)):
        assert list(flat[piece]) == POSITIONS[piece]
    with pytest.raises(IndexError):
        flat[4]
    copied = flat[:]
    copied += POSITIONS[:1]
    assert (len(copied), len(flat)) == (5, 4)


def test_flat_logprobs_only_grow_at_the_end():
    flat = FlatLogprobs()
    flat.append({1: Logprob(0.0)})
    with pytest.raises(TypeError, match="replaced"):
        flat[0] = {}
    with pytest.raises(TypeError, match="deleted"):
        del flat[0]
    with pytest.raises(TypeError, match="appended"):
        flat.insert(0, {})


def test_add_aggregates_flat_logprobs():
    def flat(*token_ids: int) -> FlatLogprobs:
        positions = FlatLogprobs()
        positions.extend({token_id: Logprob(-1.0, 1, "x")} for token_id in token_ids)
        return positions

    whole = request(dataclasses.replace(completion(0, "a", [1]), logprobs=flat(1)))
    whole.add(request(dataclasses.replace(completion(0, "b", [2]), logprobs=flat(2))), aggregate=True)
    assert whole.outputs[0].logprobs == flat(1, 2)


def test_add_keeps_the_log_probabilities_of_the_prompt():
    """Deltas bring them once, and empty ones in all other outputs."""
    scored, asked = [None, {5: Logprob(-0.5, 1, "x")}], np.ones((1, 2), np.float32)
    for parts in (([], scored, []), (scored, [], [])):
        whole = dataclasses.replace(request(completion(0, "a", [1])), prompt_logprobs=parts[0])
        for part in parts[1:]:
            later = dataclasses.replace(request(completion(0, "b", [2])), prompt_logprobs=part, num_cached_tokens=16)
            later.prompt_token_id_logprobs = asked if part is scored else None
            whole.add(later, aggregate=True)
        assert whole.prompt_logprobs == scored
        assert whole.num_cached_tokens == 16
        assert (whole.prompt_token_id_logprobs is asked) is (parts[0] is not scored)


def test_flat_logprobs_keep_a_token_that_is_listed_twice():
    """As the sampled token is that is among the most likely ones too."""
    part, whole = FlatLogprobs(), FlatLogprobs()
    for flat in (part, whole):
        flat.append_fast([3, 3], [-0.1, -0.1], [1, 1], ["a", "a"])
    whole.extend(part)
    assert whole.token_ids == [3, 3, 3, 3]
    assert (whole.start_indices, whole.end_indices) == ([0, 2], [2, 4])
