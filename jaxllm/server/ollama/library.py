"""Download and delete models of the hub for Ollama's clients, as lines of JSON that tell how far it has come."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.hub.pull import PullEvent, PullRequest
from jaxllm.server.models.registry import ServedModels
from jaxllm.server.ollama.answers import encode_line
from jaxllm.server.ollama.listing import LATEST
from jaxllm.server.ollama.protocol import OllamaError, OllamaPullRequest, OllamaPullStatus
from jaxllm.server.ollama.pulls import Pulls, hub_name
from jaxllm.server.openai.serving_models import cards_of

_DIGEST_LETTERS = 12


class OllamaLibrary:
    """The models of the hub's cache, for Ollama's clients."""

    def __init__(self) -> None:
        self._pulls = Pulls()

    def cut_off(self) -> None:
        """End all downloads, for the server ends."""
        self._pulls.cut_off()

    async def pull(
        self, request: OllamaPullRequest, args: argparse.Namespace
    ) -> OllamaPullStatus | AsyncGenerator[bytes, None]:
        """Download a model into the hub's cache; the lines of a stream tell how far it has come.

        Raises VLLMValidationError for what is no name on the hub, and unless it is streamed for what cannot be had.
        """
        name, token = hub_name(request.model or request.name or ""), getattr(args, "hf_token", None)
        events = self._pulls.follow(PullRequest(name, token, getattr(args, "download_dir", None)))
        if request.stream is not False:
            return _pull_lines(events)
        async with aclosing(events):
            async for event in events:
                if event.stage == "failed":
                    raise VLLMValidationError(event.error, parameter="model", value=name)
        return OllamaPullStatus(status="success")

    async def delete(self, name: str, models: ServedModels[Any], args: argparse.Namespace) -> None:
        """Delete a model from the hub's cache, unless a model of the server needs it. Raises as `Pulls.delete` does."""
        cards = [card for entry in models.entries for card in cards_of(entry)]
        if name.removesuffix(LATEST) in (card.id.removesuffix(LATEST) for card in cards):
            raise VLLMValidationError(f"model {name!r} is being served.", parameter="model", value=name)
        served = [*(each for entry in models.entries for each in entry.sources), *(card.root for card in cards)]
        await self._pulls.delete(hub_name(name), getattr(args, "download_dir", None), served)


async def _pull_lines(events: AsyncGenerator[PullEvent, None]) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a download. An error is the last one."""
    async with aclosing(events):
        yield encode_line(OllamaPullStatus(status="pulling manifest"))
        async for event in events:
            match event.stage:
                case "download":
                    yield encode_line(
                        OllamaPullStatus(
                            status=f"pulling {event.digest[:_DIGEST_LETTERS]}",
                            digest=f"sha256:{event.digest}",
                            total=event.num_bytes,
                            completed=event.num_done,
                        )
                    )
                case "verify":
                    yield encode_line(OllamaPullStatus(status="verifying sha256 digest"))
                case "done":
                    yield encode_line(OllamaPullStatus(status="writing manifest"))
                    yield encode_line(OllamaPullStatus(status="success"))
                case "failed":
                    yield encode_line(OllamaError(event.error))
