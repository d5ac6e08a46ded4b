"""Build a response from the pieces of its answer, with an event for each step."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from jaxllm.parsers.pieces import CallArguments, CallStart, Piece, Reasoning, Text
from jaxllm.server.http.sse import named_event
from jaxllm.server.openai.logprobs import ChatTokenLogprob
from jaxllm.server.responses.logprobs import ScoredText
from jaxllm.server.responses.objects import (
    FunctionCallItem,
    IncompleteDetails,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseStatus,
    ResponseUsage,
)
from jaxllm.server.responses.stream import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
    TextDelta,
    TextDone,
)

_LAST: dict[str, Any] = {"completed": ResponseCompleted, "incomplete": ResponseIncomplete}
_COMPLETE = ("stop", "tool_calls", "repetition")


def frame(event: Event) -> bytes:
    """Return the frame of an event, named by its type."""
    return named_event(str(type(event).__struct_config__.tag), event)


class ResponseBuilder:
    """Builds a response from the pieces of its answer.

    Pass all pieces to `add`, then call `end` or `fail`. Together their events tell the whole response; without
    streaming they are dropped.
    """

    def __init__(self, response: Response) -> None:
        """Begin with a response that has no output yet."""
        self._response, self._output = response, list[OutputItem]()
        self._open: _Open | None = None
        self._space, self._space_logprobs = "", list[ChatTokenLogprob]()
        """White space held until a message begins: between other items it is dropped."""
        self._number = 0

    def response(self) -> Response:
        """Return the current response."""
        unfinished = [] if self._open is None else [self._open.item("in_progress")]
        return msgspec.structs.replace(self._response, output=[*self._output, *unfinished])

    def begin(self) -> list[Event]:
        """Return the events of an admitted response."""
        self._set_status("in_progress")
        return [self._event(kind, response=self._response) for kind in (ResponseCreated, ResponseInProgress)]

    def queue(self) -> list[Event]:
        """Return the events of a response that waits in the background."""
        self._set_status("queued")
        return [self._event(kind, response=self._response) for kind in (ResponseCreated, ResponseQueued)]

    def proceed(self) -> list[Event]:
        """Return the event of a queued response that now is in progress, none if it was before."""
        if self._response.status != "queued":
            return []
        self._set_status("in_progress")
        return [self._event(ResponseInProgress, response=self._response)]

    def _set_status(self, status: ResponseStatus) -> None:
        self._response = msgspec.structs.replace(self._response, status=status)

    def add(self, pieces: Iterable[Piece]) -> list[Event]:
        """Add pieces of the answer, and return the events."""
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case Text(text):
                    events += self._add_text(text, piece.logprobs if isinstance(piece, ScoredText) else [])
                case Reasoning(text):
                    if not isinstance(self._open, _OpenReasoning):
                        events += self._start(_OpenReasoning)
                    events += self._grow(text)
                case CallStart(_, name, call_id):
                    events += self._start(_OpenCall, name, call_id)
                case CallArguments(_, text):
                    events += self._grow(text)
        return events

    def end(self, finish_reason: str | None, usage: ResponseUsage, now: int) -> list[Event]:
        """End the response with an engine's finish reason at a time in seconds, and return the events."""
        status: ResponseStatus = "completed" if finish_reason in _COMPLETE else "incomplete"
        events: list[Event] = []
        if self._open is None and not self._output:  # clients expect a message
            space, logprobs = self._space, self._space_logprobs
            events += [*self._start(_OpenText), *self._grow(space, logprobs)]
        events += self._close(status)
        if finish_reason not in (*_COMPLETE, "length"):
            return [*events, *self.fail(ResponseError("server_error", "The server has ended this response."))]
        self._response = msgspec.structs.replace(
            self._response,
            status=status,
            completed_at=now if status == "completed" else None,
            incomplete_details=None if status == "completed" else IncompleteDetails("max_output_tokens"),
            output=self._output,
            usage=usage,
        )
        return [*events, self._event(_LAST[status], response=self._response)]

    def fail(self, error: ResponseError | None) -> list[Event]:
        """End the response with an error, or as cancelled without one; return the last event."""
        if self._open is not None:
            self._output.append(self._open.item("incomplete"))
            self._open = None
        status: ResponseStatus = "cancelled" if error is None else "failed"
        self._response = msgspec.structs.replace(self._response, status=status, error=error, output=self._output)
        return [self._event(ResponseFailed, response=self._response)]

    def _add_text(self, text: str, logprobs: list[ChatTokenLogprob]) -> list[Event]:
        if isinstance(self._open, _OpenText):
            return self._grow(text, logprobs)
        text, logprobs = self._space + text, [*self._space_logprobs, *logprobs]
        if not text.strip():
            self._space, self._space_logprobs = text, logprobs
            return []
        return [*self._start(_OpenText), *self._grow(text, logprobs)]

    def _start(self, kind: Callable[..., _Open], *what: str) -> list[Event]:
        events = self._close("completed")
        self._space, self._space_logprobs, item = "", [], kind(len(self._output), *what)
        self._open = item
        added = self._event(ItemAdded, output_index=item.index, item=item.item("in_progress", is_begun=False))
        return [*events, added, *(self._event(kind, **fields) for kind, fields in item.opening())]

    def _grow(self, text: str, logprobs: Sequence[ChatTokenLogprob] = ()) -> list[Event]:
        if not text:
            return []
        assert self._open is not None
        self._open.texts.append(text)
        kind, fields = self._open.delta(text)
        if logprobs and isinstance(self._open, _OpenText):
            self._open.logprobs += logprobs
            fields["logprobs"] = list(logprobs)
        return [self._event(kind, **fields)]

    def _close(self, status: ItemStatus) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        self._output.append(item.item(status))
        events = [self._event(kind, **fields) for kind, fields in item.closing()]
        return [*events, self._event(ItemDone, output_index=item.index, item=self._output[-1])]

    def _event(self, kind: Any, **fields: Any) -> Event:
        event = kind(sequence_number=self._number, **fields)
        self._number += 1
        return event


type _Fields = tuple[Any, dict[str, Any]]
"""An event's type, and its fields besides the sequence number."""


class _Open(Protocol):
    """An output item that is being written."""

    index: int
    texts: list[str]

    def item(self, status: ItemStatus, *, is_begun: bool = True) -> OutputItem:
        """Return the current item; it has no content before it `is_begun`."""
        ...

    def opening(self) -> list[_Fields]:
        """Return the events after that of the item itself."""
        ...

    def delta(self, text: str) -> _Fields:
        """Return the event of some text."""
        ...

    def closing(self) -> list[_Fields]:
        """Return the events before that of the whole item."""
        ...


class _OpenContent:
    """An item whose content is one part."""

    part: Any
    delta_kind: Any
    done_kind: Any
    prefix: str

    def __init__(self, index: int) -> None:
        self.index, self.id, self.texts = index, f"{self.prefix}_{uuid.uuid4().hex}", list[str]()
        self._place: dict[str, Any] = {"output_index": index, "item_id": self.id}

    def opening(self) -> list[_Fields]:
        """Return the event that begins the part."""
        return [(PartAdded, {**self._place, "part": self.part(text="")})]

    def _whole(self) -> Any:
        """Return the current part."""
        return self.part(text="".join(self.texts))

    def delta(self, text: str) -> _Fields:
        """Return the event of some text."""
        return self.delta_kind, {**self._place, "delta": text}

    def closing(self) -> list[_Fields]:
        """Return the event that ends the part."""
        part = self._whole()
        return [
            (self.done_kind, {**self._place, **self.done_fields(part)}),
            (PartDone, {**self._place, "part": part}),
        ]

    def done_fields(self, part: Any) -> dict[str, Any]:
        """Return the fields of the event that has the whole text."""
        return {"text": part.text}


class _OpenText(_OpenContent):
    """A message."""

    part, delta_kind, done_kind, prefix = OutputText, TextDelta, TextDone, "msg"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.logprobs: list[ChatTokenLogprob] = []

    def _whole(self) -> OutputText:
        return OutputText(text="".join(self.texts), logprobs=list(self.logprobs))

    def done_fields(self, part: OutputText) -> dict[str, Any]:
        """Return the text and its tokens."""
        return {"text": part.text, "logprobs": part.logprobs}

    def item(self, status: ItemStatus, *, is_begun: bool = True) -> OutputItem:
        """Return the current message."""
        content = [self._whole()] if is_begun else []
        return MessageItem(id=self.id, status=status, content=content)


class _OpenReasoning(_OpenContent):
    """Reasoning."""

    part, delta_kind, done_kind, prefix = ReasoningText, ReasoningDelta, ReasoningDone, "rs"

    def item(self, status: ItemStatus, *, is_begun: bool = True) -> OutputItem:
        """Return the current reasoning."""
        content = [self._whole()] if is_begun else []
        return ReasoningItem(id=self.id, status=status, content=content)


class _OpenCall:
    """A call."""

    def __init__(self, index: int, name: str, call_id: str) -> None:
        self.index, self.id, self.texts = index, f"fc_{uuid.uuid4().hex}", list[str]()
        self._name, self._call_id = name, call_id
        self._place: dict[str, Any] = {"output_index": index, "item_id": self.id}

    def item(self, status: ItemStatus, *, is_begun: bool = True) -> OutputItem:
        """Return the current call."""
        del is_begun
        arguments = "".join(self.texts)
        return FunctionCallItem(id=self.id, call_id=self._call_id, name=self._name, arguments=arguments, status=status)

    def opening(self) -> list[_Fields]:
        """Return nothing: the item has the function's name."""
        return []

    def delta(self, text: str) -> _Fields:
        """Return the event of some of the arguments."""
        return ArgumentsDelta, {**self._place, "delta": text}

    def closing(self) -> list[_Fields]:
        """Return the event that ends the arguments."""
        return [(ArgumentsDone, {**self._place, "name": self._name, "arguments": "".join(self.texts)})]
