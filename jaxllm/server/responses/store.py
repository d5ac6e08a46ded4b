"""The responses that may be asked for later, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.errors import RequestFailedError

MAX_RESPONSES = 4096
MAX_BYTES = 256 * 2**20
CONVERSATIONS = 8
"""The longest conversation may take such a part of the bytes."""
_ENTRY_BYTES = 1024
"""About what an entry takes beside its texts."""


class StoredResponse(NamedTuple):
    """A response that has ended."""

    body: bytes
    """The response in JSON."""
    turns: tuple[bytes, ...]
    """The items of the conversation up to its end in JSON, a list for each response in the chain."""
    item_ids: tuple[str, ...]
    """The ids of the items of its own output."""
    background: bool

    @property
    def size(self) -> int:
        """Return how many bytes it takes at most: the turns before its own it may share with others."""
        return len(self.body) + size_of(self.turns) + _ENTRY_BYTES


class ResponseStore:
    """This keeps responses by their ids. Those that were not used for the longest time go first."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        """Keep so many responses, and so many bytes of them all."""
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._owners: dict[str, str] = {}
        """By the id of an item, the id of the response whose output it is of."""
        self.num_bytes = 0

    def __len__(self) -> int:
        """Return how many responses are kept."""
        return len(self._kept)

    def check_room(self, turns: tuple[bytes, ...]) -> None:
        """Raise VLLMValidationError for a conversation that is too long to be kept."""
        most = self._max_bytes // CONVERSATIONS
        if size_of(turns) > most:
            message = f"store: the conversation is longer than the {most} bytes that are kept: send store=false."
            raise VLLMValidationError(message, parameter="store", value=True)

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Keep a response, and drop what there is no more room for."""
        self.discard(response_id)
        self._kept[response_id] = response
        self._owners |= dict.fromkeys(response.item_ids, response_id)
        self.num_bytes += response.size
        while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
            self.discard(next(iter(self._kept)))

    def find(self, response_id: str, parameter: str) -> StoredResponse:
        """Return a response. Raises RequestFailedError, 404, naming the parameter, for one that is not kept."""
        kept = self._kept.get(response_id)
        if kept is None:
            raise not_found(response_id, parameter)
        self._kept.move_to_end(response_id)
        return kept

    def finder(self) -> Callable[[str], dict[str, Any] | None]:
        """Return what finds items of the outputs of responses that are kept, by their ids; it reads a response once."""
        read: dict[str, dict[Any, dict[str, Any]]] = {}

        def find(item_id: str) -> dict[str, Any] | None:
            owner = self._owners.get(item_id)
            if owner is None:
                return None
            if owner not in read:
                items = msgspec.json.decode(self.find(owner, "input").turns[-1])
                item_ids = self._kept[owner].item_ids
                read[owner] = {item["id"]: item for item in items[-len(item_ids) :]}
            return read[owner][item_id]

        return find

    def discard(self, response_id: str) -> None:
        """Drop a response if it is kept."""
        response = self._kept.pop(response_id, None)
        if response is not None:
            self.num_bytes -= response.size
            for item_id in response.item_ids:
                self._owners.pop(item_id, None)


def size_of(turns: tuple[bytes, ...]) -> int:
    """Return how many bytes a conversation takes."""
    return sum(map(len, turns))


def not_found(response_id: str, parameter: str) -> RequestFailedError:
    """Make the error for a response that is not kept, or not any more."""
    shown = response_id if len(response_id) <= 100 else f"{response_id[:100]}..."
    return RequestFailedError(HTTPStatus.NOT_FOUND, f"Response with id '{shown}' not found.", param=parameter)
