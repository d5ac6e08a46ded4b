"""Requests are refused whose first token would come too late."""

from __future__ import annotations

import asyncio
import copy

import pytest

from jaxllm.engine.online.admission import Admission, PromptSpeed, Reservation
from jaxllm.exceptions import LateFirstTokenError
from jaxllm.server.http.errors import error_headers, error_response
from tests.async_engine.support import greedy, mock_llm, read, tiny_args


class Clock:
    """A clock that stands still."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def reserve(admission: Admission, num_tokens: int) -> Reservation:
    reservation = Reservation(admission, 1)
    try:
        reservation.hold_prompt(num_tokens)
    except LateFirstTokenError:
        reservation.release()
        raise
    return reservation


def test_the_speed_of_prompts_counts_only_the_time_in_which_some_wait() -> None:
    clock = Clock()
    speed = PromptSpeed(clock)
    assert speed.seconds(100) == 0
    clock.now += 500
    speed.tick(0)
    clock.now += 2
    speed.tick(4000)
    speed.count(1000)
    assert speed.seconds(100) == pytest.approx(0.2)
    for _ in range(60):  # four times as fast from now on
        clock.now += 2
        speed.tick(4000)
        speed.count(4000)
    assert speed.seconds(100) == pytest.approx(0.05, rel=0.1)


def test_a_late_first_token_is_refused_with_the_time_to_wait() -> None:
    clock = Clock()
    admission = Admission(None, None, 3000, PromptSpeed(clock))
    first = reserve(admission, 1000)
    second = reserve(admission, 50_000)  # the speed is not known yet
    clock.now += 2
    first.release_prompt()  # 500 tokens a second
    second.release()
    waiting = reserve(admission, 9000)  # waits for nobody
    with pytest.raises(
        LateFirstTokenError, match=r"wait: the first token would come about 17\.0 seconds later"
    ) as late:
        reserve(admission, 1000)
    assert late.value.retry_after == 17
    assert admission.num_rejected["max_ttft_ms"] == 1
    assert (admission.num_reqs, admission.num_tokens) == (2, 9000)
    with pytest.raises(LateFirstTokenError):
        admission.check_room()
    clock.now += 18
    waiting.release_prompt()
    reserve(admission, 1000)
    reserve(admission, 400)
    first.release()
    waiting.release()
    assert (admission.num_reqs, admission.num_tokens) == (2, 1400)


def test_given_up_prompts_do_not_make_the_engine_look_fast() -> None:
    clock = Clock()
    admission = Admission(None, None, 3000, PromptSpeed(clock))
    given_up, first = reserve(admission, 100_000), reserve(admission, 1000)
    clock.now += 2
    given_up.release()
    first.release_prompt()
    reserve(admission, 1400)
    with pytest.raises(LateFirstTokenError):
        reserve(admission, 200)


def test_a_long_prompt_that_is_read_does_not_make_the_engine_look_slow() -> None:
    clock = Clock()
    admission = Admission(None, None, 3000, PromptSpeed(clock))
    first = reserve(admission, 1000)
    clock.now += 1
    first.release_prompt()  # 1,000 tokens a second
    reserve(admission, 100_000)
    clock.now += 60
    for _ in range(2):
        with pytest.raises(LateFirstTokenError, match="about 98"):
            reserve(admission, 1000)
    clock.now += 60
    with pytest.raises(LateFirstTokenError, match="about 118"):
        reserve(admission, 1000)


@pytest.mark.parametrize("short_prompts_pass", [True, False])
def test_a_prompt_waits_only_for_those_that_it_does_not_pass(short_prompts_pass: bool) -> None:
    clock = Clock()
    admission = Admission(None, None, 2000, PromptSpeed(clock), short_prompts_pass=short_prompts_pass)
    first = reserve(admission, 1000)
    clock.now += 1
    first.release_prompt()
    long = reserve(admission, 8000)
    if not short_prompts_pass:
        with pytest.raises(LateFirstTokenError):
            reserve(admission, 30)
        return
    shorts = [reserve(admission, 300) for _ in range(5)]  # a quarter of each step is the long one's
    with pytest.raises(LateFirstTokenError, match=r"about 0\.4 seconds"):
        reserve(admission, 300)
    reserve(admission, 200)
    for short in shorts[:2]:
        short.release()
    reserve(admission, 300).release()
    long.release()
    for short in shorts:
        short.release()
    reserve(admission, 1800)


def test_clients_are_told_when_to_try_again() -> None:
    response = error_response(copy.copy(LateFirstTokenError("late", 7)))  # as from another process
    assert (response.error.code, response.error.message, response.error.retry_after) == (503, "late", 7)
    assert error_headers(response) == [(b"retry-after", b"7")]


def test_an_engine_refuses_by_the_speed_that_it_has_shown(tokenizer: str) -> None:
    async def run() -> None:
        for names in (["first", "second"], ["third", "refused"]):
            reads = [read(llm, name, greedy(max_tokens=10)) for name in names]
            ends = await asyncio.gather(*reads, return_exceptions=True)
            assert [isinstance(end, LateFirstTokenError) for end in ends] == [False, "refused" in names]

    with mock_llm(tiny_args(tokenizer, max_ttft_ms=100, max_num_seqs=1), tokens_per_second=20) as llm:
        asyncio.run(run())
