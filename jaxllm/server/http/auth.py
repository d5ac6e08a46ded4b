"""Authentication by API key, for all routes except a few that reveal nothing about users."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path

from jaxllm.config.environment import api_key
from jaxllm.config.server_arguments import ServerArgs
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.endpoint import ASGIApp, Receive, Refusals, Scope, Send, send_reply
from jaxllm.server.http.errors import RequestFailedError
from jaxllm.server.http.request_ids import new_request_id

_MAX_FILE = 1 << 20
_BEARER, _PLAIN = b"authorization", b"x-api-key"


class KeyChecker:
    """Compares tokens with the server's keys, which it keeps as digests."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def accepts(self, token: bytes) -> bool:
        """Return whether a token is one of the keys. The time this takes does not depend on how similar it is."""
        digest = _digest(token)
        is_known = False
        for known in self._digests:  # compare with all of them, so that the time does not tell which one matched
            is_known |= hmac.compare_digest(known, digest)
        return is_known

    def accepts_header(self, authorization: bytes) -> bool:
        """Return whether the value of an Authorization header, "Bearer KEY", has one of the keys."""
        scheme, _, token = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and self.accepts(token.strip())


class Authentication:
    """ASGI middleware: it refuses requests without a key.

    It compares the path as it was sent, before anything rewrites it: any other spelling of an open path needs a key.
    """

    def __init__(
        self, app: ASGIApp, checker: KeyChecker, open_paths: frozenset[str], refusals: Refusals, root_path: str = ""
    ) -> None:
        """Ask for keys, except at `open_paths`; a proxy may or may not have taken `root_path` off the paths."""
        self._app, self._checker = app, checker
        self._root_path, self._refusals = root_path, refusals
        self._open_paths = open_paths | {root_path + path for path in open_paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 401."""
        if scope["type"] == "http" and not self._is_open(scope) and not self._brings_key(scope["headers"]):
            error = RequestFailedError(HTTPStatus.UNAUTHORIZED, "A key is needed: Authorization: Bearer KEY.")
            new_id, _ = new_request_id({})
            make = self._refusals.at(scope["path"].removeprefix(self._root_path))
            refusal = make(error, scope.get("request_id", new_id))
            await send_reply(refusal._replace(headers=(*refusal.headers, (b"www-authenticate", b"Bearer"))), send)
            return
        await self._app(scope, receive, send)

    def _brings_key(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return whether exactly one header has a key: Authorization or, without it, Anthropic's X-Api-Key."""
        by_name = {wanted: [value for name, value in headers if name == wanted] for wanted in (_BEARER, _PLAIN)}
        if by_name[_BEARER]:
            return len(by_name[_BEARER]) == 1 and self._checker.accepts_header(by_name[_BEARER][0])
        return len(by_name[_PLAIN]) == 1 and self._checker.accepts(by_name[_PLAIN][0].strip())

    def _is_open(self, scope: Scope) -> bool:
        path = scope.get("raw_path", b"").partition(b"?")[0].decode("latin-1")
        return path in self._open_paths and scope["path"] in self._open_paths


def read_keys(args: ServerArgs) -> list[str]:
    """Return the keys of --api-key, --api-key-file and JAXLLM_API_KEY without duplicates.

    Raises VLLMValidationError for a file that cannot be read or has no keys.
    """
    keys = [*(args.api_key or ()), *_read_file(args.api_key_file)]
    environment = api_key()
    if environment is not None:
        keys.append(environment)
    return list(dict.fromkeys(keys))


def _read_file(name: str | None) -> list[str]:
    if name is None:
        return []
    try:
        with Path(name).expanduser().open(encoding="utf-8") as file:
            text = file.read(_MAX_FILE)
    except (OSError, RuntimeError, ValueError) as error:
        message = f"api_key_file={name!r} cannot be read: {error}."
        raise VLLMValidationError(message, parameter="api_key_file", value=name) from error
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        message = f"api_key_file={name!r} has no keys: write one on each line."
        raise VLLMValidationError(message, parameter="api_key_file", value=name)
    return keys


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
