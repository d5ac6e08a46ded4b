"""What the routes of one server share, under vLLM's names where it has them."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from jaxllm.server.http.errors import RequestFailedError

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

    from jaxllm.engine.online.async_llm import AsyncLLM
    from jaxllm.resolve.vllm_config import VllmConfig
    from jaxllm.server.anthropic.serving import AnthropicServingMessages
    from jaxllm.server.arguments import ServerArgs
    from jaxllm.server.ollama.serving import OllamaServing
    from jaxllm.server.openai.serving_chat import OpenAIServingChat
    from jaxllm.server.openai.serving_completion import OpenAIServingCompletion
    from jaxllm.server.openai.serving_models import OpenAIServingModels
    from jaxllm.server.openai.serving_tokenization import OpenAIServingTokenization
    from jaxllm.server.pooling.serving import PooledServing
    from jaxllm.server.responses.serving import OpenAIServingResponses

DRAINING = "The server is about to end, and takes no more requests: another one may."


class ServerState:
    """The attributes of `app.state`, set by `init_app_state`."""

    args: argparse.Namespace
    server_args: ServerArgs
    engine_client: AsyncLLM
    vllm_config: VllmConfig
    openai_serving_models: OpenAIServingModels
    openai_serving_chat: OpenAIServingChat
    openai_serving_completion: OpenAIServingCompletion
    openai_serving_responses: OpenAIServingResponses
    openai_serving_tokenization: OpenAIServingTokenization
    anthropic_serving_messages: AnthropicServingMessages
    ollama_serving: OllamaServing
    pooled_serving: PooledServing
    load: ServerLoad
    registry: CollectorRegistry


@dataclass(slots=True)
class ServerLoad:
    """Counts what the server has in hand."""

    num_requests: int = 0
    """Requests to routes that run the model, from their first byte to the last of their answer."""
    is_draining: bool = False
    """True once the server was told to end: it takes no more requests."""

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request that runs the model while its answer is made."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    def check_open(self) -> None:
        """Raise RequestFailedError, 503, while the server drains."""
        if self.is_draining:
            raise RequestFailedError(HTTPStatus.SERVICE_UNAVAILABLE, DRAINING)


async def check_serving(state: ServerState) -> None:
    """Raise what says why requests are not taken: the server drains, or the engine sleeps, hangs or has ended."""
    state.load.check_open()
    await state.engine_client.check_health()
