"""Collect the serving objects of the pooling routes that the loaded model supports."""

from __future__ import annotations

from typing import NamedTuple, Self

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.server.openai.serving_chat import OpenAIServingChat
from jaxllm.server.pooling.requests import PooledRequests
from jaxllm.server.pooling.serving_classification import ServingClassification
from jaxllm.server.pooling.serving_embedding import ServingEmbedding
from jaxllm.server.pooling.serving_pooling import ServingPooling
from jaxllm.server.pooling.serving_scoring import ServingScores


class PooledServing(NamedTuple):
    """The serving objects by task, None if the model does not support it."""

    pooling: ServingPooling | None = None
    embedding: ServingEmbedding | None = None
    classification: ServingClassification | None = None
    scores: ServingScores | None = None
    token_embedding: ServingEmbedding | None = None

    @classmethod
    def of(cls, chat: OpenAIServingChat, args: ServerArgs) -> Self:
        """Make the serving objects for the model behind `chat`."""
        settings = chat.engine_client.front.ready.pooling
        if settings is None:
            return cls()
        pooled = PooledRequests(chat, settings, trusts_template=args.trust_request_chat_template)
        tells_cached = args.enable_prompt_tokens_details
        return cls(
            ServingPooling(pooled, tells_cached=tells_cached),
            ServingEmbedding(pooled, tells_cached=tells_cached) if "embed" in settings.tasks else None,
            ServingClassification(pooled, tells_cached=tells_cached) if "classify" in settings.tasks else None,
            ServingScores(pooled, tells_cached=tells_cached) if settings.score_type is not None else None,
            ServingEmbedding(pooled, tells_cached=tells_cached, task="token_embed")
            if "token_embed" in settings.tasks
            else None,
        )
