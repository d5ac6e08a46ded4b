"""Store ended responses in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.errors import RequestFailedError
from jaxllm.server.responses.event_log import EventLog
from jaxllm.server.responses.items import items_by_id, made_for

_MAX_RESPONSES = 4096
MAX_BYTES = 256 * 2**20
_CONVERSATIONS = 8
"""The longest conversation may take this fraction of the bytes."""
_ENTRY_BYTES = 1024
"""The approximate bytes of an entry besides its texts."""


class StoredResponse(NamedTuple):
    """A response that has ended."""

    body: bytes
    """The response in JSON."""
    turns: tuple[bytes, ...]
    """The items of the conversation up to its end in JSON, a list for each response in the chain."""
    item_ids: tuple[str, ...]
    """The ids of its output items."""
    background: bool
    log: EventLog | None = None
    """The events of one that was made in the background; they have ended too."""

    @property
    def size(self) -> int:
        """Return an upper bound of its bytes: it may share the earlier turns with others."""
        num_logged = 0 if self.log is None else self.log.num_bytes
        return len(self.body) + size_of(self.turns) + num_logged + _ENTRY_BYTES


class ResponseStore:
    """Stores responses by id, and drops the least recently used first."""

    def __init__(self, max_responses: int = _MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        """Limit the number of responses and their total bytes."""
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._owners: dict[str, str] = {}
        """The id of the response by the id of an output item."""
        self.num_bytes = 0

    def __len__(self) -> int:
        """Return the number of stored responses."""
        return len(self._kept)

    def check_room(self, turns: tuple[bytes, ...]) -> None:
        """Raise VLLMValidationError for a conversation that is too long to store."""
        most = self._max_bytes // _CONVERSATIONS
        if size_of(turns) > most:
            message = f"store: the conversation is longer than the {most} bytes that are kept: send store=false."
            raise VLLMValidationError(message, parameter="store", value=True)

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Store a response, and drop older ones to make room."""
        self.discard(response_id)
        self._kept[response_id] = response
        self._owners |= dict.fromkeys(response.item_ids, response_id)
        self.num_bytes += response.size
        while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
            self.discard(next(iter(self._kept)))

    def find(self, response_id: str, parameter: str) -> StoredResponse:
        """Return a response. Raises RequestFailedError, 404, naming the parameter, for an unknown one."""
        kept = self._kept.get(response_id)
        if kept is None:
            raise _not_found(response_id, parameter)
        self._kept.move_to_end(response_id)
        return kept

    def finder(self) -> Callable[[str], dict[str, Any] | None]:
        """Return a function that finds items of stored responses by id: output, and input by the ids that lists of it
        show. It decodes each response once.
        """
        read: dict[tuple[str, bool], dict[str, dict[str, Any]]] = {}

        def find(item_id: str) -> dict[str, Any] | None:
            is_output = item_id in self._owners
            owner = self._owners[item_id] if is_output else made_for(item_id)
            if owner is None or owner not in self._kept:
                return None
            if (owner, is_output) not in read:
                turns = self.find(owner, "input").turns
                read[owner, is_output] = items_by_id(turns[-1:] if is_output else turns, owner)
            return read[owner, is_output].get(item_id)

        return find

    def discard(self, response_id: str) -> None:
        """Drop a response if it is stored."""
        response = self._kept.pop(response_id, None)
        if response is not None:
            self.num_bytes -= response.size
            for item_id in response.item_ids:
                self._owners.pop(item_id, None)


def size_of(turns: tuple[bytes, ...]) -> int:
    """Return the bytes of a conversation."""
    return sum(map(len, turns))


def _not_found(response_id: str, parameter: str) -> RequestFailedError:
    """Return the error for a response that is not stored, or no longer."""
    shown = response_id if len(response_id) <= 100 else f"{response_id[:100]}..."
    return RequestFailedError(HTTPStatus.NOT_FOUND, f"Response with id '{shown}' not found.", param=parameter)
