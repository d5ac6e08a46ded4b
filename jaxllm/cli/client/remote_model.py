"""A model behind a server with OpenAI's API, for subcommands without an event loop of their own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from jaxllm.cli.client.openai_client import Choice, Model, OpenAIClient, UnreachableError

URL = "http://localhost:8000/v1"


def add_remote_flags(group: Any) -> None:
    """Add the flags that choose the server and one of its models."""
    group.add_argument("--url", metavar="URL", help=f"the server's address; default: {URL}")
    group.add_argument("--model-name", metavar="NAME", help="the model; default: the first that the server lists")
    group.add_argument("--api-key", metavar="KEY", help="default: the environment variable OPENAI_API_KEY")


class RemoteModel:
    """A model of a server. Each request has its own event loop and connection, and Ctrl-C ends it."""

    def __init__(self, client: OpenAIClient, name: str, defaults: Mapping[str, Any] | None = None) -> None:
        self.name = name
        """The server's name for the model."""
        self.defaults = defaults
        """The model's default sampling; None if unknown."""
        self._client = client

    @classmethod
    def find(cls, args: argparse.Namespace) -> RemoteModel:
        """Return the model that a command line names. Raises VLLMValidationError, or RequestError without a server."""
        url = args.url or URL
        if not urlsplit(url).path.strip("/"):
            url = url.rstrip("/") + "/v1"
        client = OpenAIClient(url, api_key=args.api_key)
        try:
            if args.model_name:
                return cls(client, args.model_name)
            first = asyncio.run(_first_model(client))
            return cls(client, first.id, first.default_sampling_params)
        except UnreachableError as error:
            message = f"{error}. Start a server with jaxllm serve MODEL, or name one with --url."
            raise UnreachableError(message) from error

    def stream(
        self, endpoint: str, fields: Mapping[str, Any], take: Callable[[Choice], None], *, counts: bool = False
    ) -> int:
        """Request a stream, pass its chunks to `take`, and return the number of tokens, if `counts`.

        Raises RequestError, and KeyboardInterrupt if Ctrl-C is pressed.
        """
        body = {"model": self.name, **fields, "stream": True}
        if counts:
            body["stream_options"] = {"include_usage": True}
        return asyncio.run(self._stream(endpoint, body, take))

    async def _stream(self, endpoint: str, body: Mapping[str, Any], take: Callable[[Choice], None]) -> int:
        num_tokens = 0
        async with self._client, contextlib.aclosing(self._client.stream(endpoint, body)) as chunks:
            async for chunk in chunks:
                if chunk.usage is not None:
                    num_tokens = chunk.usage.completion_tokens or 0
                for choice in chunk.choices:
                    take(choice)
        return num_tokens


async def _first_model(client: OpenAIClient) -> Model:
    async with client:
        return (await client.models("/models"))[0]
