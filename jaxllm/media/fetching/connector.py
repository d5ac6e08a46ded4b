"""Turn the URL of an image, a video or a sound into bytes, safely: the host, the size and the time are limited."""

from __future__ import annotations

import base64
import binascii
import os
import re
import socket
import ssl
import stat
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.errors import MediaError, MediaFetchError
from jaxllm.media.fetching.addresses import Address, is_private, is_public, parse_address
from jaxllm.media.fetching.download import Deadline, Redirect, download, too_large
from jaxllm.media.fetching.urls import HttpUrl, normalize_host, parse_http_url

_MAX_REDIRECTS = 5
_MAX_ADDRESSES = 4
"""How many of a host's addresses are tried."""
_MAX_LOOKUPS = 64
"""How many names are looked up at once."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """The limits of one item."""

    timeout: float
    """Seconds, over all redirects."""
    max_bytes: int


FETCH_LIMITS: Mapping[str, FetchLimits] = MappingProxyType(
    {
        "image": FetchLimits(5.0, 256 * _MIB),
        "video": FetchLimits(30.0, 256 * _MIB),
        "audio": FetchLimits(10.0, 25 * _MIB),
    }
)
"""vLLM's limits by modality."""


class MediaConnector:
    """Fetches media within the limits of an operator.

    `data:` URLs hold base64. `file:` URLs need `allowed_local_media_path`, a folder; links in a path are followed and
    must end inside it. `http:` and `https:` URLs may only name a host of `allowed_media_domains`, if there are any, and
    that host may only have public addresses. `allow_private_addresses` lets the hosts of `allowed_media_domains` have
    private and loopback addresses too (link-local ones never). The host is looked up once and the connection goes to
    the checked address; a redirect is checked in the same way.
    """

    def __init__(
        self,
        *,
        allowed_local_media_path: str = "",
        allowed_media_domains: Iterable[str] | None = None,
        allow_redirects: bool = True,
        allow_private_addresses: bool = False,
        limits: Mapping[str, FetchLimits] = FETCH_LIMITS,
    ) -> None:
        """Make a connector. Raises VLLMValidationError for unusable settings."""
        self._folder = _media_folder(allowed_local_media_path)
        self._domains = _media_domains(allowed_media_domains)
        self._allow_redirects = allow_redirects
        self._allow_private = allow_private_addresses
        if allow_private_addresses and not self._domains:
            message = (
                "allow_private_addresses needs allowed_media_domains: name the hosts with private addresses there."
            )
            raise VLLMValidationError(message, parameter="allow_private_addresses", value=True)
        self._limits = limits
        self._lookups = threading.BoundedSemaphore(_MAX_LOOKUPS)

    def fetch(self, url: str, modality: str = "image") -> bytes:
        """Return the bytes that a URL names. `modality` (image, video or audio) selects the limits.

        It blocks until then, at most for the timeout. Raises MediaError for a URL that is refused or an item that is
        too large, and MediaFetchError if a host does not deliver it.
        """
        limits = self._limits[modality]
        try:
            match url[:8].partition(":")[0].lower():
                case "data":
                    return _read_data_url(url, limits.max_bytes)
                case "file":
                    return self._read_file(url, limits.max_bytes)
                case "http" | "https":
                    return self._download(url, limits)
            raise MediaError("the media URL must begin with https:, http:, data: or file:.")
        except MediaError as error:
            error.parameter = f"{modality}_url"
            raise

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def _download(self, url: str, limits: FetchLimits) -> bytes:
        deadline = Deadline(limits.timeout)
        target = parse_http_url(url)
        for _ in range(_MAX_REDIRECTS + 1):
            addresses = self._checked_addresses(target, deadline)
            tls = self._tls if target.scheme == "https" else None
            answer = download(target, addresses, deadline=deadline, max_bytes=limits.max_bytes, tls=tls)
            if not isinstance(answer, Redirect):
                return answer
            if not self._allow_redirects:
                raise MediaFetchError("the media URL redirects, and redirects are not allowed here.")
            target = target.redirect(answer.location)
        raise MediaFetchError(f"the media URL redirects more than {_MAX_REDIRECTS} times.")

    def _checked_addresses(self, url: HttpUrl, deadline: Deadline) -> list[Address]:
        """Return addresses of the host, looked up once. Raises MediaError unless all of them are allowed."""
        if self._domains and url.host not in self._domains:
            message = f"the media URL's host {url.host!r} is not one of allowed_media_domains."
            raise MediaError(message)
        addresses = self._look_up(url, deadline)
        if not all(is_public(address) or (self._allow_private and is_private(address)) for address in addresses):
            raise MediaError(f"the media URL's host {url.host!r} is not on the public internet.")
        return addresses[:_MAX_ADDRESSES]

    def _look_up(self, url: HttpUrl, deadline: Deadline) -> list[Address]:
        try:
            return [parse_address(url.host)]
        except ValueError:
            pass  # a name
        lookup = self._start_lookup(url)
        try:
            answers = lookup.result(deadline.remaining())
            addresses = list(dict.fromkeys(parse_address(str(answer[4][0])) for answer in answers))
        except (OSError, ValueError) as error:  # TimeoutError is one
            raise MediaFetchError(f"the media URL's host {url.host!r} could not be looked up.") from error
        if not addresses:
            raise MediaFetchError(f"the media URL's host {url.host!r} has no address.")
        return addresses

    def _start_lookup(self, url: HttpUrl) -> Future[Any]:
        """Look a name up in a thread of its own: it has no timeout, and one that hangs must not keep others waiting.

        Raises MediaFetchError if too many hang already.
        """
        if not self._lookups.acquire(blocking=False):
            raise MediaFetchError(f"{_MAX_LOOKUPS} hosts of media URLs are being looked up already: try again later.")
        lookup: Future[Any] = Future()

        def look_up() -> None:
            try:
                lookup.set_result(socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM))
            except (OSError, ValueError) as error:
                lookup.set_exception(error)
            finally:
                self._lookups.release()

        threading.Thread(target=look_up, name="jaxllm-media-dns", daemon=True).start()
        return lookup

    def _read_file(self, url: str, max_bytes: int) -> bytes:
        if self._folder is None:
            message = "file: URLs are refused: start with --allowed-local-media-path FOLDER to allow those of a folder."
            raise MediaError(message)
        path = _file_path(url)
        try:
            path = path.resolve()
            is_inside = path.is_relative_to(self._folder)
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle
            raise MediaError("the file: URL names no readable file.") from error
        if not is_inside:
            raise MediaError("the file: URL names a file outside the folder of --allowed-local-media-path.")
        return _read_regular_file(path, max_bytes)


def _media_folder(path: str) -> Path | None:
    if not path:
        return None
    folder = Path(path).resolve()
    if not folder.is_dir():
        message = f"allowed_local_media_path {path!r} is not a folder."
        raise VLLMValidationError(message, parameter="allowed_local_media_path", value=path)
    return folder


def _media_domains(domains: Iterable[str] | None) -> frozenset[str]:
    try:
        return frozenset(
            normalize_host(domain) for domain in ([domains] if isinstance(domains, str) else domains or ())
        )
    except MediaError as error:
        message = "allowed_media_domains are host names such as images.example.com, without scheme, port and wildcards."
        raise VLLMValidationError(message, parameter="allowed_media_domains", value=domains) from error


_DATA_HEADER = re.compile(r"data:([^,;]*)(?:;[^,;]*)*;base64,", re.IGNORECASE)
_MAX_DATA_HEADER = 256


def _read_data_url(url: str, max_bytes: int) -> bytes:
    header = _DATA_HEADER.match(url, 0, _MAX_DATA_HEADER)
    if header is None:
        raise MediaError("a data: URL must have the form data:image/png;base64,DATA.")
    if (len(url) - header.end()) * 3 // 4 > max_bytes + 2:
        raise too_large(max_bytes)
    try:
        data = base64.b64decode(url[header.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError("the data: URL does not hold valid base64.") from error
    if len(data) > max_bytes:
        raise too_large(max_bytes)
    return data


_FILE_URL = re.compile(r"file:(?://(?:localhost)?)?(/[^?#\x00-\x1f]*)", re.IGNORECASE)


def _file_path(url: str) -> Path:
    matched = _FILE_URL.fullmatch(url)
    if matched is None:
        message = "a file: URL must have the form file:///FOLDER/FILE, with other characters percent-encoded."
        raise MediaError(message)
    return Path(unquote(matched[1], errors="surrogateescape"))


def _read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Return a file's bytes. A link is not followed: the path was resolved, so there is one only if it was put there
    since. Raises MediaError for what is no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise MediaError("the file: URL names no regular file.")
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError("the file: URL names no readable file.") from error
    if len(data) > max_bytes:
        raise too_large(max_bytes)
    return data
