"""The events of a streamed response, by type."""

from __future__ import annotations

import msgspec

from jaxllm.server.openai.logprobs import ChatTokenLogprob
from jaxllm.server.responses.objects import OutputItem, Part, Response


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """An event of a response."""

    sequence_number: int
    """The events of a response are numbered from 0."""


class _OfResponse(Event, frozen=True, kw_only=True):
    response: Response


class ResponseCreated(_OfResponse, frozen=True, kw_only=True, tag="response.created"):
    """The request was admitted."""


class ResponseQueued(_OfResponse, frozen=True, kw_only=True, tag="response.queued"):
    """The request waits in the background."""


class ResponseInProgress(_OfResponse, frozen=True, kw_only=True, tag="response.in_progress"):
    """The response is in progress."""


class ResponseCompleted(_OfResponse, frozen=True, kw_only=True, tag="response.completed"):
    """The response is whole."""


class ResponseIncomplete(_OfResponse, frozen=True, kw_only=True, tag="response.incomplete"):
    """The response was cut short."""


class ResponseFailed(_OfResponse, frozen=True, kw_only=True, tag="response.failed"):
    """The response could not be finished."""


class _OfOutput(Event, frozen=True, kw_only=True):
    output_index: int
    """The number of the item in the response's output, from 0."""


class ItemAdded(_OfOutput, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item of the output begins."""

    item: OutputItem


class ItemDone(_OfOutput, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An item of the output is whole."""

    item: OutputItem


class _OfPart(_OfOutput, frozen=True, kw_only=True):
    item_id: str
    content_index: int = 0
    """The number of the part in the item's content: each item has one."""


class PartAdded(_OfPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    """The content of an item begins."""

    part: Part


class PartDone(_OfPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    """The content of an item is whole."""

    part: Part


class TextDelta(_OfPart, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """Some of a message's text."""

    delta: str
    logprobs: list[ChatTokenLogprob] = []


class TextDone(_OfPart, frozen=True, kw_only=True, tag="response.output_text.done"):
    """A message's text."""

    text: str
    logprobs: list[ChatTokenLogprob] = []


class ReasoningDelta(_OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """Some of the text that the model reasons in."""

    delta: str


class ReasoningDone(_OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """The text that the model has reasoned in."""

    text: str


class _OfCall(_OfOutput, frozen=True, kw_only=True):
    item_id: str


class ArgumentsDelta(_OfCall, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """Some of the JSON text of a call's arguments."""

    delta: str


class ArgumentsDone(_OfCall, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """The JSON text of a call's arguments."""

    name: str
    arguments: str


class StreamError(Event, frozen=True, kw_only=True, tag="error"):
    """The stream cannot go on; the response may."""

    code: str
    message: str
    param: None = None


type ResponseEvent = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | StreamError
)
