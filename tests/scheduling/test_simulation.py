"""The tokens of whole workloads equal the sequential result, whatever the scheduler had to do."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from jaxllm.core_messages import EngineCoreRequest
from jaxllm.scheduling.config import GroupConfig
from tests.scheduling.pictures import PICTURES, Picture, exchanged, make_prompt, prefix
from tests.scheduling.simulation import EOS, Simulation, make_config, make_request

pytestmark = pytest.mark.scheduling

TINY: dict[str, Any] = {"num_blocks": 17, "max_num_seqs": 6, "max_num_batched_tokens": 12, "max_rows": 8}
"""A pool of 16 blocks of 4 tokens: one request of 64 tokens fits, or six must fight."""
CHANGES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "tiny": TINY,
    "threshold": {**TINY, "long_prefill_token_threshold": 3},
    "budget-1": {**TINY, "max_num_batched_tokens": 1},
    "whole-prompts": {**TINY, "max_num_batched_tokens": 64, "enable_chunked_prefill": False},
    "block-1": {**TINY, "block_size": 1, "num_blocks": 65},
    "block-16": {**TINY, "block_size": 16, "num_blocks": 5},
    "alone": {**TINY, "max_num_seqs": 1},
    "aligned": {"row_alignment": 8, "max_num_batched_tokens": 28},
    "aligned-whole": {
        **TINY,
        "row_alignment": 8,
        "max_num_batched_tokens": 59,
        "enable_chunked_prefill": False,
        "max_model_len": 59,
    },
    "chunks": {**TINY, "others": [GroupConfig(num_blocks=7, attention_chunk=12)]},
    "chunks-and-windows": {
        **TINY,
        "max_num_batched_tokens": 28,
        "row_alignment": 8,
        "others": [GroupConfig(num_blocks=5, attention_chunk=16), GroupConfig(num_blocks=17, window=9)],
    },
    "states": {"num_state_slots": 33},
    "states-tiny": {**TINY, "num_state_slots": 8},
    "states-alone": {**TINY, "num_state_slots": 3, "max_num_batched_tokens": 64, "enable_chunked_prefill": False},
    "states-and-windows": {**TINY, "num_state_slots": 12, "others": [GroupConfig(num_blocks=17, window=9)]},
}


SIGHTS: dict[str, dict[str, Any]] = {
    "roomy": {"num_media_rows": 64},
    "small-cache": {"num_media_rows": 7},
    "tiny": {**TINY, "num_media_rows": 9},
    "tiny-both-sides": {**TINY, "max_rows": 9, "num_media_rows": 9, "sees_both_sides": True},
    "both-sides": {"num_media_rows": 16, "sees_both_sides": True, "max_num_batched_tokens": 9, "max_rows": 16},
    "budget-1": {**TINY, "max_num_batched_tokens": 1, "num_media_rows": 7},
    "whole-prompts": {
        **TINY,
        "max_num_batched_tokens": 64,
        "enable_chunked_prefill": False,
        "max_rows": 9,
        "num_media_rows": 9,
        "sees_both_sides": True,
    },
    "states": {**TINY, "max_rows": 9, "num_state_slots": 8, "num_media_rows": 9, "sees_both_sides": True},
    "windows": {**TINY, "num_media_rows": 9, "others": [GroupConfig(num_blocks=17, window=9)], "row_alignment": 4},
}


def with_pictures(requests: list[EngineCoreRequest], seed: int) -> list[EngineCoreRequest]:
    """Return requests, most with pictures among their first tokens; forks have their donors' or others."""
    rng, changed = random.Random(seed), dict[str, EngineCoreRequest]()
    has_rope = rng.random() < 0.5
    for request in requests:
        media, prompt = None, request.prompt_token_ids
        if request.fork_of is not None:
            donor = changed[request.fork_of]
            media, num_shared = prefix(donor.media, rng.choice([len(donor.prompt_token_ids), len(prompt) - 1]))
            prompt = [*donor.prompt_token_ids[:num_shared], *prompt[-1:]]
            media = exchanged(media) if rng.random() < 0.2 else media
        elif rng.random() < 0.7:
            parts: list[list[int] | Picture] = []
            while prompt and len(parts) < 8:
                length = rng.randrange(9)
                parts += [prompt[:length], rng.choice(PICTURES)]
                prompt = prompt[length:]
            prompt, media = make_prompt([*parts, prompt][rng.randrange(2) :][: rng.randrange(1, 9)], has_rope=has_rope)
            while len(prompt) > 60 or not prompt:
                media, num_tokens = prefix(media, 60)
                prompt = prompt[:num_tokens] or [1]
        max_tokens = min(request.max_tokens, 64 - len(prompt))
        params = msgspec.structs.replace(
            request.sampling_params,
            max_tokens=max_tokens,
            min_tokens=min(request.sampling_params.min_tokens, max_tokens),
        )
        changed[request.request_id] = msgspec.structs.replace(
            request, prompt_token_ids=prompt, media=media, max_tokens=max_tokens, sampling_params=params
        )
    return list(changed.values())


def workload(seed: int, num_requests: int = 14) -> list[EngineCoreRequest]:
    """Return requests with shared prefixes, several ways to end, salts, priorities, forks and scored prompts."""
    rng = random.Random(seed)
    stems = [[rng.randrange(50) for _ in range(40)] for _ in range(3)]
    requests = []
    for i in range(num_requests):
        prompt = rng.choice(stems)[: rng.randrange(1, 40)] + [rng.randrange(50) for _ in range(rng.randrange(8))]
        max_tokens = rng.randrange(1, 65 - len(prompt))
        donor = rng.choice(requests[-4:]) if requests and rng.random() < 0.4 else None
        if donor is not None:
            common = donor.prompt_token_ids
            prompt = common if rng.random() < 0.5 else [*common[: rng.randrange(len(common) + 1)], rng.randrange(50)]
            max_tokens = rng.randrange(1, 65 - len(prompt))
        request = make_request(
            str(i),
            prompt,
            fork_of=None if donor is None else donor.request_id,
            keeps_blocks=rng.random() < 0.3,
            prompt_logprobs=1 if rng.random() < 0.2 else None,
            repetition_penalty=rng.choice([1.0, 1.5]),
            thinking_token_budget=9 if rng.random() < 0.2 else None,
            max_tokens=max_tokens,
            eos=rng.choice([EOS, None]),
            priority=rng.randrange(3),
            salt=rng.choice([None, None, "salt"]) if donor is None else donor.cache_salt,
            seed=rng.choice([0, 1, 2**64 - 1]),
            arrival_time=rng.random(),
            stop_token_ids=rng.choice([[], [3], [3, 7]]),
            min_tokens=rng.randrange(min(max_tokens, 6) + 1),
        )
        requests.append(request)
    return requests


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_tokens_equal_the_sequential_result(changes: dict, caching: bool, policy: str, overlap: int):
    for seed in range(3):
        simulation = Simulation(make_config(enable_prefix_caching=caching, policy=policy, **changes))
        simulation.run_arriving(workload(seed), seed, overlap)


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("changes", SIGHTS.values(), ids=SIGHTS)
def test_tokens_that_follow_pictures_equal_the_sequential_result(
    changes: dict, caching: bool, policy: str, overlap: int
):
    for seed in range(2):
        simulation = Simulation(make_config(enable_prefix_caching=caching, policy=policy, **changes))
        simulation.run_arriving(with_pictures(workload(seed), seed), seed, overlap)


def test_the_tiny_pool_makes_the_scheduler_work():
    """The workloads above are only worth something if they preempt, chunk and hit."""
    num_preemptions = num_hits = num_chunked = num_copies = 0
    for seed in range(3):
        simulation = Simulation(make_config(**TINY))
        for request in workload(seed):
            simulation.add(request)
        simulation.run(overlap=1)
        num_copies += simulation.num_copies
        stats = simulation.scheduler.stats()
        num_preemptions += stats.num_preemptions
        num_hits += stats.prefix_cache_hits
        num_chunked += sum(
            simulation.num_chunks[request_id] > len(truth.outputs) for request_id, truth in simulation.truths.items()
        )
    assert num_preemptions >= 10
    assert num_hits >= 50
    assert num_chunked >= 10
    assert num_copies >= 3


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_second_run_hits_everything_that_it_can(overlap: int):
    simulation = Simulation(make_config(num_blocks=1025))
    requests = [request for request in workload(0) if request.cache_salt is None and request.fork_of is None]
    num_hits = []
    for turn in range(2):
        for request in requests:
            simulation.add(make_request(f"{turn} {request.request_id}", request.prompt_token_ids, max_tokens=2))
        simulation.run(overlap)
        num_hits.append(simulation.scheduler.stats().prefix_cache_hits)
    possible = sum((len(request.prompt_token_ids) - 1) // 4 * 4 for request in requests)
    assert num_hits[1] - num_hits[0] == possible > 0


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_first_in_line_is_never_held_up(policy: str, overlap: int):
    """Even with the smallest pool and many rivals, the first request needs at most two steps a token."""
    simulation = Simulation(make_config(policy=policy, num_blocks=17, max_num_seqs=8, max_num_batched_tokens=16))
    for i in range(8):
        simulation.add(make_request(str(i), 8, max_tokens=56, priority=i))
    num_steps = 0
    while simulation.seen["0"].finish_reason is None:
        simulation.step(overlap)
        num_steps += 1
    assert num_steps <= 2 * 57
    assert simulation.scheduler.stats().num_preemptions > 0
    simulation.run(overlap)
