"""The queue says who is next."""

from __future__ import annotations

import pytest

from jaxllm.scheduling.config import SchedulingPolicy
from jaxllm.scheduling.request import Request
from jaxllm.scheduling.request_queue import RequestQueue, order_of
from tests.scheduling.simulation import make_request


def make_entry(
    arrival: int, policy: SchedulingPolicy = "fcfs", priority: int = 0, arrival_time: float = 0.0
) -> Request:
    source = make_request(str(arrival), [1], priority=priority, arrival_time=arrival_time)
    return Request(source, order_of(source, arrival, policy), queued_ts=0.0)


def test_fcfs_is_the_order_of_arrival_whatever_the_priority():
    queue = RequestQueue()
    entries = [make_entry(i, priority=-i, arrival_time=-float(i)) for i in range(5)]
    for entry in reversed(entries):
        queue.push(entry)
    assert [queue.pop() for _ in entries] == entries


def test_priority_is_lower_value_first_then_arrival():
    queue = RequestQueue()
    order = [(1, 5.0), (0, 9.0), (1, 3.0), (-2, 7.0), (0, 9.0)]
    entries = [make_entry(i, "priority", priority, time) for i, (priority, time) in enumerate(order)]
    for entry in entries:
        queue.push(entry)
    assert [int(queue.pop().request_id) for _ in entries] == [3, 1, 4, 2, 0]


def test_removed_requests_never_surface():
    queue = RequestQueue()
    entries = [make_entry(i) for i in range(4)]
    for entry in entries:
        queue.push(entry)
    queue.remove(entries[0])
    queue.remove(entries[2])
    assert (len(queue), entries[0] in queue, entries[1] in queue) == (2, False, True)
    assert set(queue) == {entries[1], entries[3]}
    again = make_entry(0)
    again.order = (9,)
    queue.push(again)
    assert [queue.pop(), queue.pop(), queue.pop()] == [entries[1], entries[3], again]
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()
    with pytest.raises(KeyError):
        queue.remove(entries[1])


def test_one_that_is_set_aside_still_waits_and_comes_back_to_its_place():
    queue = RequestQueue()
    entries = [make_entry(i) for i in range(3)]
    for entry in entries:
        queue.push(entry)
    queue.set_aside(entries[0])
    assert queue.peek() is entries[1]
    assert queue.pop() is entries[1]
    assert entries[0] in queue
    queue.restore()
    queue.check()
    assert [queue.pop(), queue.pop()] == [entries[0], entries[2]]


def test_forks_are_counted_while_they_wait():
    queue, donor = RequestQueue(), make_entry(0)
    forks = [Request(make_request(str(i), [1]), (i,), queued_ts=0.0, donor=donor) for i in (1, 2, 3)]
    for fork in forks:
        queue.push(fork)
    assert queue.num_forks(donor) == 3
    queue.pop()
    queue.remove(forks[2])
    assert (queue.num_forks(donor), queue.num_forks(forks[0])) == (1, 0)
    queue.check()
