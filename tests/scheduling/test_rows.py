"""Plans have the right rows of logits, scored prompts and token counts, and requests wait for their last token."""

from __future__ import annotations

import pytest

from jaxllm.scheduling.request import waits_for_last_token
from tests.scheduling.simulation import Simulation, make_config, make_request
from tests.scheduling.test_forks import shape


def scored(plan) -> list[tuple[str, int, int]]:
    """List (request, first scored position, count) of the rows that score."""
    return [(chunk.request_id, chunk.score_start, len(chunk.scored_ids)) for chunk in plan.chunks if chunk.scored_ids]


# -- scored prompts ----------------------------------------------------------------------------------------------------


def test_chunks_of_a_scored_prompt_are_cut_to_the_rows():
    simulation = Simulation(make_config(max_num_seqs=2, max_rows=6))
    simulation.add(make_request("a", 12, prompt_logprobs=0, max_tokens=2))
    shapes, rows = [], []
    for _ in range(3):
        plan = simulation.plan()
        assert plan is not None
        shapes += shape(plan)
        rows += scored(plan)
        simulation.commit()
    assert shapes == [("a", 0, 5), ("a", 5, 5), ("a", 10, 2)]
    assert rows == [("a", 1, 5), ("a", 6, 5), ("a", 11, 1)], "the last token predicts an output"
    simulation.run()


def test_every_chunk_reports_its_positions():
    simulation = Simulation(make_config(max_num_seqs=2, max_rows=6))
    simulation.add(make_request("a", 12, prompt_logprobs=0, max_tokens=2))
    reported = []
    while simulation.live:
        simulation.plan()
        reported += [(output.new_prompt_logprobs, len(output.new_token_ids)) for output in simulation.commit()]
    starts = [(scores.start, len(scores.positions), count) for scores, count in reported if scores is not None]
    assert starts == [(1, 5, 0), (6, 5, 0), (11, 1, 1)]
    assert reported[-1] == (None, 1)


def test_a_scored_prompt_keeps_a_row_for_each_request_behind():
    simulation = Simulation(make_config(max_num_seqs=3, max_rows=8, policy="priority"))
    for name in "bc":
        simulation.add(make_request(name, 1, priority=1, max_tokens=9))
    simulation.step()
    simulation.add(make_request("a", 20, prompt_logprobs=0, priority=0))
    assert shape(simulation.plan()) == [("b", 1, 1), ("c", 1, 1), ("a", 0, 5)]
    simulation.commit()
    assert shape(simulation.plan()) == [("b", 2, 1), ("c", 2, 1), ("a", 5, 5)]
    simulation.run(overlap=1)


@pytest.mark.parametrize("priority", [0, 2])
def test_one_spare_row_is_enough_to_score_a_token_a_step(priority: int):
    simulation = Simulation(make_config(max_num_seqs=3, max_rows=4, policy="priority"))
    for name in "bc":
        simulation.add(make_request(name, 1, priority=1, max_tokens=30))
    simulation.step()
    simulation.add(make_request("a", 8, prompt_logprobs=0, priority=priority, max_tokens=1))
    num_steps = 0
    while "a" in simulation.live:
        simulation.step()
        simulation.check()
        num_steps += 1
    assert num_steps == 7
    simulation.run()


def test_a_prompt_that_is_scored_late_is_read_freely_until_there():
    simulation = Simulation(make_config(max_num_seqs=2, max_rows=4))
    simulation.add(make_request("a", 20, prompt_logprob_token_ids=[[1]] * 4, prompt_logprob_start=15, max_tokens=1))
    assert shape(simulation.plan()) == [("a", 0, 18)]
    simulation.run(overlap=1)


def test_a_scored_prompt_reads_no_cache_and_has_no_donor():
    simulation = Simulation(make_config(max_rows=100))
    prompt = list(range(1, 11))
    simulation.add(make_request("a", prompt, max_tokens=1))
    simulation.run()
    simulation.add(make_request("b", prompt, prompt_logprobs=1))
    simulation.add(make_request("c", prompt, prompt_logprobs=1, fork_of="b"))
    assert shape(simulation.plan()) == [("b", 0, 10), ("c", 0, 10)]
    simulation.run(overlap=1)


def test_skip_reading_prefix_cache_holds_until_there_are_outputs():
    simulation = Simulation(make_config(max_rows=100))
    prompt = list(range(1, 11))
    simulation.add(make_request("a", prompt, max_tokens=1))
    simulation.run()
    simulation.add(make_request("b", prompt, skip_reading_prefix_cache=True, max_tokens=9))
    simulation.add(make_request("c", prompt, prompt_logprobs=1, max_tokens=9))
    assert shape(simulation.plan()) == [("b", 0, 10), ("c", 0, 10)]
    simulation.commit()
    for name in "bc":
        simulation.scheduler._preempt(simulation.scheduler._requests[name])
    plan = simulation.plan()
    assert plan is not None
    assert (shape(plan), scored(plan)) == ([("b", 8, 3), ("c", 8, 3)], [])
    simulation.run(overlap=1)


def test_a_prompt_preempted_in_its_midst_is_scored_from_the_start_again():
    simulation = Simulation(make_config(max_rows=9))
    simulation.add(make_request("a", 20, prompt_logprobs=1))
    simulation.step()
    simulation.scheduler._preempt(simulation.scheduler._requests["a"])
    plan = simulation.plan()
    assert plan is not None
    assert (shape(plan), scored(plan)) == ([("a", 0, 8)], [("a", 1, 8)])
    simulation.run(overlap=1)


def test_a_whole_prompt_may_still_be_cut_to_the_rows():
    simulation = Simulation(make_config(enable_chunked_prefill=False, max_rows=11))
    simulation.add(make_request("a", 20, prompt_logprobs=1))
    assert shape(simulation.plan()) == [("a", 0, 10)]
    simulation.run(overlap=1)


def test_scoring_needs_two_rows():
    simulation = Simulation(make_config(max_num_seqs=1))
    with pytest.raises(ValueError, match="max_rows of at least 2"):
        simulation.add(make_request("a", 3, prompt_logprobs=0))
    simulation.add(make_request("a", 3))


# -- token counts ------------------------------------------------------------------------------------------------------


def test_only_requests_with_penalties_have_token_counts():
    simulation = Simulation(make_config())
    penalties = ({}, {"presence_penalty": 1.0}, {"frequency_penalty": -1.0}, {"repetition_penalty": 1.2})
    for i, params in enumerate(penalties):
        simulation.add(make_request(str(i), 3, **params))  # pyright: ignore[reportArgumentType]
    plan = simulation.plan()
    assert plan is not None
    assert [chunk.owner.count_row for chunk in plan.chunks] == [None, 1, 2, 3]
    assert [chunk.history for chunk in plan.chunks][1:] == [chunk.token_ids for chunk in plan.chunks][1:]
    plan = simulation.plan()
    assert plan is not None
    assert [(chunk.owner.count_row, chunk.history) for chunk in plan.chunks] == [
        (None, None),
        (1, None),
        (2, None),
        (3, None),
    ]
    simulation.run(overlap=2)


def test_all_requests_have_slots_if_all_tokens_are_tracked():
    simulation = Simulation(make_config(tracks_all_tokens=True, num_blocks=17))
    for i in range(6):
        simulation.add(make_request(str(i), 12, max_tokens=40))
    simulation.run(overlap=1)
    assert simulation.scheduler.stats().num_preemptions > 0


def test_the_history_comes_once_per_admission_and_is_whole():
    simulation = Simulation(make_config(long_prefill_token_threshold=5))
    simulation.add(make_request("a", 12, presence_penalty=1.0))
    histories = []
    for step in range(8):
        if step == 4:
            simulation.scheduler._preempt(simulation.scheduler._requests["a"])
        plan = simulation.plan()
        assert plan is not None
        histories.append(None if plan.chunks[0].history is None else len(plan.chunks[0].history))
        simulation.commit()
        if not simulation.live:
            break
    assert histories[:4] == [12, None, None, None]
    assert histories[4] == 14
    assert not any(histories[5:])


def test_a_slot_is_free_again_at_the_end():
    simulation = Simulation(make_config(max_num_seqs=1))
    for i in range(3):
        simulation.add(make_request(str(i), 3, presence_penalty=1.0, max_tokens=2))
    simulation.step(overlap=1)
    simulation.abort(["0"])
    simulation.run(overlap=1)


# -- requests that wait for their last token ---------------------------------------------------------------------------


def test_which_requests_wait():
    plain = make_request("a", 3, min_tokens=2, logit_bias={1: 1.0}, allowed_token_ids=[1, 2]).sampling_params
    assert not waits_for_last_token(plain)
    plain._bad_words_token_ids = [[1], [2]]
    assert not waits_for_last_token(plain)
    plain._bad_words_token_ids = [[1], [2, 3]]
    assert waits_for_last_token(plain)
    assert waits_for_last_token(make_request("a", 3, thinking_token_budget=3).sampling_params)


def test_a_waiting_request_gets_no_row_while_its_token_is_in_flight():
    simulation = Simulation(make_config(long_prefill_token_threshold=4))
    simulation.add(make_request("a", 6, thinking_token_budget=9))
    simulation.add(make_request("b", 2))
    assert shape(simulation.plan()) == [("a", 0, 4), ("b", 0, 2)]
    assert shape(simulation.plan()) == [("b", 2, 1), ("a", 4, 2)], "no token of a is in flight before this step"
    assert shape(simulation.plan()) == [("b", 3, 1)]
    simulation.commit()
    simulation.commit()
    plan = simulation.plan()
    assert plan is not None
    assert [(c.request_id, c.previous_row) for c in plan.chunks if c.request_id == "a"] == [("a", None)]
    simulation.run(overlap=1)


@pytest.mark.parametrize(
    ("num_waiting", "num_plain", "waits"), [(0, 1, False), (1, 2, False), (1, 1, False), (2, 1, True)]
)
def test_a_commit_is_wanted_when_most_wait(num_waiting: int, num_plain: int, waits: bool):
    simulation = Simulation(make_config())
    for i in range(num_waiting):
        simulation.add(make_request(f"w{i}", 3, thinking_token_budget=9))
    for i in range(num_plain):
        simulation.add(make_request(f"p{i}", 3))
    assert not simulation.scheduler.waits_for_commit()
    simulation.plan()
    assert simulation.scheduler.waits_for_commit() == waits
    simulation.commit()
    assert not simulation.scheduler.waits_for_commit()
    simulation.run()
