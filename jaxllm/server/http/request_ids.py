"""Make and choose the ids of requests: the server's, or the client's if well formed."""

from __future__ import annotations

import os
import re
from typing import Any

_WELL_FORMED = re.compile(rb"[A-Za-z0-9._-]{1,128}")


def new_request_id(headers: dict[bytes, bytes]) -> tuple[str, str | None]:
    """Return a new id, and the client's X-Request-Id if it is well formed."""
    client_id = headers.get(b"x-request-id", b"")
    return os.urandom(16).hex(), _well_formed(client_id) if client_id else None


def headers_of(raw_request: Any) -> dict[bytes, bytes]:
    """Return the headers of a Starlette request by lower-case name; none for None."""
    if raw_request is None:
        return {}
    return {name.lower().encode(): value.encode(errors="replace") for name, value in raw_request.headers.items()}


def shown_request_id(of_header: str | None, of_body: str | None, new_id: str) -> str:
    """Return the id that an answer shows: the header's, or a well-formed one from the body, or `new_id`."""
    return of_header or _well_formed((of_body or "").encode()) or new_id


def _well_formed(client_id: bytes) -> str | None:
    """Return a client's id if it can be shown: up to 128 letters, digits, dots, dashes and underscores."""
    return client_id.decode() if _WELL_FORMED.fullmatch(client_id) else None
