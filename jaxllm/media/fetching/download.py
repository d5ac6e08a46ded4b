"""Get one http or https URL from addresses that were checked before, within a deadline and a number of bytes."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from jaxllm.media.errors import MediaError, MediaFetchError
from jaxllm.media.fetching.addresses import Address
from jaxllm.media.fetching.urls import HttpUrl
from jaxllm.version import __version__

_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_BLOCK = 1 << 16
_OVERHEAD = 1 << 20
"""Bytes that a host may send beside the body: headers, sizes of chunks."""


class Deadline:
    """The time at which a fetch has to end."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Return the seconds that are left. Raises TimeoutError if none are."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        return seconds


@dataclass(frozen=True, slots=True)
class Redirect:
    """The answer of a host that has the media elsewhere."""

    location: str


def download(
    url: HttpUrl, addresses: Sequence[Address], *, deadline: Deadline, max_bytes: int, tls: ssl.SSLContext | None
) -> bytes | Redirect:
    """Return the body of a URL, or the redirect that the host answers with.

    The connection goes to the first of the addresses that takes it, by TLS if `tls` is given, through no proxy. Raises
    MediaError for a body of more than `max_bytes`, and MediaFetchError if the host does not deliver it in time, or
    compressed.
    """
    try:
        with contextlib.closing(_connect(url, addresses, deadline, tls)) as connection:
            stream = _Stream(connection, deadline, max_bytes + max_bytes // 8 + _OVERHEAD)
            stream.sendall(_request(url))
            response = http.client.HTTPResponse(cast(Any, stream), method="GET")
            response.begin()
            if response.status in _REDIRECTS:
                return Redirect(_location(response))
            _check_answer(response)
            return _read(response, max_bytes)
    except TimeoutError as error:
        message = f"the media URL's host {url.host!r} took longer than {deadline.seconds:g} s."
        raise MediaFetchError(message) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, MediaError):
            raise
        message = f"the media URL could not be fetched: the connection to {url.host!r} failed."
        raise MediaFetchError(message) from error


def _connect(
    url: HttpUrl, addresses: Sequence[Address], deadline: Deadline, tls: ssl.SSLContext | None
) -> socket.socket:
    """Return a connection to the first address that takes it; each gets its share of the time that is left."""
    failure: OSError = OSError("no address")
    for index, address in enumerate(addresses):
        connection = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_STREAM)
        try:
            connection.settimeout(deadline.remaining() / (len(addresses) - index))
            connection.connect((str(address), url.port))
            if tls is None:
                return connection
            connection.settimeout(deadline.remaining())
            return tls.wrap_socket(connection, server_hostname=url.host)
        except OSError as error:
            connection.close()
            failure = error
    raise failure


class _Stream(io.RawIOBase):
    """A connection as http.client reads it, whose waiting and bytes are limited over the whole answer."""

    def __init__(self, connection: socket.socket, deadline: Deadline, max_bytes: int) -> None:
        self._connection, self._deadline, self._left = connection, deadline, max_bytes

    def sendall(self, data: bytes) -> None:
        self._connection.settimeout(self._deadline.remaining())
        self._connection.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:  # noqa: ARG002 (http.client calls it so)
        return io.BufferedReader(self, _BLOCK)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if self._left <= 0:
            raise OSError("the answer is too long")
        self._connection.settimeout(self._deadline.remaining())
        count = self._connection.recv_into(buffer)
        self._left -= count
        return count


def _request(url: HttpUrl) -> bytes:
    lines = (
        f"GET {url.target} HTTP/1.1",
        f"Host: {url.authority}",
        f"User-Agent: jaxllm/{__version__}",
        "Accept: */*",
        "Accept-Encoding: identity",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode("ascii")


def _location(response: http.client.HTTPResponse) -> str:
    location = response.getheader("Location")
    if not location:
        raise MediaFetchError(f"the media URL's host answered with HTTP {response.status} and no Location.")
    return location.encode("latin-1").decode("utf-8", "replace")


def _check_answer(response: http.client.HTTPResponse) -> None:
    if response.status != http.client.OK:
        raise MediaFetchError(f"the media URL's host answered with HTTP {response.status}.")
    if response.getheader("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise MediaFetchError("the media URL's host sent a compressed body, though that was not asked for.")


def _read(response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    """Return the body. Raises MediaError if it is longer than `max_bytes`, if possible before it is read."""
    if response.length is not None and response.length > max_bytes:
        raise too_large(max_bytes)
    body = bytearray()
    while block := response.read(_BLOCK):
        body += block
        if len(body) > max_bytes:
            raise too_large(max_bytes)
    if response.length:
        raise MediaFetchError("the media URL's host ended the connection before the body was complete.")
    return bytes(body)


def too_large(max_bytes: int) -> MediaError:
    """Return the error for an item of more bytes than its limit."""
    return MediaError(f"the media item is larger than the limit of {max_bytes:,} bytes.")
