"""The queue of waiting requests, in the policy's order."""

from __future__ import annotations

import heapq
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


class RequestQueue:
    """A heap of waiting requests, the first in order on top. A preempted request returns to its old place in line."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], Request]] = []
        self._waiting: dict[str, Request] = {}
        self._set_aside: list[Request] = []
        self._num_forks: Counter[Request] = Counter()
        self.num_later_steps = 0
        """The number of waiting requests that are later steps of beam searches."""

    def push(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        self.num_later_steps += request.is_later_step
        if request.donor is not None:
            self._num_forks[request.donor] += 1
        heapq.heappush(self._heap, (request.order, request))

    def peek(self) -> Request | None:
        """Return the first request, or None if none waits."""
        # An aborted request stays in the heap until it is on top: removing it at once would cost a search.
        while self._heap and self._waiting.get(self._heap[0][1].request_id) is not self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Remove and return the first request; raise IndexError if none waits."""
        if self.peek() is None:
            raise IndexError("pop from an empty request queue")
        _, request = heapq.heappop(self._heap)
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

    def set_aside(self) -> None:
        """Let later requests pass the first one, until `restore`; it keeps waiting."""
        _, request = heapq.heappop(self._heap)
        self._set_aside.append(request)

    def restore(self) -> None:
        """Put the requests that were set aside back in line."""
        for request in self._set_aside:
            heapq.heappush(self._heap, (request.order, request))
        self._set_aside.clear()

    def num_forks(self, donor: Request) -> int:
        """Return the number of waiting requests with this donor."""
        return self._num_forks.get(donor, 0)

    def __contains__(self, request: Request) -> bool:
        return self._waiting.get(request.request_id) is request

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def __len__(self) -> int:
        return len(self._waiting)

    def check(self) -> None:
        """Assert that no request is set aside, and that the forks are counted right."""
        assert not self._set_aside, "a request is still set aside"
        donors = [request.donor for request in self if request.donor is not None]
        assert self._num_forks == Counter(donors), "the count of forks is off"
        assert self.num_later_steps == sum(request.is_later_step for request in self), "the count of steps is off"
        queued = [request for _, request in self._heap]
        assert all(queued.count(request) == 1 for request in self), "a waiting request is not in line once"
