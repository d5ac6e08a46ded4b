"""Requests hold the rows of their pictures for as long as they need them, and none waits for ever."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from jaxllm.core_messages import MediaSpan, PromptMedia, RequestError
from jaxllm.exceptions import VLLMValidationError
from jaxllm.scheduling import media as media_module
from jaxllm.scheduling.config import GroupConfig
from jaxllm.scheduling.media import MediaCache, agreeing_length, block_media, span_end
from tests.scheduling.pictures import Picture, exchanged, make_prompt
from tests.scheduling.simulation import Simulation, make_config, make_request

A, B, C = Picture("a", (4,)), Picture("b", (2, 2)), Picture("c", (6,))


def media_of(*parts: list[int] | Picture) -> PromptMedia:
    return make_prompt(parts)[1]


def request(request_id: str, *parts: list[int] | Picture, **settings: Any):
    prompt, media = make_prompt(parts)
    return make_request(request_id, prompt, media=media, **settings)


def step(cache: MediaCache, request_id: str, media: PromptMedia, start: int, num_tokens: int) -> dict[bytes, list[int]]:
    """Plan a step of one chunk, as long as `limit` allows; return the rows that it encodes."""
    cache.begin_step(100)
    assert cache.limit(request_id, media, start, num_tokens) == num_tokens
    cache.take(request_id, media, start, num_tokens)
    encodes = cache.end_step()
    cache.check({request_id, *cache._held})
    return {encode.item.key: list(encode.rows) for encode in encodes}


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_a_chunk_ends_before_an_item_without_room():
    cache, media = MediaCache(7), media_of([1, 1], A, [1], B)
    cache.begin_step(100)
    assert cache.limit("x", media, 0, 12) == 7
    assert cache.limit("y", media, 7, 5) == 0  # nothing else is taken in this step
    cache.begin_step(100)
    assert cache.limit("x", media, 0, 5) == 5
    assert cache.limit("x", media, 7, 5) == 5


def test_the_first_item_of_a_step_may_be_larger_than_what_a_step_encodes():
    cache, media = MediaCache(20), media_of(A, B)
    cache.begin_step(3)
    assert cache.limit("x", media, 0, 9) == 4
    cache.take("x", media, 0, 4)
    assert cache.limit("y", media_of(C), 0, 6) == 0
    assert cache.limit("y", media, 0, 9) == 4  # what is cached costs nothing
    cache.begin_step(8)
    assert cache.limit("z", media_of(C, B), 0, 11) == 6


def test_a_span_that_sees_both_sides_is_not_cut():
    cache, media = MediaCache(20, sees_both_sides=True), media_of([1, 1], A, B)
    cache.begin_step(100)
    assert [cache.limit("x", media, 0, num_tokens) for num_tokens in (1, 2, 5, 6, 10, 11)] == [1, 2, 2, 6, 9, 11]
    assert cache.limit("x", media, 4, 1) == 0
    assert cache.limit("x", media, 9, 1) == 0
    assert (span_end(media, 5), span_end(media, 8), span_end(media, 9)) == (6, 8, 11)
    cache.take("x", media, 4, 3 + 4)
    chunk = cache.chunk(media, 4, 7, 11)
    assert chunk.ends == array("i", [6, 6, 8, 8, 9, 11, 11])
    assert chunk.rows is not None
    assert [row < 0 for row in chunk.rows] == [False, False, False, False, True, False, False]


def test_rows_are_held_until_the_step_is_planned_and_then_only_in_the_middle_of_an_item():
    cache, media = MediaCache(8), media_of(A, [1], B)
    assert step(cache, "x", media, 0, 3).keys() == {b"a"}
    assert not cache.forget_all()
    assert step(cache, "x", media, 3, 2) == {}
    assert cache._held["x"] == {}
    assert step(cache, "x", media, 5, 1).keys() == {b"b"}
    assert cache.release("x")
    assert not cache.release("x")
    assert step(cache, "y", media, 0, 10) == {}
    assert cache.forget_all()
    assert step(cache, "y", media, 0, 10).keys() == {b"a", b"b"}


def test_the_least_recently_held_go_first():
    cache = MediaCache(12)
    for picture in (A, B, Picture("d"), A):
        step(cache, "x", media_of(picture), 0, picture.num_tokens)
    step(cache, "x", media_of(Picture("e")), 0, 4)
    assert cache._entries.keys() == {b"a", b"d", b"e"}


def test_what_a_chunk_finds_makes_no_room_for_what_it_encodes():
    cache = MediaCache(8)
    step(cache, "x", media_of(A), 0, 4)
    step(cache, "x", media_of(Picture("d")), 0, 4)
    both = media_of(B, A)
    assert step(cache, "y", both, 0, 9).keys() == {b"b"}
    assert cache._entries.keys() == {b"a", b"b"}
    cache.begin_step(100)
    assert cache.limit("y", media_of(C, A), 0, 10) == 6  # a is cached, and has no room beside c


def test_an_item_twice_in_a_prompt_takes_its_rows_once():
    cache, media = MediaCache(4), media_of(A, [1], A)
    assert step(cache, "x", media, 0, 9).keys() == {b"a"}
    rows = cache.chunk(media, 0, 9, 9).rows
    assert rows is not None
    assert rows[:4] == rows[5:]


def test_block_hashes_depend_on_pictures_and_their_positions():
    parts = ([1, 2, 3], B, [4])
    prompt, media = make_prompt(parts, has_rope=True)
    assert len(prompt) == 9
    assert block_media(media, 0, 3) == b""
    assert block_media(media, 8, 12) not in (b"", block_media(make_prompt([*parts, A], has_rope=True)[1], 8, 12))
    blocks = [block_media(media, start, start + 2) for start in (2, 4, 6)]
    assert len({b"", *blocks}) == 4
    others = [
        make_prompt(parts)[1],
        make_prompt(([1, 2, 3], Picture("b", (2, 2), stretch=2), [4]), has_rope=True)[1],
        exchanged(media),
    ]
    for other in others:
        assert other is not None
        assert block_media(other, 6, 8) != blocks[2]
        assert agreeing_length(media, other, 9) == agreeing_length(other, media, 9) == 3
    assert agreeing_length(media, None, 9) == 3
    assert agreeing_length(None, None, 9) == 9
    assert agreeing_length(media, make_prompt([*parts, A], has_rope=True)[1], 9) == 9
    assert [span_end(media, position) for position in (2, 3, 5, 7, 8)] == [2, 5, 5, 8, 8]


# -- what cannot run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "settings", "parameter", "match"),
    [
        ({"num_media_rows": 5}, {}, "multi_modal_data", "takes 6 tokens.* at most 5 at once"),
        ({"num_media_rows": 0}, {}, "multi_modal_data", "takes 6 tokens.* at most 0 at once"),
        (
            {"num_media_rows": 9, "whole_tasks": frozenset(["embed"])},
            {"task": "embed"},
            "multi_modal_data",
            "pooled whole take 10 tokens.* at most 9 at once",
        ),
        (
            {"num_media_rows": 9, "sees_both_sides": True, "max_num_batched_tokens": 5},
            {},
            "multi_modal_data",
            "takes 6 tokens, which attend to each other.* at most 5 .*raise max_num_batched_tokens",
        ),
        (
            {"num_media_rows": 9, "sees_both_sides": True, "long_prefill_token_threshold": 5},
            {},
            "multi_modal_data",
            "at most 5 of one request",
        ),
        (
            {"num_media_rows": 9, "sees_both_sides": True, "max_num_seqs": 2, "max_rows": 6},
            {"prompt_logprobs": 1},
            "prompt_logprobs",
            "need 7 rows of logits .*has 6",
        ),
    ],
)
def test_pictures_that_no_step_can_compute_are_refused(changes: dict, settings: dict, parameter: str, match: str):
    simulation = Simulation(make_config(**changes))
    with pytest.raises(VLLMValidationError, match=match) as raised:
        simulation.add(request("x", [1], A, C, [2, 3], **settings))
    assert raised.value.parameter == parameter
    assert not simulation.scheduler.has_unfinished_requests()


def test_images_that_see_both_sides_are_not_cut_by_attention():
    with pytest.raises(ValueError, match="sees_both_sides needs layers without chunked attention"):
        make_config(sees_both_sides=True, others=[GroupConfig(num_blocks=9, attention_chunk=8)])


# -- requests with pictures --------------------------------------------------------------------------------------------


def hits(simulation: Simulation, request_id: str, *parts: list[int] | Picture, **settings: Any) -> int:
    """Run a request and return how many of its tokens the prefix cache had."""
    before = simulation.scheduler.stats().prefix_cache_hits
    simulation.add(request(request_id, *parts, **settings))
    simulation.run()
    return simulation.scheduler.stats().prefix_cache_hits - before


def test_only_prompts_with_the_same_pictures_share_blocks():
    simulation, text = Simulation(make_config(num_media_rows=8)), [5, 6, 7, 8]
    assert hits(simulation, "first", text, A, text, [9]) == 0
    assert hits(simulation, "same", text, A, text, [9]) == 12
    assert hits(simulation, "other", text, Picture("other"), text, [9]) == 4
    assert hits(simulation, "text", text, [48] * 4, text, [9]) == 4
    assert simulation.num_encodes == 2


def test_a_hit_may_begin_within_a_picture():
    simulation = Simulation(make_config(num_media_rows=8))
    parts = [5, 6], C
    assert hits(simulation, "first", *parts) == 0
    assert simulation.scheduler.media.forget_all()
    assert hits(simulation, "same", *parts) == 4
    assert simulation.num_encodes == 2


@pytest.mark.parametrize("has_ended", [False, True])
def test_forks_share_blocks_up_to_the_first_other_picture(has_ended: bool):
    simulation = Simulation(make_config(num_media_rows=16, enable_prefix_caching=False))
    donor = request("donor", [5, 6, 7, 8, 9], A, [1, 2, 3], keeps_blocks=True, max_tokens=9)
    simulation.add(donor)
    for _ in range(9 if has_ended else 1):
        simulation.step()
    for request_id, media, start in (
        ("same", donor.media, 11),
        ("other", exchanged(donor.media), 5),
        ("none", None, 5),
    ):
        simulation.add(msgspec.structs.replace(donor, request_id=request_id, fork_of="donor", media=media))
        plan = simulation.plan()
        assert plan is not None
        assert {chunk.request_id: chunk.start for chunk in plan.chunks}[request_id] == start
        simulation.commit()
    simulation.run()


def test_a_prompts_last_token_in_a_picture_waits_for_rows_too():
    config = make_config(num_media_rows=4, max_num_batched_tokens=5, long_prefill_token_threshold=4)
    simulation = Simulation(config)
    simulation.add(request("dot", [5, 6, 7, 8], Picture("dot", (1,))))
    simulation.add(request("a", A, [1]))
    chunks = []
    for _ in range(3):
        plan = simulation.plan()
        assert plan is not None
        chunks.append({chunk.request_id: len(chunk.token_ids) for chunk in plan.chunks})
        simulation.check()
        simulation.commit()
    assert chunks == [{"dot": 4, "a": 1}, {"a": 4}, {"dot": 1, "a": 1}]
    simulation.run()


def test_requests_do_not_wait_for_each_others_rows_and_blocks():
    """One has the blocks that the other lacks, which holds the rows that the first one waits for."""
    simulation = Simulation(
        make_config(
            num_blocks=5,
            max_model_len=16,
            num_media_rows=4,
            max_num_batched_tokens=8,
            long_prefill_token_threshold=4,
        )
    )
    simulation.add(request("first", [1] * 8, A, [1]))
    simulation.add(request("second", [2] * 7, Picture("b"), max_tokens=1))
    for _ in range(2):
        simulation.step()
    assert simulation.scheduler.media._held["second"]
    plan = simulation.plan()
    assert plan is not None
    assert [chunk.request_id for chunk in plan.chunks] == ["first"]
    simulation.run()


def test_what_is_pooled_whole_waits_for_rows():
    config = make_config(num_media_rows=10, long_prefill_token_threshold=4, whole_tasks=frozenset(["embed"]))
    simulation = Simulation(config)
    simulation.add(request("large", Picture("large", (10,)), [1]))
    simulation.add(request("pooled", A, [1], B, task="embed"))
    simulation.step()
    assert simulation.scheduler.media._held["large"]
    simulation.run()


def test_small_pictures_do_not_keep_a_large_one_out():
    simulation = Simulation(make_config(num_media_rows=12, long_prefill_token_threshold=2))
    simulation.add(request("large", [1] * 4, Picture("large", (10,))))
    for name in ("x", "y"):
        pictures = [Picture(f"{name} {i}", (3,)) for i in range(19)]
        simulation.add(request(name, [1] * (name == "y"), *pictures))
    num_steps = 0
    while not simulation.seen["large"].token_ids:
        simulation.step()
        num_steps += 1
    assert num_steps < 14
    assert not simulation.seen["x"].token_ids
    simulation.run()


def test_an_image_that_sees_both_sides_takes_what_is_kept_back_for_those_behind():
    simulation = Simulation(make_config(num_media_rows=6, max_num_batched_tokens=6, sees_both_sides=True))
    simulation.add(request("image", [1] * 5, C))
    for i in range(4):
        simulation.add(make_request(str(i), 1, max_tokens=60))
    simulation.step()
    plan = simulation.plan()
    assert plan is not None
    assert [(chunk.request_id, len(chunk.token_ids)) for chunk in plan.chunks] == [("image", 6)]
    simulation.run()


def test_a_failed_step_leaves_no_rows_behind():
    simulation = Simulation(make_config(num_media_rows=8, max_num_batched_tokens=6))
    simulation.add(request("x", [1, 2, 3], A, B))
    simulation.plan()
    assert simulation.scheduler.media._held["x"]
    simulation.abandon(RequestError("invalid", "why"))
    simulation.check()
    simulation.add(request("x", [1, 2, 3], A, B))
    simulation.run()
    assert simulation.num_encodes == 3


def test_a_look_at_a_few_tokens_does_not_look_at_all_pictures(monkeypatch: pytest.MonkeyPatch):
    num_looks, span_end = [0], media_module._span_end

    def counting(span: MediaSpan) -> int:
        num_looks[0] += 1
        return span_end(span)

    media = media_of(*[A] * 1000, Picture("tall", (2,) * 1000))
    monkeypatch.setattr(media_module, "_span_end", counting)
    for start in (2000, 5000):
        assert block_media(media, start, start + 4)
    assert num_looks[0] < 100
