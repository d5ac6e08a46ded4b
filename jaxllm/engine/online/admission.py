"""The bound on the requests that an engine has: more are refused before any work is done."""

from __future__ import annotations

from jaxllm.exceptions import MaxQueuedTokensError, QueueOverflowError, VLLMValidationError


class Admission:
    """A count of the sequences that wait or run, and of the prompt tokens of those that have no output yet.

    Room is reserved before a request is tokenized, so that many at once cannot overrun the bound.
    """

    def __init__(self, max_num_reqs: int | None, max_num_tokens: int | None) -> None:
        """None stands for no bound."""
        self._max_num_reqs, self._max_num_tokens = max_num_reqs, max_num_tokens
        self.num_reqs = self.num_tokens = 0
        self.num_rejected = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}
        """The number of requests that each bound has refused."""

    def check_room(self, count: int = 1) -> None:
        """Refuse, and count, what the bounds leave no room for: `count` sequences, of the shortest prompts.

        Raises QueueOverflowError or MaxQueuedTokensError, and VLLMValidationError for more sequences than there will
        ever be room for. Nothing is reserved: a request may still find no room later.
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
        """Take room for a prompt of `count` tokens. Raises MaxQueuedTokensError."""
        if self._max_num_tokens is not None and self.num_tokens + count > self._max_num_tokens:
            self.num_rejected["max_num_queued_tokens"] += 1
            raise MaxQueuedTokensError(
                f"Prompts of {self.num_tokens} tokens wait, and max_num_queued_tokens={self._max_num_tokens} leaves no "
                f"room for {count} more; try again later."
            )
        self.num_tokens += count


class Reservation:
    """The room that one request takes: its prompt's is given back at the first output, the rest at its end."""

    __slots__ = ("_admission", "_num_reqs", "_num_tokens")

    def __init__(self, admission: Admission, num_sequences: int) -> None:
        """Reserve room for the request's sequences. Raises QueueOverflowError."""
        admission.reserve_reqs(num_sequences)
        self._admission, self._num_reqs, self._num_tokens = admission, num_sequences, 0

    def hold_prompt(self, num_tokens: int) -> None:
        """Take room for the prompt. Raises MaxQueuedTokensError."""
        self._admission.reserve_tokens(num_tokens)
        self._num_tokens = num_tokens

    def release_prompt(self) -> None:
        """Give back the room of the prompt. May be called twice."""
        self._admission.num_tokens -= self._num_tokens
        self._num_tokens = 0

    def release(self) -> None:
        """Give back everything. May be called twice."""
        self.release_prompt()
        self._admission.num_reqs -= self._num_reqs
        self._num_reqs = 0
