"""Read the name of the model that a request asks for, before the rest of the request is looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import parse_qs

import msgspec

from jaxllm.server.http.decoding import LONG_BODY, peek
from jaxllm.server.http.forms import read_form

type NameReader = Callable[[bytes, Mapping[bytes, bytes], bytes], Awaitable[tuple[str, ...]]]
"""A function of a request's body, headers and query. It returns names, the first known one counts; () without any."""


class _Named(msgspec.Struct):
    model: str | None = None


async def name_in_json(body: bytes, _headers: Mapping[bytes, bytes], _query: bytes) -> tuple[str, ...]:
    """Return the field `model` of a body in JSON. Raises VLLMValidationError."""
    named = await asyncio.to_thread(peek, body, _Named) if len(body) > LONG_BODY else peek(body, _Named)
    return () if named.model is None else (named.model,)


async def name_in_form(body: bytes, headers: Mapping[bytes, bytes], _query: bytes) -> tuple[str, ...]:
    """Return the field `model` of a form. Raises VLLMValidationError."""
    kind = headers.get(b"content-type", b"")
    form = await asyncio.to_thread(read_form, body, kind) if len(body) > LONG_BODY else read_form(body, kind)
    name = form.fields.get("model")
    return (name,) if isinstance(name, str) and name else ()


async def name_in_query(_body: bytes, _headers: Mapping[bytes, bytes], query: bytes) -> tuple[str, ...]:
    """Return the value of `model` in the query."""
    return tuple(parse_qs(query.decode("latin-1")).get("model", ()))[-1:]
