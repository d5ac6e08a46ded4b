"""Times of steps are learned from those that ran."""

from __future__ import annotations

import random

from jaxllm.scheduling.prompts.step_times import StepTimes, round_size


def test_sizes_are_close_and_few():
    assert [round_size(n) for n in (1, 5, 8, 9, 16, 17, 33, 40, 41, 64, 512)] == [
        1,
        5,
        8,
        10,
        16,
        20,
        40,
        40,
        48,
        64,
        512,
    ]
    assert all(n <= round_size(n) <= 1.25 * n for n in range(1, 5000))
    assert len({round_size(n) for n in range(1, 8193)}) < 50


def test_what_was_not_measured_is_bounded_by_what_was():
    times = StepTimes()
    assert times.seconds(8) is None
    assert times.least_seconds(8) == 0
    times.record(64, 2.0)
    assert (times.seconds(64), times.seconds(32), times.seconds(128)) == (2.0, 2.0, 4.0)
    assert (times.least_seconds(32), times.least_seconds(128)) == (1.0, 2.0)
    times.record(16, 1.0)
    assert (times.seconds(16), times.seconds(24), times.seconds(56)) == (1.0, 1.5, 2.0)
    assert times.most_tokens(1.6, 16, 512) == 24
    assert times.most_tokens(0.5, 20, 512) == 20
    assert times.most_tokens(99.0, 20, 500) == 500


def test_one_slow_step_changes_nothing():
    times = StepTimes()
    for seconds in (1.0, 1.1, 60.0, 0.9):
        times.record(32, seconds)
    assert times.seconds(32) == 1.0


def test_one_slow_step_of_a_new_size_changes_nothing():
    times = StepTimes()
    for num_tokens in (8, 64, 128, 512):
        times.record(num_tokens, num_tokens / 1000)
    times.record(40, 2.0)
    assert (times.seconds(40), times.seconds(128)) == (0.04, 0.128)
    assert times.most_tokens(0.07, 16, 512) == 64
    times.record(40, 2.0)
    assert times.seconds(40) == 2.0
    times.record(48, 0.05)
    assert times.seconds(40) == 0.05


def test_a_slow_second_step_of_a_size_changes_nothing():
    times = StepTimes()
    times.record(32, 1.0)
    times.record(32, 60.0)
    assert times.seconds(32) == 1.0


def test_newer_measurements_of_other_sizes_count():
    times = StepTimes()
    times.record(64, 2.0)
    times.record(32, 3.0)
    assert times.seconds(64) == 3.0  # contexts are longer now
    times.record(128, 2.5)
    assert times.seconds(32) == 2.5


def test_a_much_faster_step_forgets_larger_ones():
    times = StepTimes()
    for num_tokens, seconds in ((16, 1.0), (32, 3.0), (48, 4.0), (32, 1.5)):
        times.record(num_tokens, seconds)
    assert (times.seconds(16), times.seconds(32), times.seconds(48)) == (1.0, 1.5, 2.25)


def test_old_measurements_are_forgotten_except_as_a_bound():
    times = StepTimes()
    times.record(16, 1.0)
    for _ in range(256):
        times.record(64, 1.5)
    assert times.seconds(16) == 1.5
    assert times.least_seconds(16) == 1.0


def test_chunks_follow_a_prompt_into_its_depth_and_back():
    times, source, depth, late = StepTimes(), random.Random(3), 0, []
    for _ in range(600):
        num_tokens = times.most_tokens(0.15, 24, 512)
        seconds = (0.06 + (num_tokens - 16) * 0.0024 * (1 + depth / 2000)) * source.choice([0.97, 1.0, 1.05])
        times.record(num_tokens, seconds)
        late.append(seconds > 0.19)
        depth = depth + num_tokens - 16 if depth < 6000 else 0
    assert sum(late) <= 6


def test_what_a_token_more_adds():
    times = StepTimes()
    times.record(4, 2.0)
    assert times.share_of_token(4, 20) is None, "nothing larger is measured"
    times.record(40, 9.0)
    assert times.share_of_token(4, 20) is None, "nothing larger of that size"
    times.record(12, 3.0)
    assert times.share_of_token(4, 20) == 0.5 / 8
    assert times.share_of_token(5, 20) is None, "it is not measured"
    for _ in range(256):
        times.record(4, 2.0)
    assert times.share_of_token(4, 20) is None, "what was measured long ago is forgotten"
