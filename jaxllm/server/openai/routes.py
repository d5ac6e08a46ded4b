"""OpenAI's routes for models, chat and completions, and vLLM's for tokenization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.routing import Route

from jaxllm.server.http.decoding import decode_request
from jaxllm.server.http.endpoint import EVENT_STREAM, Call, Endpoint, ModelEndpoint, Reply, Types
from jaxllm.server.http.load_report import load_headers
from jaxllm.server.http.model_names import name_in_query
from jaxllm.server.http.sse import EventStream
from jaxllm.server.models.registry import ServedModels
from jaxllm.server.openai.chat_protocol import (
    CHAT_REFUSED,
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
)
from jaxllm.server.openai.completion_protocol import (
    COMPLETION_REFUSED,
    CompletionRequest,
    CompletionResponse,
    CompletionStreamResponse,
)
from jaxllm.server.openai.serving_chat import OpenAIServingChat
from jaxllm.server.openai.serving_chat_batch import OpenAIServingChatBatch
from jaxllm.server.openai.serving_completion import OpenAIServingCompletion
from jaxllm.server.openai.serving_models import ModelCard, ModelList, find_card, list_models
from jaxllm.server.openai.serving_tokenization import OpenAIServingTokenization
from jaxllm.server.openai.tokenization_protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)


def routes(
    models: Callable[[], ServedModels[Any]],
    chat: Callable[[Any], OpenAIServingChat],
    completion: Callable[[Any], OpenAIServingCompletion],
    tokenization: Callable[[Any], OpenAIServingTokenization],
) -> list[Route]:
    """Return the routes: `models` returns the server's, and the others what answers for a model."""
    chat_types = Types(ChatCompletionResponse, ChatCompletionRequest, ChatCompletionStreamResponse)
    batch_types = Types(ChatCompletionResponse, BatchChatCompletionRequest)
    completion_types = Types(CompletionResponse, CompletionRequest, CompletionStreamResponse)
    get: dict[str, Endpoint[Any]] = {
        "/v1/models": Endpoint(show_models, models, Types(ModelList), takes_json=False),
        "/v1/models/{model:path}": Endpoint(show_model, models, Types(ModelCard), takes_json=False),
        "/tokenizer_info": ModelEndpoint(
            show_tokenizer, tokenization, Types(TokenizerInfo), takes_json=False, names=name_in_query
        ),
    }
    post = {
        "/v1/chat/completions": ModelEndpoint(answer_chat, chat, chat_types, runs_model=True),
        "/v1/chat/completions/batch": ModelEndpoint(answer_chat_batch, chat, batch_types, runs_model=True),
        "/v1/completions": ModelEndpoint(answer_completion, completion, completion_types, runs_model=True),
        "/tokenize": ModelEndpoint(tokenize, tokenization, Types(TokenizeResponse, TokenizeRequest)),
        "/detokenize": ModelEndpoint(detokenize, tokenization, Types(DetokenizeResponse, DetokenizeRequest)),
    }
    return [
        *(Route(path, endpoint, methods=["GET"]) for path, endpoint in get.items()),
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in post.items()),
    ]


async def show_models(models: ServedModels[Any], _call: Call) -> Reply:
    """List the models."""
    return Reply.json(list_models(models))


async def show_model(models: ServedModels[Any], call: Call) -> Reply:
    """Show a model."""
    return Reply.json(find_card(models, call.path["model"]))


async def answer_chat(serving: OpenAIServingChat, call: Call) -> Reply:
    """Answer a chat completion."""
    request = await decode_request(call.body, ChatCompletionRequest, CHAT_REFUSED)
    answer = await serving.answer(request, call.caller)
    return _reply(call, answer)


async def answer_chat_batch(serving: OpenAIServingChat, call: Call) -> Reply:
    """Answer several conversations at once."""
    request = await decode_request(call.body, BatchChatCompletionRequest, CHAT_REFUSED)
    return _reply(call, await OpenAIServingChatBatch(serving).answer(request, call.caller))


async def answer_completion(serving: OpenAIServingCompletion, call: Call) -> Reply:
    """Answer a text completion."""
    request = await decode_request(call.body, CompletionRequest, COMPLETION_REFUSED)
    answer = await serving.answer(request, call.caller)
    return _reply(call, answer)


def _reply(call: Call, answer: EventStream | ChatCompletionResponse | CompletionResponse) -> Reply:
    """Return the reply. A whole answer has the server's load in its headers if the request asks for it."""
    if isinstance(answer, EventStream):
        return Reply(answer, content_type=EVENT_STREAM)
    return Reply.json(answer)._replace(headers=load_headers(call.engine_client, call.headers))


async def tokenize(serving: OpenAIServingTokenization, call: Call) -> Reply:
    """Convert a text or a conversation to token ids."""
    request = await decode_request(call.body, TokenizeRequest, {})
    return Reply.json(await serving.tokenize(request))


async def detokenize(serving: OpenAIServingTokenization, call: Call) -> Reply:
    """Convert token ids to text."""
    request = await decode_request(call.body, DetokenizeRequest, {})
    return Reply.json(await serving.detokenize(request))


async def show_tokenizer(serving: OpenAIServingTokenization, _call: Call) -> Reply:
    """Show the tokenizer, if the server allows it."""
    return Reply.json(serving.info())
