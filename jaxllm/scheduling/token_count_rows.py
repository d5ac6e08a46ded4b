"""Assign rows of the device's token counts to requests that count their tokens."""

from __future__ import annotations

from collections.abc import Collection

from jaxllm.scheduling.request import Request


class TokenCountRows:
    """Give each running request a row, from 1 on: row 0 is for requests that count nothing.

    The device fills a row anew when its next holder starts.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.by_request: dict[Request, int] = {}
        self._free = list(range(num_rows, 0, -1))

    def take(self, request: Request) -> None:
        """Give the request a row; raise IndexError if none is left."""
        self.by_request[request] = self._free.pop()

    def release(self, request: Request) -> None:
        """Take the request's row back if it has one."""
        row = self.by_request.pop(request, None)
        if row is not None:
            self._free.append(row)

    def check(self, requests: Collection[Request]) -> None:
        """Assert that exactly `requests` hold rows, one each, and that none is lost."""
        assert self.by_request.keys() == set(requests), "rows of counts and running requests differ"
        rows = [*self.by_request.values(), *self._free]
        assert sorted(rows) == list(range(1, self.num_rows + 1)), "a row of counts is lost or held twice"
