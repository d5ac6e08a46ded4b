"""Read a server's answers, whole or as streams, slowly or in part, into a form in which they can be compared."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from lib.servers import HOST, RefusedError, ServerError

from check.soaking.requests import Ask

SMALL_BUFFER = 4096
"""The bytes that a slow reader's system buffers before the server has to wait."""


@dataclass
class Said:
    """A server's answer to a request, by the index of the choice."""

    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    prompt_logprobs: list[Any] = field(default_factory=list)
    usage: tuple[int, int] | None = None

    def add(self, piece: dict[str, Any]) -> None:
        """Take in a whole answer, or an event of one. Raises ServerError for an event that is an error."""
        if "error" in piece:
            raise ServerError(f"an event is an error: {piece['error']}")
        for choice in piece["choices"]:
            index = choice["index"]
            message = choice.get("message") or choice.get("delta") or {}
            self.texts[index] = self.texts.get(index, "") + (choice.get("text") or message.get("content") or "")
            if choice.get("finish_reason") is not None:
                self.ends[index] = choice["finish_reason"], choice.get("stop_reason")
            if choice.get("logprobs") is not None:
                self.logprobs.setdefault(index, []).extend(_rows(choice["logprobs"]))
            if choice.get("prompt_logprobs") is not None:
                self.prompt_logprobs.append(choice["prompt_logprobs"])
        if piece.get("prompt_logprobs") is not None:
            self.prompt_logprobs.append(piece["prompt_logprobs"])
        if piece.get("usage"):
            self.usage = piece["usage"]["prompt_tokens"], piece["usage"]["completion_tokens"]

    def is_beginning_of(self, whole: Said) -> bool:
        """Return whether `whole` continues this output."""
        return all(whole.texts[index].startswith(text) for index, text in self.texts.items()) and all(
            whole.logprobs[index][: len(rows)] == rows for index, rows in self.logprobs.items()
        )


def _rows(logprobs: dict[str, Any]) -> list[Any]:
    """Return one entry per token."""
    if "content" in logprobs:
        return logprobs["content"]
    names = ("tokens", "text_offset", "token_logprobs", "top_logprobs")
    return [list(row) for row in zip(*(logprobs[name] for name in names), strict=True)]


_ports: ContextVar[set[int]] = ContextVar("ports")


def noted_ports() -> set[int]:
    """Return a set that gets the local ports of the connections that this task makes from now on."""
    ports: set[int] = set()
    _ports.set(ports)
    return ports


def _make_socket(address: tuple[Any, ...]) -> socket.socket:
    made = socket.socket(*address[:3])
    made.bind((HOST, 0))
    if (ports := _ports.get(None)) is not None:
        ports.add(made.getsockname()[1])
    return made


def open_session(base_url: str, *, keeps: bool = True) -> aiohttp.ClientSession:
    """Return a client that keeps its connections, or makes one for each request."""
    connector = aiohttp.TCPConnector(limit=0, force_close=not keeps, socket_factory=_make_socket)
    return aiohttp.ClientSession(base_url, connector=connector)


def open_slow_session(base_url: str) -> aiohttp.ClientSession:
    """Return a client for slow readers, with small buffers: unread output soon waits in the server."""

    def make_socket(address: tuple[Any, ...]) -> socket.socket:
        made = _make_socket(address)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        return made

    connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=make_socket)
    return aiohttp.ClientSession(base_url, connector=connector, read_bufsize=SMALL_BUFFER)


async def read_whole(session: aiohttp.ClientSession, ask: Ask, **more: Any) -> Said:
    """Return a whole answer; `more` are further fields of the request. Raises RefusedError."""
    said = Said()
    said.add(json.loads(await fetch(session, ask.path, ask.body | more)))
    return said


async def read_stream(
    session: aiohttp.ClientSession, ask: Ask, *, pause: float = 0.0, most: int | None = None, **more: Any
) -> Said:
    """Return a streamed answer, waiting `pause` seconds between reads; after `most` events the reader leaves.

    Raises RefusedError, and ServerError for a stream that fails or is not whole.
    """
    options = {"stream": True, "stream_options": {"include_usage": True}}
    said, num_events = Said(), 0
    async with session.post(ask.path, json=ask.body | options | more) as response:
        await _check(response)
        async with aclosing(_events(response.content.iter_any())) as events:
            async for data in events:
                if data == b"[DONE]":
                    return said
                said.add(json.loads(data))
                num_events += 1
                if num_events == most:
                    response.close()
                    return said
                if pause:
                    await asyncio.sleep(pause)
    raise ServerError("a stream has ended without [DONE]")


async def fetch(session: aiohttp.ClientSession, path: str, body: Any = None) -> bytes:
    """Return the body of an answer, to a GET request if there is no body to send. Raises RefusedError."""
    async with session.request("GET" if body is None else "POST", path, json=body) as response:
        await _check(response)
        return await response.read()


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise RefusedError(response.status, dict(response.headers), await response.text())


async def _events(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    rest = b""
    async for piece in pieces:
        *events, rest = (rest + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield event[6:]
