"""The device's slots for LoRA adapters: the adapter in each, and the number of running requests that use it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from jaxllm.scheduling.request import Request


class AdapterSlots:
    """Slots from 1 to `count` for adapters.

    An adapter keeps its slot while a request runs with it, and after that until another one needs it: the adapter that
    has been idle for longest makes room. Requests without an adapter need no slot.
    """

    def __init__(self, count: int, most_passing: int) -> None:
        """The most requests that may pass one that waits for a slot: more could keep all slots for ever."""
        self._free = list(range(count, 0, -1))
        self._slots: dict[int, int] = {}
        """The slot of each adapter that has one."""
        self._num_running: Counter[int] = Counter()
        self._idle: OrderedDict[int, None] = OrderedDict()
        """The adapters with a slot that no running request uses, in the order in which they became idle."""
        self._loads: dict[int, int] = {}
        self._most_passing = most_passing
        self._first_waiting: Request | None = None
        self._num_passed = 0
        """The number of requests with adapters that were admitted while that one, before them, waited for a slot."""

    def holds_up(self, request: Request) -> bool:
        """Return whether a request has to wait for a slot; call it for requests before it in line first."""
        if request.adapter is None:
            return False
        first = self._first_waiting
        has_room = request.adapter in self._slots or bool(self._free or self._idle)
        is_behind = first is not None and first.order < request.order
        if has_room and not (is_behind and self._num_passed >= self._most_passing):
            return False
        if not is_behind and first is not request:
            self._first_waiting, self._num_passed = request, 0
        return True

    def take(self, request: Request) -> None:
        """Give an admitted request its adapter's slot; there must be room."""
        adapter, first = request.adapter, self._first_waiting
        if adapter is None:
            return
        if first is not None and first.order < request.order:
            self._num_passed += 1
        else:
            self._first_waiting, self._num_passed = None, 0
        if adapter not in self._slots:
            if not self._free:
                oldest, _ = self._idle.popitem(last=False)
                self._free.append(self._slots.pop(oldest))
            slot = self._slots[adapter] = self._free.pop()
            self._loads[slot] = adapter
        self._idle.pop(adapter, None)
        self._num_running[adapter] += 1

    def slot_of(self, request: Request) -> int:
        """Return the slot of a running request's adapter, 0 for none."""
        return 0 if request.adapter is None else self._slots[request.adapter]

    def give_back(self, request: Request) -> None:
        """Note that a running request has ended, or was preempted."""
        adapter = request.adapter
        if adapter is None:
            return
        self._num_running[adapter] -= 1
        if not self._num_running[adapter]:
            del self._num_running[adapter]
            self._idle[adapter] = None

    def forget(self, request: Request) -> None:
        """Stop other requests from waiting behind a request that has left the line."""
        if request is self._first_waiting:
            self._first_waiting, self._num_passed = None, 0

    def forget_idle(self) -> None:
        """Take the slots of all adapters that no running request uses: the slots' content is lost."""
        self._free += [self._slots.pop(adapter) for adapter in reversed(self._idle)]
        self._idle.clear()

    def take_loads(self) -> dict[int, int]:
        """Return the adapters that got a slot since the last call, by slot, to be written before the next step."""
        loads, self._loads = self._loads, {}
        return loads

    @property
    def is_used(self) -> bool:
        """Return whether any running request has an adapter."""
        return bool(self._num_running)

    def check(self, running: Iterable[Request]) -> None:
        """Assert that every slot is used once, and that the running requests' adapters have slots."""
        slots = [*self._free, *self._slots.values()]
        assert len(slots) == len(set(slots)), "a slot is in two places"
        assert self._slots.keys() == self._num_running.keys() | self._idle.keys(), "an adapter with a slot is nowhere"
        assert not self._num_running.keys() & self._idle.keys(), "an adapter in use is idle"
        used = Counter(request.adapter for request in running if request.adapter is not None)
        assert self._num_running == used, "running adapters are counted wrong"
