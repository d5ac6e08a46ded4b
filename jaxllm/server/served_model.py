"""What answers the requests of one model: its engine, and an object for each of the server's APIs."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Self

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.resolve.vllm_config import VllmConfig
from jaxllm.server.anthropic.serving import AnthropicServingMessages
from jaxllm.server.cohere.serving import CohereServingChat
from jaxllm.server.decisions.serving import ServingDecisions
from jaxllm.server.ollama.serving import OllamaServing
from jaxllm.server.openai.serving_chat import OpenAIServingChat
from jaxllm.server.openai.serving_completion import OpenAIServingCompletion
from jaxllm.server.openai.serving_models import LoRAModule, OpenAIServingModels
from jaxllm.server.openai.serving_tokenization import OpenAIServingTokenization
from jaxllm.server.pooling.serving import PooledServing
from jaxllm.server.responses.kept import KeptResponses
from jaxllm.server.responses.serving import OpenAIServingResponses
from jaxllm.server.speech.serving import OpenAIServingTranscription
from jaxllm.server.tokens.scoring import ServingGenerativeScoring
from jaxllm.server.tokens.serving import ServingTokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The engine of a model and the objects that answer its requests."""

    engine: AsyncLLM
    models: OpenAIServingModels
    """Its names, and those of its adapters."""
    chat: OpenAIServingChat
    completion: OpenAIServingCompletion
    tokenization: OpenAIServingTokenization
    responses: OpenAIServingResponses
    messages: AnthropicServingMessages
    cohere_chat: CohereServingChat
    ollama: OllamaServing
    pooled: PooledServing
    tokens: ServingTokens
    scoring: ServingGenerativeScoring
    decisions: ServingDecisions
    transcription: OpenAIServingTranscription | None
    """None for a model that does not transcribe, or has no tokenizer."""

    @classmethod
    async def make(
        cls,
        engine: AsyncLLM,
        vllm_config: VllmConfig,
        args: argparse.Namespace,
        kept: KeptResponses,
        counted: Callable[[], AbstractContextManager[None]],
        *,
        is_again: bool = False,
        is_quiet: bool = False,
    ) -> Self:
        """Make what answers requests by way of an engine, and load the adapters of a command line.

        Responses are kept in `kept`; `counted` counts one that goes on in the background. With `is_again` the engine
        has had this before, and has the adapters. `is_quiet` logs nothing. Raises VLLMValidationError for a bad adapter
        or flag.
        """
        server_args = ServerArgs.from_cli_args(args)
        ready, names = engine.front.ready, getattr(args, "served_model_name", None)
        models = OpenAIServingModels(
            vllm_config.model_config, names, ready.default_sampling_params, sees=ready.takes_images
        )
        await models.add_all(engine, map(LoRAModule.read, server_args.lora_modules or []), are_loaded=is_again)
        chat = OpenAIServingChat(engine, models, server_args, getattr(args, "reasoning_parser", ""))
        if ready.generates and not (is_again or is_quiet):
            logger.info("%s", chat.parsers.described())
        pooled = PooledServing.of(chat, server_args)
        return cls(
            engine=engine,
            models=models,
            chat=chat,
            completion=OpenAIServingCompletion(engine, models, server_args),
            tokenization=OpenAIServingTokenization(chat, server_args),
            responses=OpenAIServingResponses(chat, kept, counted),
            messages=AnthropicServingMessages(chat),
            cohere_chat=CohereServingChat(chat),
            ollama=OllamaServing(chat, pooled.embedding),
            pooled=pooled,
            tokens=ServingTokens(chat),
            scoring=ServingGenerativeScoring(chat),
            decisions=ServingDecisions(chat),
            transcription=OpenAIServingTranscription.of(chat),
        )

    def has(self, name: str) -> bool:
        """Return whether the model, or an adapter of it, has this name."""
        return self.models.has(name)
