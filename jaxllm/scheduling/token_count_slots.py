"""Slots say which request has which row of the device's token counts."""

from __future__ import annotations

from collections.abc import Collection

from jaxllm.scheduling.request import Request


class TokenCountSlots:
    """Give running requests a slot each. The device fills a slot anew when its next holder starts."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.by_request: dict[Request, int] = {}
        self._free = list(reversed(range(num_slots)))

    def take(self, request: Request) -> None:
        """Give the request a slot; raise IndexError if none is left."""
        self.by_request[request] = self._free.pop()

    def release(self, request: Request) -> None:
        """Take the request's slot back if it has one."""
        slot = self.by_request.pop(request, None)
        if slot is not None:
            self._free.append(slot)

    def check(self, requests: Collection[Request]) -> None:
        """Assert that exactly `requests` hold slots, one each, and that none is lost."""
        assert self.by_request.keys() == set(requests), "slots and running requests differ"
        slots = [*self.by_request.values(), *self._free]
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or held twice"
