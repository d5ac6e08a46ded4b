"""Requests hold their clips' blocks while they run, share them, and none waits for ever."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jaxllm.core_messages import Clip
from jaxllm.scheduling.clips import ClipCache
from tests.scheduling.simulation import Simulation, make_config, make_request


def clip(name: str, num_frames: int = 6) -> Clip:
    return Clip(key=name.encode(), mels=b"", num_frames=num_frames)


def take(cache: ClipCache, request_id: str, name: str) -> tuple[list[int], list[bytes]]:
    """Plan a step that admits a request; return its blocks, and what the step encodes."""
    cache.begin_step(100)
    assert cache.fits(clip(name))
    block_ids = list(cache.take(request_id, clip(name)))
    cache.check(cache._held)
    return block_ids, [encode.clip.key for encode in cache.end_step()]


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_a_clip_is_encoded_once_for_all_its_requests():
    cache = ClipCache(7, 3)
    first, encoded = take(cache, "x", "a")
    assert encoded == [b"a"]
    assert take(cache, "y", "a") == (first, [])
    other, encoded = take(cache, "z", "b")
    assert encoded == [b"b"]
    assert sorted(first + other) == [1, 2, 3, 4, 5, 6]
    cache.begin_step(100)
    assert cache.fits(clip("a"))
    assert not cache.fits(clip("c")), "both clips are held"
    cache.release("x")
    assert not cache.fits(clip("c"))
    cache.release("y")
    cache.release("nobody")
    assert take(cache, "x", "a") == (first, []), "an idle clip is found"
    cache.release("x")
    assert take(cache, "x", "c") == (first, [b"c"])


def test_the_least_recently_held_clip_goes_first():
    cache = ClipCache(7, 2)
    for name in ("a", "b", "c", "a"):
        take(cache, "x", name)
        cache.release("x")
    take(cache, "x", "d")
    assert cache._entries.keys() == {b"a", b"c", b"d"}


def test_a_step_encodes_as_many_frames_as_it_computes_tokens_or_one_clip():
    cache = ClipCache(99, 3)
    for num_frames, most in ((5, 1), (6, 1), (12, 2), (17, 2)):
        cache.begin_step(num_frames)
        names = iter(range(100))
        while cache.fits(clip(f"{num_frames} {(name := next(names))}")):
            cache.take(f"{num_frames} {name}", clip(f"{num_frames} {name}"))
        assert len(cache.end_step()) == most


def test_all_is_forgotten_unless_a_request_holds_a_clip():
    cache = ClipCache(7, 3)
    take(cache, "x", "a")
    assert not cache.forget_all()
    cache.release("x")
    assert cache.forget_all()
    cache.check(())
    assert take(cache, "x", "a")[1] == [b"a"]


# -- requests ----------------------------------------------------------------------------------------------------------


def test_a_config_without_room_for_a_clip_is_refused():
    with pytest.raises(ValueError, match="num_clip_blocks"):
        make_config(num_clip_blocks=3, clip_blocks=3)


def test_requests_wait_for_room_and_take_their_turns():
    run = Simulation(make_config(num_clip_blocks=7, clip_blocks=3))
    for number in range(5):
        run.add(make_request(str(number), 3, clip=clip(str(number))))
    plan = run.plan()
    assert plan is not None
    assert [chunk.request_id for chunk in plan.chunks] == ["0", "1"]
    run.run()
    assert {seen.finish_reason for seen in run.seen.values()} == {"length"}


def test_outputs_of_one_request_share_its_clip():
    run = Simulation(make_config(num_clip_blocks=4, clip_blocks=3))
    run.add(make_request("x", 9, clip=clip("a")))
    run.add(make_request("x#1", 9, clip=clip("a"), fork_of="x", seed=1))
    run.run()
    assert {seen.finish_reason for seen in run.seen.values()} == {"length"}


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_random_requests_read_their_own_clips(seed: int, overlap: int):
    """Blocks of tokens are short too, so that requests are preempted and give their clips up."""
    rng = random.Random(seed)
    num_clips = rng.randint(1, 4)
    limits: Any = {"max_num_batched_tokens": rng.choice([8, 16, 64]), "max_num_seqs": rng.choice([2, 8])}
    run = Simulation(
        make_config(num_blocks=rng.choice([18, 33]), num_clip_blocks=1 + 3 * num_clips, clip_blocks=3, **limits)
    )
    prompts = [[rng.randrange(50) for _ in range(rng.randint(1, 30))] for _ in range(3)]
    requests = [
        make_request(
            str(number),
            prompts[rng.randrange(3)][: rng.randint(1, 30)],
            clip=clip(f"clip {rng.randrange(5)}"),
            max_tokens=rng.randint(1, 25),
            priority=0,
            seed=number,
            arrival=number,
        )
        for number in range(25)
    ]
    run.run_arriving(requests, seed, overlap)
    assert {seen.finish_reason for seen in run.seen.values()} <= {"length", "stop", "abort"}
    assert run.scheduler.clips.forget_all()
