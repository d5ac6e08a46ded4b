"""Server-sent events: frames with a variable text, and the stream of a request's frames."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple, Protocol

import msgspec

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.engine.online.request_stream import RequestOutputCollector, TextRelay
from jaxllm.exceptions import EngineGenerateError, VLLMValidationError
from jaxllm.outputs import BlamedReason, RequestOutput
from jaxllm.server.http.errors import error_response

DONE = b"data: [DONE]\n\n"
_MARK = uuid.uuid4().hex
"""A text that is in no frame but where one is made, since nobody knows it."""
_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """Return the frame of a value."""
    return b"data: %b\n\n" % _encode(value)


def named_event(name: str, value: Any) -> bytes:
    """Return the frame of a value, with the event's name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(value))


def comment(text: str) -> bytes:
    """Return a frame that clients skip; it keeps the connection from idling. `text` is one line."""
    return b": %b\n\n" % text.encode()


class TextFrame(NamedTuple):
    """A frame around a text. Everything but the text is encoded once."""

    parts: list[bytes]
    """What is before the text, between its places, and after it."""

    @classmethod
    def of(cls, chunk: Callable[[str], Any]) -> TextFrame:
        """Make the frame from the value that `chunk` returns for a text."""
        return cls(event(chunk(_MARK)).split(_encode(_MARK)))

    def event(self, text: str) -> bytes:
        """Return the frame with a text."""
        return _encode(text).join(self.parts)


class AnswerRelay(TextRelay, Protocol):
    """Writes the frames of plain text to an answer's connection, without a task and without waiting."""

    frames: Callable[[str], bytes]
    """Makes the frames of a text, which may be b""."""
    num_tokens: int
    """The number of tokens whose text has come this way."""


class EngineOutputs:
    """The outputs of one request as they come. Closing it aborts the request if it still runs."""

    def __init__(self, engine: AsyncLLM, stream: RequestOutputCollector) -> None:
        self._engine, self._stream = engine, stream
        self._is_finished = False
        self._first: RequestOutput | None = None
        """The output that `pings` has waited for, until it is read."""
        self.direct: AnswerRelay | None = None
        """The direct way to the answer's connection, if there is one."""

    def __aiter__(self) -> EngineOutputs:
        """Return itself."""
        return self

    async def __anext__(self) -> RequestOutput:
        """Return the next output, merged with those that came since the last call. Raises what ended the request."""
        if self._is_finished:
            raise StopAsyncIteration
        output, self._first = self._first, None
        if output is None:
            output = await self._stream.get()
        self._is_finished = output.finished
        raise_if_failed(output)
        return output

    def relay(self, frames: Callable[[str], bytes]) -> None:
        """Write plain text as `frames` makes it, from the second output on.

        That happens while this is awaited for its next output, and only then: all that was read has to be sent.
        Without a direct way, with n > 1, and where more than text is asked for, everything is read from here.
        """
        if self.direct is not None:
            self.direct.frames = frames
            self._stream.relay_to(self.direct)

    def take_relayed(self) -> int:
        """Return the number of tokens whose text was relayed since the last call."""
        if self.direct is None:
            return 0
        num_tokens, self.direct.num_tokens = self.direct.num_tokens, 0
        return num_tokens

    async def pings(self, seconds: float) -> AsyncGenerator[bytes, None]:
        """Yield a comment at this interval until there is an output, so that proxies do not give up; none for 0."""
        while seconds and self._first is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    self._first = await self._stream.get()
                    return
            num_computed, length = await self._engine.prefill_progress(self._stream.request_id)
            self._first = self._stream.get_nowait()
            if self._first is None:
                yield comment(f"prefill {num_computed}/{length}")

    async def aclose(self) -> None:
        """Abort the request unless it has ended."""
        if not self._is_finished:
            self._is_finished = True
            await self._engine.abort(self._stream.request_id)


def raise_if_failed(output: RequestOutput) -> None:
    """Raise EngineGenerateError if the engine could not go on with a request, or VLLMValidationError if an argument of
    the request is to blame.
    """
    for completion in output.outputs:
        if completion.finish_reason == "error":
            reason = completion.stop_reason
            if isinstance(reason, BlamedReason):
                raise VLLMValidationError(f"{reason}.", parameter=reason.parameter)
            raise EngineGenerateError(str(reason))


class EventStream(AsyncGenerator[bytes, None]):
    """The events of one answer. An error becomes the last event.

    Unlike a generator's, its `aclose` ends the request even if nothing was read.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *outputs: EngineOutputs,
        last: bytes = DONE,
        failed: Callable[[BaseException], bytes] | None = None,
    ) -> None:
        """Send `frames`, made from `outputs`, and then `last`; `failed` makes the last frame from an error."""
        self._frames, self._outputs = frames, outputs
        self._last, self._failed = last, failed or (lambda error: event(error_response(error)))
        self.is_ended = False
        """True once the last frame was returned."""

    def connect(self, direct: AnswerRelay) -> None:
        """Let frames of plain text go straight to the answer's connection. Call it before anything is read.

        Whoever reads this must have sent what it has read before it reads on.
        """
        for outputs in self._outputs:
            outputs.direct = direct

    async def __anext__(self) -> bytes:
        """Return the next frames."""
        if self.is_ended:
            raise StopAsyncIteration
        try:
            return await anext(self._frames)
        except StopAsyncIteration:
            last = self._last
        except Exception as error:  # noqa: BLE001 - each has an answer
            last = self._failed(error)
        self.is_ended = True
        return last

    async def asend(self, value: None) -> bytes:
        """Return the next frames."""
        del value
        return await anext(self)

    async def athrow(self, *error: Any) -> bytes:
        """Raise an error in the generator of the frames."""
        return await self._frames.athrow(*error)

    async def aclose(self) -> None:
        """Send no more, and end the request."""
        self.is_ended = True
        try:
            await self._frames.aclose()
        finally:
            for stream in self._outputs:
                await stream.aclose()
