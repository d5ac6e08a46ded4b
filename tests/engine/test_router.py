"""Requests go to the replica where they cost the least, and what is counted of them is gone when they have ended."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

from jaxllm.core_messages import EngineCoreOutput, EngineCoreRequest, sequence_ids
from jaxllm.engine.client.prefix_index import PrefixIndex, prefixes
from jaxllm.engine.client.router import Router
from jaxllm.lora.request import LoRARequest
from jaxllm.sampling_params import SamplingParams
from jaxllm.steering.request import Steered

BLOCK = 16
ROOM = 10_000


def make(name: str, prompt: list[int], n: int = 1, **fields: Any) -> EngineCoreRequest:
    params = SamplingParams(n=n)
    params.skip_reading_prefix_cache = fields.pop("skips", False)
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=params,
        eos_token_id=None,
        max_tokens=8,
        seed=0,
        arrival_time=0.0,
        **fields,
    )


def router(count: int = 2, num_seats: int = 1000) -> Router:
    made = Router(BLOCK, num_seats)
    for replica in range(count):
        made.add(replica, ROOM)
    return made


def finish(made: Router, request: EngineCoreRequest) -> None:
    for name in sequence_ids(request):
        made.on_output(EngineCoreOutput(request_id=name, new_token_ids=[1, 2], finish_reason=None))
        made.on_output(EngineCoreOutput(request_id=name, new_token_ids=[3], finish_reason="length"))


def test_prefixes_are_of_whole_blocks_and_few() -> None:
    kept = prefixes(make("a", list(range(100_000))), BLOCK)
    blocks = [each.num_tokens // BLOCK for each in kept]
    assert blocks[:10] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert len(kept) < 30
    assert all(after <= 1.5 * before for before, after in pairwise(blocks[1:]))
    assert not prefixes(make("a", list(range(BLOCK - 1))), BLOCK)


def test_what_the_cache_tells_apart_has_other_prefixes() -> None:
    prompt = list(range(64))
    adapter = LoRARequest("sql", 1, "folder")
    kinds = [
        make("a", prompt),
        make("b", prompt, lora=adapter),
        make("b", prompt, steered=Steered(1, 2.0, "ab" * 32)),
        make("b", prompt, steered=Steered(1, 2.5, "ab" * 32)),
        make("c", prompt, cache_salt="x"),
        make("d", [9, *prompt[1:]]),
    ]
    keys = [{each.key for each in prefixes(kind, BLOCK)} for kind in kinds]
    assert all(len(each) == 4 for each in keys)
    assert len(set().union(*keys)) == 24
    shared = prefixes(make("e", prompt[:40] + [9] * 24), BLOCK)
    assert [each.key in keys[0] for each in shared] == [True, True, False, False]


def test_an_index_forgets_what_was_used_least_and_longer_prefixes_first() -> None:
    index, (first, second) = PrefixIndex(8 * BLOCK), [list(range(base, base + 6 * BLOCK)) for base in (0, 1000)]
    one, other = (prefixes(make("a", prompt), BLOCK) for prompt in (first, second))
    index.add(one)
    assert index.num_cached(one) == 6 * BLOCK
    index.add(other)
    assert index.num_cached(other) == 6 * BLOCK
    assert index.num_cached(one) == 2 * BLOCK
    index.clear()
    assert index.num_cached(other) == 0


def test_requests_go_where_the_fewest_tokens_are() -> None:
    made, placed = router(3), [0, 0, 0]
    rng = random.Random(0)
    for number in range(300):
        length = rng.randint(BLOCK, 400)
        placed[made.route(make(f"{number}", [rng.randrange(10**6) for _ in range(length)]), range(3))] += length
    assert placed == [made.num_tokens(replica) for replica in range(3)]
    assert max(placed) - min(placed) <= 400


def test_a_prefix_draws_requests_until_it_saves_less_than_the_imbalance() -> None:
    made, shared = router(), list(range(20 * BLOCK))
    where = [made.route(make(f"{number}", [*shared, number]), range(2)) for number in range(4)]
    assert where[:2] == [0, 1], "the second finds 256 of its tokens where 321 wait already"
    for number, replica in enumerate(where):
        finish(made, make(f"{number}", []))
        assert replica in (0, 1)
    made.route(make("other", [7] * 100), [0])
    assert made.route(make("again", [*shared, 5]), range(2)) == 1, "both have the prefix, and 0 has more to do"
    lone = router()
    lone.route(make("first", shared), [1])
    finish(lone, make("first", []))
    # Each costs a block where it is cached, and 64 tokens elsewhere: as much as four of them.
    assert [lone.route(make(f"{number}", shared[:64]), range(2)) for number in range(6)] == [1, 1, 1, 0, 1, 0]
    assert lone.route(make("skips", shared, skips=True), range(2)) in (0, 1)


def test_a_prefix_draws_no_more_than_can_run_at_once_while_others_have_seats() -> None:
    made, shared = router(num_seats=3), list(range(100 * BLOCK))
    made.route(make("first", shared), [1])
    finish(made, make("first", []))
    where = [made.route(make(f"{number}", shared), range(2)) for number in range(8)]
    assert where[:4] == [1, 1, 1, 0]
    assert where[4:6] == [0, 0], "which has the prefix now, too"
    finish(made, make("2", []))
    assert made.route(make("again", shared), range(2)) == 1


def test_a_replica_is_needed_for_sequences_and_for_blocks_that_are_kept() -> None:
    made = router()
    made.route(make("beam", [1, 2], keeps_blocks=True), [0])
    assert [made.is_needed(replica) for replica in range(2)] == [True, False]
    made.end(["beam"])
    assert made.owner("beam") == 0, "until it is released, even if it was aborted"
    assert made.is_needed(0)
    made.release(["beam"])
    assert not made.is_needed(0)


def test_forks_go_to_their_donor_as_long_as_it_has_blocks() -> None:
    made = router()
    donor = make("donor", [1] * 50, keeps_blocks=True)
    where = made.route(donor, [1])
    finish(made, donor)
    made.route(make("busy", [2] * 500), [1])
    assert made.route(make("fork", [1] * 50, fork_of="donor"), range(2)) == where == 1
    made.release(["donor"])
    assert made.owner("donor") is None
    assert made.route(make("late", [3] * 50, fork_of="donor"), range(2)) == 0


def test_nothing_is_left_of_what_has_ended() -> None:
    made = router()
    requests = [make(f"{number}", [number] * 30, n=1 + number % 3, keeps_blocks=number % 2 == 0) for number in range(8)]
    for request in requests:
        made.route(request, range(2))
    finish(made, requests[0])
    made.end(["1", "1#1", "unknown"])
    parts = made.split([name for request in requests[2:] for name in sequence_ids(request)] + ["unknown"])
    assert sorted(parts) == [0, 1]
    lost = made.lose(0)
    assert lost
    assert made.num_tokens(0) == 0
    assert not made.sequences(0)
    made.end(made.sequences(1))
    assert made.num_tokens(1) == 0
    made.release([request.request_id for request in requests])
    assert [made.owner(request.request_id) for request in requests] == [None] * 8
