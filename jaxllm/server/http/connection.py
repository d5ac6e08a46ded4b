"""Limit a connection: the size of heads and trailers, the time for a head, the number of pipelined requests, and the
time that a client may leave its answer unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.middleware.message_logger import MessageLoggerMiddleware
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.online.request_stream import TextOutbox
from jaxllm.server.http.endpoint import RELAY, DirectWay, Reply
from jaxllm.server.http.errors import make_error

PIECE = 1024
"""Bytes that the parser gets at a time, so that it stops soon after a limit is passed."""
MAX_AHEAD = 4
"""Pipelined requests that may wait for the answer to another. Beyond them nothing is parsed or read.
"""
_SEND_BUFFER = 1 << 17
"""Bytes that the system buffers for a client that does not read, before the server waits."""
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""TCP keep-alive detects a vanished peer within two minutes, even if nothing is sent to it."""


def bounded_protocol(args: ServerArgs) -> type[HttpToolsProtocol]:
    """Return uvicorn's protocol with the limits of a server's arguments."""
    return type("BoundedHttpProtocol", (BoundedProtocol,), {"args": args})


class _Flow(FlowControl):
    """Flow control that resumes reading only once everything read is parsed."""

    is_held = False

    def resume_reading(self) -> None:
        """Resume reading, unless bytes wait to be parsed."""
        if not self.is_held:
            super().resume_reading()


class ChunkRelay:
    """Writes frames of an answer past ASGI, as chunks: a message for each, and the task that sends it, would take 8 us.

    It has all that a token's text needs on this side of the system, since most of the time is spent in looking for it.
    """

    __slots__ = ("_pieces", "_write", "frames", "is_open", "num_tokens", "outbox")

    def __init__(self, write: Callable[[bytes], None], *, is_open: bool) -> None:
        self._write = write
        self._pieces: list[bytes] = []
        """Frames that are kept for the outbox to flush."""
        self.outbox = TextOutbox()
        self.is_open = is_open
        """True while the client is there and reads."""
        self.frames: Callable[[str], bytes] = str.encode
        self.num_tokens = 0

    def write(self, text: str, num_tokens: int) -> None:
        """Take the frames of a text, if it has any."""
        self.num_tokens += num_tokens
        if text and (piece := self.frames(text)):
            if not self.outbox.holds:
                self._write(b"%x\r\n%b\r\n" % (len(piece), piece))
                return
            if not self._pieces:
                self.outbox.relays.append(self)
            self._pieces.append(piece)

    def flush(self) -> None:
        """Write the frames that were kept, as one chunk."""
        pieces, self._pieces = self._pieces, []
        chunk = b"".join(pieces)
        self._write(b"%x\r\n%b\r\n" % (len(chunk), chunk))


def _application(app: Any) -> object:
    """Return the application inside uvicorn's own middleware, which changes nothing that is sent."""
    while isinstance(app, ProxyHeadersMiddleware | MessageLoggerMiddleware):
        app = app.app
    return app


class BoundedProtocol(HttpToolsProtocol):
    """One connection with limits. Without them httptools would keep heads and trailers of any size and wait for them
    forever, and uvicorn would parse any number of requests ahead of their answers.
    """

    args: ServerArgs

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        """Bytes received of the current request's head."""
        self._trailer_bytes = 0
        """Bytes received since the last content of a body: chunk sizes, chunk extensions and trailers."""
        self._in_head, self._is_refused = True, False
        self._unparsed = memoryview(b"")
        """Bytes received but not parsed yet, because too many requests wait."""
        self._running: RequestResponseCycle | None = None
        """The request that is being answered; `cycle` is the last one that was parsed."""
        self._relay: ChunkRelay | None = None
        """The direct way to this connection of the last request that has asked for one."""
        self._way = DirectWay(_application(self.app), self._relay_of)  # type: ignore[arg-type]
        self.parser = self._new_parser()
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Expect a request."""
        super().connection_made(transport)
        self.flow = self._flow = _Flow(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers, end the request being answered, and drop the waiting ones."""
        _cancel(self._head_timer)
        _cancel(self._stall_timer)
        self._head_timer = self._stall_timer = None
        self.pipeline.clear()
        self._unparsed = memoryview(b"")
        _disconnect(self._running)
        self._open_relay(is_open=False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, or keep them for later."""
        if not self._is_refused:
            self._unset_keepalive_if_required()
            self._unparsed = memoryview(bytes(self._unparsed) + data if self._unparsed else data)
            self._parse()

    def on_response_complete(self) -> None:
        """Start the next request, and resume reading if there is room for more."""
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()
        self._parse()
        if not self.pipeline and self._head_timer is None and self._in_head and self._head_bytes:
            self._expect_head()  # it began while another request was answered

    def _parse(self) -> None:
        """Parse received bytes until enough requests wait."""
        while self._unparsed and len(self.pipeline) < MAX_AHEAD and not self.transport.is_closing():
            piece, self._unparsed = self._unparsed[:PIECE], self._unparsed[PIECE:]
            self._feed(piece)
        if self._is_refused or self.transport.is_closing():
            self._unparsed = memoryview(b"")
            return
        was_held, self._flow.is_held = self._flow.is_held, bool(self._unparsed)
        if self._flow.is_held:
            self.flow.pause_reading()
        elif was_held:
            self.flow.resume_reading()

    def _feed(self, piece: memoryview | bytes) -> None:
        """Parse a piece of a request. Refuse the request if a limit is passed."""
        if self._in_head:
            self._head_bytes += len(piece)
        else:
            self._trailer_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(piece[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.logger.warning("Invalid HTTP request received.")
            self._end(HTTPStatus.BAD_REQUEST, "Invalid HTTP request received.")
        if self._is_refused:
            return
        if self._in_head and self._head_bytes > self.args.h11_max_incomplete_event_size:
            self._refuse_head("headers")
        elif self._trailer_bytes > self.args.h11_max_incomplete_event_size:
            self._refuse_head("trailers")

    def _ignore_upgrade(self, rest: memoryview | bytes) -> None:
        """Continue a request that asks for a protocol upgrade: parse its head again without the upgrade."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self._end(HTTPStatus.BAD_REQUEST, "This server is no proxy: CONNECT has no meaning here.")
            return
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser, self._head_bytes = self._new_parser(), 0
        self._feed(b"\r\n".join([*lines, b"", b""]))
        if rest and not self._is_refused:
            self._feed(rest)

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        return parser

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, unless there are too many. Ignore trailers."""
        if self._is_refused or not self._in_head:
            return
        if len(self.headers) >= self.args.h11_max_header_count:
            self._refuse_head("headers")
            return
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start answering, unless the head was refused or is to be parsed again."""
        if self._is_refused or self.parser.should_upgrade():
            return
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.args.h11_max_incomplete_event_size:
            self._refuse_head("headers")
            return
        self._in_head = False
        _cancel(self._head_timer)
        self._head_timer = None
        is_next = not self._is_answering
        super().on_headers_complete()
        if is_next:
            self._running = self.cycle
        self.cycle.scope[RELAY] = self._way  # type: ignore[literal-required]

    def on_message_begin(self) -> None:
        """Expect the headers of a request, also of the next one on a connection that was kept alive."""
        self._head_bytes, self._in_head = max(1, self._head_bytes), True
        if self._head_timer is None and not self._is_answering:
            self._expect_head()
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        """Add a part of the body."""
        self._trailer_bytes = 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Finish the body."""
        if not self._is_refused and not self.parser.should_upgrade():
            self._head_bytes = self._trailer_bytes = 0
            self._in_head = True  # what comes next is another head
            super().on_message_complete()

    def pause_writing(self) -> None:
        """Pause writing to a slow client, for a limited time."""
        super().pause_writing()
        self._open_relay(is_open=False)
        self._stall_timer = self.loop.call_later(self.args.stalled_client_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Resume writing: the client has read."""
        _cancel(self._stall_timer)
        self._stall_timer = None
        super().resume_writing()
        self._open_relay(is_open=True)

    def _open_relay(self, *, is_open: bool) -> None:
        if self._relay is not None:
            self._relay.is_open = is_open

    def _relay_of(self) -> ChunkRelay:
        """Return the direct way to this connection for the request that is being answered."""
        self._relay = ChunkRelay(
            self.transport.write, is_open=not (self.flow.write_paused or self.transport.is_closing())
        )
        return self._relay

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.args.header_timeout, self._refuse_slow)

    def _refuse_slow(self) -> None:
        if self._head_bytes:
            self._end(HTTPStatus.REQUEST_TIMEOUT, "The request's headers have not come in time.")
        else:
            self.transport.close()

    def _refuse_head(self, what: str) -> None:
        message = f"The request's {what} are larger, or more, than this server takes"
        self._end(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"{message} (--h11-max-incomplete-event-size, --h11-max-header-count).",
        )

    def _end(self, status: HTTPStatus, message: str) -> None:
        """Answer in OpenAI's form and close the connection; in the middle of another answer, only close it."""
        self._is_refused = True
        if self.transport.is_closing():
            return
        if self._is_answering and not self._can_refuse_body:
            self.transport.abort()
            return
        if not self._in_head and not self._is_answering:
            self.transport.close()  # this request is already answered
            return
        _disconnect(self._running)
        reply = Reply.error(make_error(status, message))
        assert isinstance(reply.body, bytes)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(reply.body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + reply.body)
        self.transport.close()

    @property
    def _can_refuse_body(self) -> bool:
        """Return whether the request being received is the next to answer and its answer has not begun."""
        return not self._in_head and self.cycle is self._running and not self.cycle.response_started


def _disconnect(cycle: RequestResponseCycle | None) -> None:
    """Tell the request's handler that its client has left."""
    if cycle is not None and not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def set_up(listener: socket.socket, stall_seconds: float) -> None:
    """Disable Nagle's algorithm, limit the send buffer and enable keep-alive, for all connections of a listener, which
    have its options. A Unix socket needs none of these.
    """
    with contextlib.suppress(OSError):  # not every system has all of them
        # uvloop leaves this off for a socket passed to it; each piece would wait for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_seconds * 1000))
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
