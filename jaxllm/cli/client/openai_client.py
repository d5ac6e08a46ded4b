"""A client for servers with OpenAI's API, streams included, for the client subcommands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self

import msgspec

from jaxllm.config.environment import client_api_key
from jaxllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    import aiohttp

_TOTAL_SECONDS = 6 * 3600.0
"""The timeout of a request."""
_MAX_ERROR = 2000
"""The number of characters of a server's answer that an error shows."""


class RequestError(Exception):
    """A request has failed; the message has the reason in one line."""


class UnreachableError(RequestError):
    """The server does not answer."""


class Delta(msgspec.Struct, frozen=True):
    """The text that an event adds to a chat's answer."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The older name of `reasoning`."""


class Choice(msgspec.Struct, frozen=True):
    """The part of an event about one of the answers."""

    index: int = 0
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def added(self) -> str:
        """Return the text that the event adds."""
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning or self.delta.reasoning_content or ""


class Usage(msgspec.Struct, frozen=True):
    """The numbers of tokens of a request."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None


class Chunk(msgspec.Struct, frozen=True):
    """An event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class Model(msgspec.Struct, frozen=True):
    """A model that a server serves."""

    id: str
    root: str | None = None
    """The path or id it was loaded from, if the server reports it."""
    default_sampling_params: dict[str, Any] | None = None
    """Its default sampling parameters, if the server reports them."""


class _Models(msgspec.Struct, frozen=True):
    data: list[Model]


_read_chunk = msgspec.json.Decoder(Chunk).decode
_read_models = msgspec.json.Decoder(_Models).decode


class OpenAIClient:
    """A client of one server. Use it in `async with`, from the tasks of one event loop."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        checks_certificates: bool = True,
    ) -> None:
        """Use the server at `base_url`, a URL without the endpoint. Without an api_key, OPENAI_API_KEY is sent, if set.

        Raises VLLMValidationError for an invalid URL.
        """
        if find_spec("aiohttp") is None:
            message = "the client needs a package of its own: pip install 'jaxllm[serve]'."
            raise VLLMValidationError(message, parameter="base_url")
        if not base_url.startswith(("http://", "https://")):
            message = f"{base_url!r} is no URL of a server: it begins with http:// or https://."
            raise VLLMValidationError(message, parameter="base_url", value=base_url)
        self.base_url = base_url.rstrip("/")
        key = api_key or client_api_key()
        self._headers = ({"Authorization": f"Bearer {key}"} if key else {}) | dict(headers or {})
        self._checks_certificates = checks_certificates
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        import aiohttp

        connector = aiohttp.TCPConnector(limit=0, ssl=self._checks_certificates)
        timeout = aiohttp.ClientTimeout(total=_TOTAL_SECONDS, sock_connect=30)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._session.close()

    async def models(self, endpoint: str = "/v1/models") -> list[Model]:
        """Return the server's models, at least one. Raises RequestError."""
        import aiohttp

        url = self.base_url + endpoint
        try:
            async with self._session.get(url) as response:
                body = await response.read()
                if response.status != 200:
                    raise RequestError(_shown(response.status, body))
                models = _read_models(body).data
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnreachableError(f"{url}: {error or type(error).__name__}") from error
        except msgspec.DecodeError as error:
            raise RequestError(f"{url} does not list models: {error}") from error
        if not models:
            raise RequestError(f"{url} lists no model")
        return models

    async def metrics(self, endpoint: str = "/metrics") -> str | None:
        """Return the server's metrics in Prometheus' text format; None if it has none."""
        import aiohttp

        try:
            async with self._session.get(self.base_url + endpoint) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError):
            return None

    async def stream(
        self, endpoint: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Post a body with `stream` set and yield the events.

        Raises RequestError, also if the stream ends without [DONE].
        """
        import aiohttp

        sent = {"Content-Type": "application/json", **(headers or {})}
        try:
            async with self._session.post(
                self.base_url + endpoint, data=msgspec.json.encode(body), headers=sent
            ) as response:
                if response.status != 200:
                    raise RequestError(_shown(response.status, await response.read()))
                async for data in _events(response.content.iter_any()):
                    if data == b"[DONE]":
                        return
                    chunk = _read_chunk(data)
                    if chunk.error is not None:
                        raise RequestError(_message(chunk.error))
                    yield chunk
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            raise RequestError(str(error) or type(error).__name__) from error
        except msgspec.DecodeError as error:
            raise RequestError(f"an event cannot be read: {error}") from error
        raise RequestError("the stream has ended without [DONE]")


async def _events(pieces: Any) -> AsyncGenerator[bytes, None]:
    """Yield the data of each event; comments and other fields are skipped."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _shown(status: int, body: bytes) -> str:
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        answer = body.decode("utf-8", "replace")
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return f"{status}: {_message(error)}"


def _message(error: Any) -> str:
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:_MAX_ERROR]
