"""What a tier has is fetched where past fetches and steps say that this is sooner than to compute it."""

from __future__ import annotations

from collections import Counter

import pytest

from jaxllm.scheduling.cache.fetch_times import FetchTimes, Part, PartTime
from jaxllm.scheduling.prompts.step_times import StepTimes
from tests.scheduling.simulation import Simulation, make_config, make_request

pytestmark = pytest.mark.scheduling

MOST_TOKENS = 64
TOKEN_SECONDS = 0.001
FROM_HOST, FROM_FILES = Part(0, reads_files=False), Part(0, reads_files=True)


def steps_at(token_seconds: float) -> StepTimes:
    times = StepTimes()
    for num_tokens in (1, 8, 16, 32, 48, MOST_TOKENS):
        times.record(num_tokens, num_tokens * token_seconds)
    return times


def make_times(host: float, files: float = 0.0) -> FetchTimes:
    """Return times of steps of a millisecond for each token, and of fetches of ten blocks by a block's seconds."""
    times = FetchTimes(steps_at(TOKEN_SECONDS), MOST_TOKENS)
    times.record([PartTime(FROM_FILES, 10, 10 * files), PartTime(FROM_HOST, 10, 10 * host)])
    return times


@pytest.mark.parametrize(
    ("host", "files", "num_tokens", "num_left", "pays"),
    [
        # Ten blocks of four tokens take 40 milliseconds to compute.
        (0.0039, 0.0, 40, 8, True),
        (0.0041, 0.0, 40, 8, False),
        # Both parts of a fetch count.
        (0.0020, 0.0019, 40, 8, True),
        (0.0020, 0.0021, 40, 8, False),
        # Steps beyond the first count.
        (0.0639, 0.0, 640, 8, True),
        (0.0641, 0.0, 640, 8, False),
        (0.0250, 0.0, 256, 60, True),
        (0.0260, 0.0, 256, 60, False),
    ],
)
def test_the_sooner_way_is_taken(host: float, files: float, num_tokens: int, num_left: int, *, pays: bool) -> None:
    times = make_times(host, files)
    assert times.pays(Counter({FROM_HOST: 10, FROM_FILES: 10}), num_tokens, num_left) is pays


def test_what_was_never_measured_is_tried() -> None:
    times = FetchTimes(StepTimes(), MOST_TOKENS)
    times.record([PartTime(FROM_HOST, 10, 10.0)])
    assert times.pays({FROM_HOST: 10}, 40, 8), "no step has run"
    times = make_times(host=1.0)
    assert not times.pays({FROM_HOST: 10}, 40, 8)
    assert times.pays({FROM_HOST: 10, Part(1, reads_files=False): 10}, 40, 8), "a holder was never fetched"


def test_a_slow_tier_is_tried_again_and_may_be_fast_by_then() -> None:
    times = make_times(host=1.0)
    for _ in range(2):
        assert [times.pays({FROM_HOST: 10}, 40, 8) for _ in range(65)] == [False] * 64 + [True]
        times.record([PartTime(FROM_HOST, 10, 10.0)])
    assert [times.pays({FROM_HOST: 10}, 40, 8) for _ in range(65)][-1]
    times.record([PartTime(FROM_HOST, 10, 0.01)])
    assert times.pays({FROM_HOST: 10}, 40, 8)
    assert times.num_refused == 3 * 64


def test_all_are_made_where_none_may_be_refused() -> None:
    times = make_times(host=1.0)
    times.most_refused = 0
    assert times.pays({FROM_HOST: 10}, 40, 8)


def simulate(
    host_seconds: float, num_host_blocks: int = 200, *, num_blocks: int = 16, max_num_seqs: int = 3
) -> Simulation:
    """Return a simulation whose device has room for few blocks, and whose host never fails and writes all to files."""
    config = make_config(
        num_blocks=1 + num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        num_host_blocks=(num_host_blocks,),
        root_hash=bytes(32),
    )
    simulation = Simulation(config)
    simulation.host.fails, simulation.host.writes, simulation.host.block_seconds = 0.0, 1.0, (host_seconds,)
    return simulation


@pytest.mark.parametrize(("host_seconds", "is_sooner"), [(1e-6, True), (10.0, False)])
def test_a_preempted_request_gets_its_evicted_blocks_back_if_that_is_sooner(
    host_seconds: float, *, is_sooner: bool
) -> None:
    simulation = simulate(host_seconds)
    for number in range(40):  # no two begin alike: what comes back was a preempted request's
        simulation.add(make_request(f"r{number}", 20, max_tokens=30, arrival=number))
    simulation.run()  # it compares all outputs with those of computing
    stats, times = simulation.scheduler.stats(), simulation.scheduler.fetch_times
    assert stats.num_preemptions > 10
    if is_sooner:
        assert simulation.host.num_loads > 3 * stats.num_preemptions
        assert times.num_refused == 0
    else:
        assert 0 < simulation.host.num_loads < stats.num_preemptions
        assert times.num_refused > stats.num_preemptions // 2


@pytest.mark.parametrize(
    ("num_host_blocks", "file_seconds", "num_from_files"), [(12, 1e-6, 3), (12, 10.0, 0), (8, 1e-6, 0)]
)
def test_without_slow_files_or_room_for_them_the_host_gives_what_it_has(
    num_host_blocks: int, file_seconds: float, num_from_files: int
) -> None:
    simulation = simulate(1e-6, num_host_blocks)
    prompt, host = list(range(10, 50)), simulation.host
    # The others take all ten blocks of the prompt, and then as many slots that the host has the last four no more.
    others = [62, 26 if num_host_blocks == 12 else 10]
    for name, tokens in (("first", prompt), ("second", others[0]), ("third", others[1]), ("again", prompt)):
        for _ in range(2):
            simulation.scheduler.fetch_times.record([PartTime(FROM_HOST, 1, 1e-6)])
            simulation.scheduler.fetch_times.record([PartTime(FROM_FILES, 1, file_seconds)])
        simulation.add(make_request(name, tokens, max_tokens=1))
        while simulation.scheduler.has_unfinished_requests():
            simulation.step()
            simulation._end_moves(all_of_them=True)
    assert (host.num_loads, host.num_from_files) == (6 + num_from_files, num_from_files)


@pytest.mark.parametrize(("num_blocks", "num_tokens"), [(25, 40), (17, 50)])
def test_a_request_in_line_keeps_what_was_fetched_for_it(num_blocks: int, num_tokens: int) -> None:
    """The devices have blocks for two requests, or for one: the others in line must not take them in turns."""
    simulation = simulate(1e-6, num_blocks=num_blocks, max_num_seqs=4)
    num_before = 0
    for round_number in range(3):
        num_before = simulation.host.num_fetches
        for number in range(12):
            prompt = [number + 1] * num_tokens
            simulation.add(make_request(f"{round_number} {number}", prompt, max_tokens=6, arrival=number))
        simulation.run()
    assert simulation.host.num_loads > 0
    assert simulation.host.num_fetches - num_before <= 12
    assert simulation.host.num_given_up == 0
