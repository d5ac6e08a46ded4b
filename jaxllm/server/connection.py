"""Connections are bounded: the head of a request by size and time, and a client that does not read by time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxllm.server.arguments import ServerArgs
from jaxllm.server.endpoint import Reply
from jaxllm.server.errors import make_error

SEND_BUFFER = 1 << 17
"""The system keeps so many bytes for a client that does not read, before the server itself waits."""
KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
"""A peer that is gone without a word is noticed in two minutes, though nothing is sent to it."""


def bounded_protocol(args: ServerArgs) -> type[HttpToolsProtocol]:
    """Return uvicorn's protocol with the limits of a server's arguments."""
    return type("BoundedHttpProtocol", (BoundedProtocol,), {"args": args})


class BoundedProtocol(HttpToolsProtocol):
    """One connection. httptools itself would keep a head of any size, and wait for it for ever."""

    args: ServerArgs

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        """How much of the present request's head has come."""
        self._in_head, self._is_refused = True, False
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Expect a request."""
        super().connection_made(transport)
        _set_up(transport.get_extra_info("socket"), self.args.stalled_client_timeout)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        _cancel(self._head_timer)
        _cancel(self._stall_timer)
        self._head_timer = self._stall_timer = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in what has come, if the head of the request does not grow too large with it."""
        if self._is_refused:
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self.args.h11_max_incomplete_event_size:
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._end(HTTPStatus.BAD_REQUEST, msg)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header, unless there are too many."""
        if self._is_refused:
            return
        if len(self.headers) >= self.args.h11_max_header_count:
            self._refuse_head()
            return
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer, unless the head was refused."""
        if self._is_refused:
            return
        self._in_head = False
        _cancel(self._head_timer)
        self._head_timer = None
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.args.h11_max_incomplete_event_size:
            self._refuse_head()
            return
        super().on_headers_complete()

    def on_message_begin(self) -> None:
        """Expect the headers of a request, be it another on a connection that was kept alive."""
        self._head_bytes, self._in_head = max(1, self._head_bytes), True
        if self._head_timer is None and not self._is_answering:
            self._expect_head()
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        """Take in a part of the body."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Go on: the body is whole."""
        if not self._is_refused:
            self._head_bytes, self._in_head = 0, True  # what comes next is another head
            super().on_message_complete()

    def pause_writing(self) -> None:
        """Wait for a client that does not read as fast as it is sent to, but not for ever."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self.args.stalled_client_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: the client has read."""
        _cancel(self._stall_timer)
        self._stall_timer = None
        super().resume_writing()

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

    def _refuse_head(self) -> None:
        message = "The request's headers are larger, or more, than this server takes"
        self._end(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"{message} (--h11-max-incomplete-event-size, --h11-max-header-count).",
        )

    def _end(self, status: HTTPStatus, message: str) -> None:
        """Answer in OpenAI's form and close the connection; in the middle of another answer, only close it."""
        self._is_refused = True
        if self.transport.is_closing():
            return
        if self._is_answering:
            self.transport.abort()
            return
        reply = Reply.error(make_error(status, message))
        assert isinstance(reply.body, bytes)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(reply.body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + reply.body)
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _set_up(connection: socket.socket | None, stall_seconds: float) -> None:
    """Let the system send at once, keep little for a peer, and ask a silent one whether it is there; a Unix socket
    does so by itself.
    """
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):  # not every system has all of them
        # uvloop leaves this off for a socket that it is given; a piece would wait for the last one's acknowledgement.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_seconds * 1000))
        for name, value in KEEPALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
