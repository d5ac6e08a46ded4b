"""The queue of waiting requests, in the policy's order."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

from jaxllm.core_messages import EngineCoreRequest
from jaxllm.scheduling.config import SchedulingPolicy
from jaxllm.scheduling.request import Request


def order_of(source: EngineCoreRequest, arrival: int, policy: SchedulingPolicy) -> tuple[float, ...]:
    """Return the request's sort key, which is unique because `arrival` counts the core's requests.

    The part before `arrival` is the same in all steps of a beam search.
    """
    if policy == "priority":
        return (source.priority, source.arrival_time, arrival)
    return (source.arrival, arrival)


type _Entry = tuple[tuple[float, ...], Request]
"""A request with its order."""
type _ByLength = tuple[int, tuple[float, ...], Request]
"""A request with its length and its order."""


class RequestQueue:
    """A heap of waiting requests, the first in order on top. A preempted request returns to its old place in line."""

    def __init__(self, *, sorts_by_length: bool = False) -> None:
        """Make a queue; only one that `sorts_by_length` knows the shortest requests."""
        self._heap: list[_Entry] = []
        self._waiting: dict[str, _Entry] = {}
        self._by_length: list[_ByLength] | None = [] if sorts_by_length else None
        self._aside: set[str] = set()
        self._passed: list[_Entry] = []
        """Entries of requests that are set aside, taken off the heap."""
        self._num_forks: Counter[Request] = Counter()
        self.num_later_steps = 0
        """The number of waiting requests that are later steps of beam searches."""

    def push(self, request: Request) -> None:
        entry = request.order, request
        self._waiting[request.request_id] = entry
        self.num_later_steps += request.is_later_step
        if request.donor is not None:
            self._num_forks[request.donor] += 1
        heapq.heappush(self._heap, entry)
        if self._by_length is not None:
            insort(self._by_length, _entry_by_length(request))

    def peek(self) -> Request | None:
        """Return the first request that is not set aside, or None if none waits."""
        # An aborted request stays in the heap until it is on top: removing it at once would cost a search.
        while self._heap:
            entry = self._heap[0]
            request = entry[1]
            is_waiting = self._waiting.get(request.request_id) is entry
            if is_waiting and request.request_id not in self._aside:
                return request
            heapq.heappop(self._heap)
            if is_waiting:
                self._passed.append(entry)
        return None

    def shortest(self) -> Iterator[Request]:
        """Yield the requests that are not set aside, the shortest first."""
        assert self._by_length is not None
        return (entry[-1] for entry in self._by_length if entry[-1].request_id not in self._aside)

    def pop(self) -> Request:
        """Remove and return the first request; raise IndexError if none waits."""
        request = self.peek()
        if request is None:
            raise IndexError("pop from an empty request queue")
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Drop a waiting request; raise KeyError if it does not wait."""
        del self._waiting[request.request_id]
        self.num_later_steps -= request.is_later_step
        if request.donor is not None:
            self._num_forks[request.donor] -= 1
            if not self._num_forks[request.donor]:
                del self._num_forks[request.donor]
        if self._by_length is not None:
            del self._by_length[bisect_left(self._by_length, _entry_by_length(request))]

    def set_aside(self, request: Request) -> None:
        """Let other requests pass this one, until `restore`; it keeps waiting."""
        self._aside.add(request.request_id)

    def restore(self) -> None:
        """Put the requests that were set aside back in line."""
        for entry in self._passed:
            heapq.heappush(self._heap, entry)
        self._passed.clear()
        self._aside.clear()

    @property
    def has_forks(self) -> bool:
        """Return whether any waiting request has a donor."""
        return bool(self._num_forks)

    def num_forks(self, donor: Request) -> int:
        """Return the number of waiting requests with this donor."""
        return self._num_forks.get(donor, 0)

    def __contains__(self, request: Request) -> bool:
        entry = self._waiting.get(request.request_id)
        return entry is not None and entry[1] is request

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._waiting.values())

    def __len__(self) -> int:
        return len(self._waiting)

    def check(self) -> None:
        """Assert that no request is set aside, and that the forks are counted right."""
        assert not self._aside, "a request is still set aside"
        assert not self._passed, "a request that was set aside is not back in line"
        donors = [request.donor for request in self if request.donor is not None]
        assert self._num_forks == Counter(donors), "the count of forks is off"
        assert self.num_later_steps == sum(request.is_later_step for request in self), "the count of steps is off"
        queued = Counter(id(entry) for entry in self._heap)
        assert all(queued[id(entry)] == 1 for entry in self._waiting.values()), "a waiting request is not in line once"
        if self._by_length is not None:
            assert self._by_length == sorted(_entry_by_length(request) for request in self)


def _entry_by_length(request: Request) -> _ByLength:
    return request.num_tokens, request.order, request
