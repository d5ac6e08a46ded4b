"""The seats of running requests: max_num_seqs of them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from jaxllm.scheduling.request import Request

_HOLD_SECONDS = 1.0
"""The most seconds that an ended step of a beam search holds its seats; its front end needs some milliseconds."""


class Seats:
    """Count the seats that requests take. An ended step of a beam search holds its seats for the next step."""

    def __init__(self, num_seats: int, clock: Callable[[], float]) -> None:
        self._num_seats, self._num_taken, self._clock = num_seats, 0, clock
        self._held: dict[str, tuple[Request, float]] = {}
        """The ended steps of beam searches with a time, after which they hold no seats."""

    def take(self, request: Request) -> None:
        """Seat a request that is admitted."""
        self._num_taken += request.num_seats

    def give_back(self, request: Request) -> None:
        """Free the seats of a request that no longer runs."""
        self._num_taken -= request.num_seats

    def hold(self, request: Request) -> None:
        """Hold the seats of an ended request, until `release` or for some time."""
        self._held[request.request_id] = request, self._clock() + _HOLD_SECONDS

    def release(self, request_id: str) -> None:
        """Hold the seats of an ended request no longer; ignore unknown ids."""
        self._held.pop(request_id, None)

    def fit(self, request: Request, num_promised: int = 0) -> bool:
        """Return whether a request can be seated beside some that seats are promised to.

        Other beam searches before it in line keep theirs.
        """
        num_taken = self._num_taken + num_promised + request.num_seats
        if self._held:
            rank, now = request.order[:-1], self._clock()
            self._held = {name: (each, until) for name, (each, until) in self._held.items() if until > now}
            num_taken += sum(each.num_seats for each, _ in self._held.values() if each.order[:-1] < rank)
        return num_taken <= self._num_seats

    def check(self, running: Collection[Request]) -> None:
        """Assert that the seats of the running requests are counted, and that ended requests alone hold others."""
        assert self._num_taken == sum(request.num_seats for request in running) <= self._num_seats, "seats miscounted"
        assert all(each.keeps_blocks and each.finish_reason for each, _ in self._held.values()), "a seat held in vain"
