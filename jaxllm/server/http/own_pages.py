"""Protect a server without keys from web pages of other origins."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from http import HTTPStatus

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.server.http.endpoint import ASGIApp, Receive, Refusals, Scope, Send, send_reply
from jaxllm.server.http.errors import RequestFailedError
from jaxllm.server.http.request_ids import new_request_id

ANY = "*"
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing. Browsers hide their answers from pages of other origins."""
_LOCAL_ENDINGS = (".localhost", ".internal")
"""Names that nobody else can point to an address, because they are not in public DNS."""


class OwnPages:
    """ASGI middleware that refuses, with 403, changing requests from pages of other origins, and requests for another
    host. A page may have pointed such a host name to this machine to pass for one of its own (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, args: ServerArgs, refusals: Refusals, *, has_keys: bool) -> None:
        """Check origins where no key is needed, and hosts where `allowed_hosts` are given or, without keys, the server
        listens on loopback alone.
        """
        self._app, self._refusals, self._root_path = app, refusals, args.root_path or ""
        self._origins = {origin.lower() for origin in args.allowed_origins}
        self._checks_origins = not has_keys and ANY not in self._origins
        self._checks_hosts = bool(args.allowed_hosts) or (not has_keys and listens_on_loopback(args))
        hostname = socket.gethostname().lower()
        self._hosts = {"localhost", hostname, f"{hostname}.local", *(name.lower() for name in args.allowed_hosts)}
        if ANY in self._hosts:
            self._checks_hosts = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 403."""
        problem = self._problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        new_id, _ = new_request_id({})
        make = self._refusals.at(scope["path"].removeprefix(self._root_path))
        await send_reply(make(RequestFailedError(HTTPStatus.FORBIDDEN, problem), scope.get("request_id", new_id)), send)

    def _problem(self, scope: Scope) -> str | None:
        """Return why a request is refused; None if it is not."""
        hosts = _values(scope, b"host")
        if self._checks_hosts and not all(map(self._is_own_host, hosts)):
            return "The Host header does not name this server: give its name to --allowed-hosts, if it is one."
        if (
            not self._checks_origins
            or scope["method"] in _READING
            or b"same-origin" in _values(scope, b"sec-fetch-site")
        ):
            return None
        for origin in _values(scope, b"origin"):
            if self._is_foreign(origin.decode("latin-1").lower(), hosts):
                return "Pages of other origins may not use this server: name theirs in --allowed-origins, or use keys."
        return None

    def _is_own_host(self, host: bytes) -> bool:
        name = _name(host.decode("latin-1").lower())
        return name in self._hosts or name.endswith(_LOCAL_ENDINGS) or _is_address(name)

    def _is_foreign(self, origin: str, hosts: Iterable[bytes]) -> bool:
        """Return whether an origin is that of a web page from elsewhere. Extensions and desktop programs have other
        schemes, which no web page can have.
        """
        scheme, _, host = origin.partition("://")
        if scheme not in ("http", "https", "null") or origin in self._origins:
            return False
        return host.encode("latin-1") not in {each.lower() for each in hosts}


def listens_on_loopback(args: ServerArgs) -> bool:
    """Return whether a server's port can only be reached from its own machine."""
    if args.uds is not None or not args.host:
        return False
    try:
        addresses = {each[4][0] for each in socket.getaddrinfo(args.host, None)}
    except (OSError, UnicodeError):  # opening the port reports it
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for each, value in scope["headers"] if each == name]


def _name(host: str) -> str:
    """Return the name or the address of a Host header, without its port."""
    if host.startswith("["):
        address, _, rest = host[1:].partition("]")
        return host if rest and not rest.startswith(":") else address
    return host.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
