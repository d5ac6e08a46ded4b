"""Read http and https URLs with one strict parser, so that what is checked is what is connected to."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import quote, urljoin

from jaxllm.media.errors import MediaError

MAX_URL_LENGTH = 8192
_MAX_HOST_LENGTH = 253

# Parsers disagree about these: some drop them, some take a backslash for a slash.
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\\\ud800-\udfff]")
_URL = re.compile(r"(https?)://([^/?#]*)([^#]*)", re.IGNORECASE)
_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:@\[\]]+))(?::([0-9]{0,5}))?")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_UNENCODED = "%/?:@!$&'()*+,;=~[]"
"""Characters of a path and query that stay as they are."""


@dataclass(frozen=True, slots=True)
class HttpUrl:
    """An http or https URL in its parts. A fragment is dropped."""

    scheme: str
    """http or https."""
    host: str
    """A name of ASCII letters in lower case, without a final dot, or an IP address in its usual form."""
    port: int
    target: str
    """The path and query, percent-encoded, from the first slash."""

    @property
    def authority(self) -> str:
        """The host and, unless it is the scheme's, the port: the value of the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"

    def redirect(self, location: str) -> HttpUrl:
        """Return the URL that a redirect from this one leads to; `location` may be relative.

        Raises MediaError as `parse_http_url` does.
        """
        _check_characters(location)
        try:
            joined = urljoin(str(self), location)
        except ValueError as error:
            raise MediaError("the media URL redirects to an invalid URL.") from error
        return parse_http_url(joined)


def parse_http_url(text: str) -> HttpUrl:
    """Return the parts of an http or https URL.

    Raises MediaError for what different parsers read differently (backslashes, control characters, user names, IPv4
    addresses as one number or in octal, zones of IPv6 addresses), and for ports below 1024 other than 80 and 443.
    """
    _check_characters(text)
    matched = _URL.match(text)
    if matched is None:
        raise MediaError("the media URL must begin with http:// or https:// and a host.")
    scheme, authority, target = matched[1].lower(), matched[2], matched[3]
    if "@" in authority:
        raise MediaError("the media URL has a user name, which is not supported: remove what stands before the @.")
    parts = _AUTHORITY.fullmatch(authority)
    if parts is None:
        raise MediaError("the media URL has no valid host and port.")
    host = _parse_ipv6(parts[1]) if parts[1] else normalize_host(parts[2])
    port = int(parts[3] or _DEFAULT_PORTS[scheme])
    if port not in (80, 443) and not 1024 <= port <= 65_535:
        raise MediaError(f"the media URL has port {port}: it must be 80, 443 or from 1024 to 65535.")
    target = quote(target, safe=_UNENCODED)
    return HttpUrl(scheme, host, port, target if target.startswith("/") else f"/{target}")


def normalize_host(text: str) -> str:
    """Return a host name in ASCII and lower case (IDNA), without a final dot; a plain IPv4 address stays as it is.

    Raises MediaError for an invalid name, and for a number that is no IPv4 address of four decimal parts.
    """
    if len(text) > _MAX_HOST_LENGTH:
        raise MediaError(f"the media URL's host is longer than {_MAX_HOST_LENGTH} characters.")
    try:
        host = text.encode("idna").decode("ascii").lower().removesuffix(".")
    except UnicodeError as error:
        raise MediaError("the media URL's host is not a valid name.") from error
    labels = host.split(".")
    if len(host) > _MAX_HOST_LENGTH or not all(_LABEL.fullmatch(label) for label in labels):
        raise MediaError("the media URL's host is not a valid name.")
    if _NUMBER.fullmatch(labels[-1]):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError as error:
            message = "the media URL's host must be a name or an IPv4 address of four decimal numbers."
            raise MediaError(message) from error
    return host


def _parse_ipv6(text: str) -> str:
    try:
        return str(ipaddress.IPv6Address(text))
    except ValueError as error:
        raise MediaError("the media URL's host is not a valid IPv6 address.") from error


def _check_characters(text: str) -> None:
    if len(text) > MAX_URL_LENGTH:
        raise MediaError(f"the media URL is longer than {MAX_URL_LENGTH} characters.")
    if _FORBIDDEN.search(text):
        raise MediaError("the media URL has a backslash or a control character: percent-encode it.")
