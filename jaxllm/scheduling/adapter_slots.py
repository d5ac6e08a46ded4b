"""The device's slots for LoRA adapters: which adapter each holds, and how many running requests need it there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping


class AdapterSlots:
    """Slots from 1 to `count`. An adapter keeps its slot while a request runs with it, and after that until another one
    needs it: the one that has gone unused for longest makes room.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count, 0, -1))
        self._slots: dict[int, int] = {}
        """The slot of each adapter that has one."""
        self._num_running: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """The adapters with a slot that no request runs with, the one that went idle first in front."""
        self._loads: dict[int, int] = {}

    def has_room(self, adapter: int) -> bool:
        """Say whether a request with this adapter could run beside the others."""
        return adapter in self._slots or bool(self._free or self._idle)

    def take(self, adapter: int) -> int:
        """Return the adapter's slot, for one more running request; there must be room."""
        slot = self._slots.get(adapter)
        if slot is None:
            if not self._free:
                oldest, _ = self._idle.popitem(last=False)
                self._free.append(self._slots.pop(oldest))
            slot = self._slots[adapter] = self._free.pop()
            self._loads[slot] = adapter
        self._idle.pop(adapter, None)
        self._num_running[adapter] = self._num_running.get(adapter, 0) + 1
        return slot

    def give_back(self, adapter: int) -> None:
        """Count one running request less."""
        self._num_running[adapter] -= 1
        if not self._num_running[adapter]:
            del self._num_running[adapter]
            self._idle[adapter] = None

    def forget(self, adapter: int) -> None:
        """Free the slot of an adapter that no request runs with, if it has one."""
        if adapter in self._idle:
            del self._idle[adapter]
            slot = self._slots.pop(adapter)
            self._loads.pop(slot, None)
            self._free.append(slot)

    def take_loads(self) -> dict[int, int]:
        """Return the adapters that slots have got since the last call, by slot, to be written before the next step."""
        loads, self._loads = self._loads, {}
        return loads

    @property
    def num_running(self) -> dict[int, int]:
        """Return how many requests run with each adapter."""
        return dict(self._num_running)

    def check(self, num_running: Mapping[int, int]) -> None:
        """Assert that every slot is in one place, and that so many requests run with each adapter."""
        assert sorted([*self._free, *self._slots.values()]) == sorted({*self._free, *self._slots.values()})
        assert self._slots.keys() == self._num_running.keys() | self._idle.keys(), "an adapter with a slot is nowhere"
        assert not self._num_running.keys() & self._idle.keys(), "an adapter in use is idle"
        assert self._num_running == dict(num_running), "the requests that run with adapters are counted wrong"
