"""The bound on the requests that an engine has: more are refused before any work is done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Self

from jaxllm.exceptions import (
    LateFirstTokenError,
    MaxQueuedTokensError,
    QueueOverflowError,
    VLLMValidationError,
)
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from jaxllm.scheduling.prompts.shares import FIRST_SHARE

_MEMORY_SECONDS = 30.0
"""How fast old measurements of the speed of prompts lose weight: to a third in this time."""
NUM_LENGTHS = 240
"""The number of classes that the lengths of prompts, up to 2**32 tokens, are counted in."""


def _class_of(length: int) -> int:
    """Return the class of a length; there are eight between a length and its double."""
    shift = max(0, length.bit_length() - 4)
    return 8 * shift + (length >> shift)


class PromptSpeed:
    """The prompt tokens that come to their first output in a second, measured while prompts wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._now = clock, clock()
        self._num_tokens = self._seconds = 0.0
        self._since = self._most_waiting = 0.0
        """The seconds since the last prompt was counted in which prompts waited, and the most tokens that they had."""

    @property
    def state(self) -> tuple[float, ...]:
        """Return what has been measured, from which another process may go on. Zeros are a state without any."""
        return self._now, self._num_tokens, self._seconds, self._since, self._most_waiting

    @state.setter
    def state(self, state: tuple[float, ...]) -> None:
        self._now, self._num_tokens, self._seconds, self._since, self._most_waiting = state

    def tick(self, num_waiting: int) -> None:
        """Count the time since the last call, in which prompts of `num_waiting` tokens waited."""
        before, self._now = self._now, self._clock()
        if num_waiting:
            self._since += self._now - before
            self._most_waiting = max(self._most_waiting, num_waiting)

    def count(self, num_tokens: int) -> None:
        """Count a prompt that has come to its first output."""
        fades = math.exp(-self._since / _MEMORY_SECONDS)
        self._num_tokens = self._num_tokens * fades + num_tokens
        self._seconds = self._seconds * fades + self._since
        self._since = self._most_waiting = 0.0

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds that prompts of `num_tokens` tokens take; 0 if that is not known.

        A long prompt is not counted while it is read: the speed is only lower than before once all that wait should
        have come to their first outputs.
        """
        if not self._num_tokens:
            return 0.0
        lately = self._since / self._most_waiting if self._most_waiting else 0.0
        return num_tokens * max(self._seconds / self._num_tokens, lately)


class Admission:
    """A count of the sequences that wait or run, and of the prompt tokens of those that have no output yet.

    Room is reserved before a request is tokenized, so that many at once cannot overrun the bound.
    """

    def __init__(
        self,
        max_num_reqs: int | None,
        max_num_tokens: int | None,
        max_ttft_ms: float | None = None,
        speed: PromptSpeed | None = None,
        *,
        short_prompts_pass: bool = False,
    ) -> None:
        """None stands for no bound. If short prompts pass, those that are longer do not delay a first token."""
        self._max_num_reqs, self._max_num_tokens, self._max_ttft_ms = max_num_reqs, max_num_tokens, max_ttft_ms
        self._speed = speed or PromptSpeed()
        self._short_prompts_pass = short_prompts_pass
        self._waiting: list[int] | memoryview[int] = [0] * NUM_LENGTHS
        """The prompt tokens that wait, by the class of their prompt's length."""
        self.num_reqs = self.num_tokens = 0
        self.num_rejected = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0, "max_ttft_ms": 0}
        """The number of requests that each bound has refused."""

    @classmethod
    def of(cls, engine_args: AsyncEngineArgs, **more: Any) -> Self:
        """Return the admission that engine arguments ask for."""
        args, passes = engine_args, engine_args.scheduling_policy == "fcfs"
        limits = args.max_num_queued_reqs, args.max_num_queued_tokens, args.max_ttft_ms
        return cls(*limits, short_prompts_pass=passes, **more)

    def check_room(self, count: int = 1) -> None:
        """Refuse, and count, what the bounds leave no room for: `count` sequences, of the shortest prompts.

        Raises QueueOverflowError, MaxQueuedTokensError or LateFirstTokenError, and VLLMValidationError for more
        sequences than there will ever be room for. Nothing is reserved: a request may still find no room later.
        """
        if self._max_num_reqs is not None and count > self._max_num_reqs:
            message = f"The request makes {count} sequences, and the engine takes at most {self._max_num_reqs} at once"
            raise VLLMValidationError(f"{message} (max_num_queued_reqs): send fewer prompts, or a smaller n.")
        reservation = Reservation(self, count)
        try:
            reservation.hold_prompt(1)
        finally:
            reservation.release()

    def reserve_reqs(self, count: int) -> None:
        """Reserve room for `count` sequences, all or none. Raises QueueOverflowError."""
        if self._max_num_reqs is not None and self.num_reqs + count > self._max_num_reqs:
            self.num_rejected["max_num_queued_reqs"] += 1
            raise QueueOverflowError(
                f"The engine has {self.num_reqs} requests, and max_num_queued_reqs={self._max_num_reqs} leaves no room "
                f"for {count} more; try again later."
            )
        self.num_reqs += count

    def reserve_tokens(self, count: int) -> None:
        """Take room for a prompt of `count` tokens. Raises MaxQueuedTokensError or LateFirstTokenError."""
        if self._max_num_tokens is not None and self.num_tokens + count > self._max_num_tokens:
            self.num_rejected["max_num_queued_tokens"] += 1
            raise MaxQueuedTokensError(
                f"Prompts of {self.num_tokens} tokens wait, and max_num_queued_tokens={self._max_num_tokens} leaves no "
                f"room for {count} more; try again later."
            )
        self._check_ttft(count)
        self._speed.tick(self.num_tokens)
        self.num_tokens += count
        self._waiting[_class_of(count)] += count

    def _check_ttft(self, count: int) -> None:
        """Refuse a prompt whose first token would come too late; one that waits for nobody is taken in any case."""
        if self._max_ttft_ms is None or not self.num_tokens:
            return
        self._speed.tick(self.num_tokens)
        late = 1e3 * self._speed.seconds(self._num_until(count)) - self._max_ttft_ms
        if late > 0:
            self.num_rejected["max_ttft_ms"] += 1
            raise LateFirstTokenError(
                f"Prompts of {self.num_tokens} tokens wait: the first token would come about {late / 1e3:.1f} seconds "
                f"later than max_ttft_ms={self._max_ttft_ms:g} allows; try again later.",
                math.ceil(late / 1e3),
            )

    def _num_until(self, count: int) -> int:
        """Return the number of prompt tokens that are computed until a prompt of `count` tokens more is."""
        if not self._short_prompts_pass:
            return self.num_tokens + count
        num_shorter = self._num_waiting(_class_of(count) + 1)
        num_for_first = -(-(num_shorter + count) // (FIRST_SHARE - 1))
        return min(self.num_tokens, num_shorter + num_for_first) + count

    def _num_waiting(self, num_classes: int) -> int:
        """Return the number of prompt tokens that wait in prompts of the first classes of lengths."""
        return sum(self._waiting[:num_classes])

    def release_reqs(self, count: int) -> None:
        """Give back the room of `count` sequences."""
        self.num_reqs -= count

    def release_tokens(self, count: int, *, has_output: bool) -> None:
        """Give back the room of a prompt, at its first output or because it was given up."""
        self._speed.tick(self.num_tokens)
        self.num_tokens -= count
        self._waiting[_class_of(count)] -= count
        if has_output:
            self._speed.count(count)


class Reservation:
    """The room that one request takes: its prompt's is given back at the first output, the rest at its end."""

    __slots__ = ("_admission", "_num_reqs", "_num_tokens")

    def __init__(self, admission: Admission, num_sequences: int) -> None:
        """Reserve room for the request's sequences. Raises QueueOverflowError."""
        admission.reserve_reqs(num_sequences)
        self._admission, self._num_reqs, self._num_tokens = admission, num_sequences, 0

    def hold_prompt(self, num_tokens: int) -> None:
        """Take room for the prompt. Raises MaxQueuedTokensError or LateFirstTokenError."""
        self._admission.reserve_tokens(num_tokens)
        self._num_tokens = num_tokens

    def release_prompt(self) -> None:
        """Give back the room of the prompt, which has come to its first output. May be called twice."""
        self._release_prompt(has_output=True)

    def release(self) -> None:
        """Give back everything. May be called twice."""
        self._release_prompt(has_output=False)
        self._admission.release_reqs(self._num_reqs)
        self._num_reqs = 0

    def _release_prompt(self, *, has_output: bool) -> None:
        num_tokens, self._num_tokens = self._num_tokens, 0
        if num_tokens:
            self._admission.release_tokens(num_tokens, has_output=has_output)
