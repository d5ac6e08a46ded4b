"""Commit records tokens, ends, logprobs and times."""

from __future__ import annotations

import time
from typing import Any

import pytest

from jaxllm.core_messages import EngineCoreRequest, RequestError, TokenLogprobs
from jaxllm.sampling_params import RepetitionDetectionParams
from jaxllm.scheduling.plan import StepResult
from jaxllm.scheduling.scheduler import Scheduler
from tests.scheduling.simulation import EOS, all_outputs, make_config, make_request

LOGPROBS = TokenLogprobs([5, 6], [-0.5, -1.0], 1)


def give(scheduler: Scheduler, token_id: int):
    """Plan a step for the only request, commit `token_id`, and return the output."""
    plan = scheduler.plan()
    assert plan is not None
    (output,) = all_outputs(*scheduler.commit(plan, StepResult([token_id], [[LOGPROBS]], [[]])))
    return output


def start(request: EngineCoreRequest, **changes: Any) -> Scheduler:
    scheduler = Scheduler(make_config(**changes))
    scheduler.add_request(request)
    return scheduler


@pytest.mark.parametrize(
    ("request_", "token_ids", "end"),
    [
        (make_request("a", 3, eos=EOS), [5, EOS], ("stop", None)),
        (make_request("a", 3, eos=None, max_tokens=2), [EOS, EOS], ("length", None)),
        (make_request("a", 3, stop_token_ids=[9, 8]), [5, 8], ("stop", 8)),
        (make_request("a", 3, eos=EOS, stop_token_ids=[EOS]), [EOS], ("stop", None)),
        (make_request("a", 3, max_tokens=1), [5], ("length", None)),
        (make_request("a", 3, max_tokens=1, eos=EOS), [EOS], ("stop", None)),
        (make_request("a", 62, max_tokens=50), [5, 6], ("length", None)),
        (make_request("a", 64, max_tokens=1), [5], ("length", None)),
        (make_request("a", 3, eos=EOS, min_tokens=2), [EOS], ("stop", None)),
        (make_request("a", 3, stop_token_ids=[8], min_tokens=3), [5, 8], ("stop", 8)),
    ],
    ids=[
        "eos",
        "eos-ignored",
        "stop-id",
        "eos-first",
        "max_tokens",
        "eos-last",
        "context",
        "full",
        "eos-that-min_tokens-let-through",
        "stop-id-that-min_tokens-let-through",
    ],
)
def test_ends(request_: EngineCoreRequest, token_ids: list[int], end: tuple[str, int | None]):
    scheduler = start(request_)
    for i, token_id in enumerate(token_ids):
        output = give(scheduler, token_id)
        assert output.new_token_ids == [token_id]
        expected = end if i == len(token_ids) - 1 else (None, None)
        assert (output.finish_reason, output.stop_reason) == expected
    assert not scheduler.has_unfinished_requests()
    assert scheduler.stats().num_blocks_in_use == 0
    scheduler.check()


@pytest.mark.parametrize(("logprobs", "expected"), [(None, None), (0, [LOGPROBS]), (1, [LOGPROBS])])
def test_logprobs_are_forwarded_if_asked_for(logprobs: int | None, expected: list[TokenLogprobs] | None):
    scheduler = start(make_request("a", 3, logprobs=logprobs))
    assert give(scheduler, 5).new_logprobs == expected


def test_a_chunk_that_does_not_sample_gives_no_output():
    scheduler = start(make_request("a", 10), max_num_batched_tokens=8)
    plan = scheduler.plan()
    assert plan is not None
    assert all_outputs(*scheduler.commit(plan, StepResult([5], [None], [[]]))) == []
    assert give(scheduler, 5).new_token_ids == [5]


def test_rows_of_a_request_that_ended_are_dropped():
    scheduler = start(make_request("a", 3, eos=EOS))
    first = scheduler.plan()
    assert first is not None
    second = scheduler.plan()
    assert second is not None
    assert all_outputs(*scheduler.commit(first, StepResult([EOS], [None], [[]])))[0].finish_reason == "stop"
    scheduler.add_request(make_request("a", 3))  # the same id again, while the old row is in flight
    assert all_outputs(*scheduler.commit(second, StepResult([5], [None], [[]]))) == []
    assert give(scheduler, 7).new_token_ids == [7]


def test_steps_are_committed_in_order_and_once():
    scheduler = start(make_request("a", 3))
    first = scheduler.plan()
    assert first is not None
    second = scheduler.plan()
    assert second is not None
    result = StepResult([5], [None], [[]])
    with pytest.raises(ValueError, match="not the oldest"):
        scheduler.commit(second, result)
    scheduler.commit(first, result)
    with pytest.raises(ValueError, match="not the oldest"):
        scheduler.commit(first, result)


def test_a_result_of_the_wrong_length_is_refused():
    scheduler = start(make_request("a", 3))
    plan = scheduler.plan()
    assert plan is not None
    with pytest.raises(ValueError, match="zip"):
        scheduler.commit(plan, StepResult([5, 6], [None, None], [[], []]))


def test_times_and_counts():
    before = time.monotonic()
    scheduler = start(make_request("a", 6))
    first, second = give(scheduler, 5), give(scheduler, 5)
    assert before <= first.queued_ts <= first.scheduled_ts <= time.monotonic()
    assert (second.queued_ts, second.scheduled_ts) == (first.queued_ts, first.scheduled_ts)
    stats = scheduler.stats()
    assert (stats.num_steps, stats.num_scheduled_tokens, stats.num_blocks, stats.num_blocks_in_use) == (2, 7, 129, 2)
    assert scheduler.has_unfinished_requests()


@pytest.mark.parametrize("num_tokens", [0, 65])
def test_prompts_that_cannot_run_are_refused(num_tokens: int):
    scheduler = Scheduler(make_config())
    with pytest.raises(ValueError, match="max_model_len=64"):
        scheduler.add_request(make_request("a", num_tokens))
    assert not scheduler.has_unfinished_requests()


def test_an_id_in_use_is_refused():
    scheduler = start(make_request("a", 3))
    with pytest.raises(ValueError, match="'a' is in use"):
        scheduler.add_request(make_request("a", 3))


def test_a_repetition_ends_a_request_unless_min_tokens_holds_it():
    detection = RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=3)
    for min_tokens, num_tokens in ((0, 3), (5, 5)):
        scheduler = start(make_request("a", 3, max_tokens=9, min_tokens=min_tokens, repetition_detection=detection))
        outputs = [give(scheduler, 5)]
        while outputs[-1].finish_reason is None:
            outputs.append(give(scheduler, 5))
        assert len(outputs) == num_tokens
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("repetition", "repetition_detected")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1])
def test_end_reports_the_reason_and_drops_rows_in_flight(num_steps: int, overlap: bool):
    scheduler = start(make_request("a", 3, presence_penalty=1.0))
    for _ in range(num_steps):
        give(scheduler, 5)
    plan = scheduler.plan() if overlap else None
    why = RequestError("invalid", "nothing may follow")
    (output,) = scheduler.end("a", "error", why)
    assert (output.finish_reason, output.error, output.new_token_ids) == ("error", why, [])
    assert scheduler.end("a", "stop") == []
    if plan is not None:
        assert all_outputs(*scheduler.commit(plan, StepResult([5], [None], [[]]))) == []
    scheduler.check()
    assert (scheduler.has_unfinished_requests(), scheduler.stats().num_blocks_in_use) == (False, 0)


def test_logprob_token_ids_ask_for_logprobs_too():
    scheduler = start(make_request("a", 3, logprob_token_ids=[3]))
    assert give(scheduler, 5).new_logprobs == [LOGPROBS]
