"""What the routes of one server share, under vLLM's names where it has them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

    from jaxllm.config.vllm_config import VllmConfig
    from jaxllm.engine.async_llm import AsyncLLM
    from jaxllm.server.arguments import ServerArgs
    from jaxllm.server.serving_chat import OpenAIServingChat
    from jaxllm.server.serving_completion import OpenAIServingCompletion
    from jaxllm.server.serving_models import OpenAIServingModels
    from jaxllm.server.serving_tokenization import OpenAIServingTokenization


class ServerState:
    """The attributes of `app.state`, set by `init_app_state`."""

    args: argparse.Namespace
    server_args: ServerArgs
    engine_client: AsyncLLM
    vllm_config: VllmConfig
    openai_serving_models: OpenAIServingModels
    openai_serving_chat: OpenAIServingChat
    openai_serving_completion: OpenAIServingCompletion
    openai_serving_tokenization: OpenAIServingTokenization
    load: ServerLoad
    registry: CollectorRegistry


@dataclass(slots=True)
class ServerLoad:
    """Counts what the server has in hand."""

    num_requests: int = 0
    """Requests to routes that run the model, from their first byte to the last of their answer."""
    is_draining: bool = False
    """True once the server was told to end: it takes no more requests."""
