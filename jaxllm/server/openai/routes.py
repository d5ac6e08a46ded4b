"""OpenAI's routes, and vLLM's for tokens."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from jaxllm.server.arguments import ServerArgs
from jaxllm.server.http.decoding import decode_aside
from jaxllm.server.http.endpoint import EVENT_STREAM, Call, Endpoint, Reply
from jaxllm.server.http.sse import EventStream
from jaxllm.server.openai.chat_protocol import CHAT_REFUSED, ChatCompletionRequest
from jaxllm.server.openai.completion_protocol import COMPLETION_REFUSED, CompletionRequest
from jaxllm.server.openai.tokenization_protocol import TOKENIZE_REFUSED, DetokenizeRequest, TokenizeRequest
from jaxllm.server.operations.load_report import load_headers


def routes(args: ServerArgs) -> list[Route]:
    """Return the routes."""
    del args
    return [
        Route("/v1/models", Endpoint(show_models, takes_json=False), methods=["GET"]),
        Route("/v1/models/{model:path}", Endpoint(show_model, takes_json=False), methods=["GET"]),
        Route("/v1/chat/completions", Endpoint(answer_chat, runs_model=True), methods=["POST"]),
        Route("/v1/completions", Endpoint(answer_completion, runs_model=True), methods=["POST"]),
        Route("/tokenize", Endpoint(tokenize), methods=["POST"]),
        Route("/detokenize", Endpoint(detokenize), methods=["POST"]),
        Route("/tokenizer_info", Endpoint(show_tokenizer, takes_json=False), methods=["GET"]),
    ]


async def show_models(call: Call) -> Reply:
    """List the names that the model goes by."""
    return Reply.json(call.state.openai_serving_models.show())


async def show_model(call: Call) -> Reply:
    """Show one of the names that the model goes by."""
    return Reply.json(call.state.openai_serving_models.find(call.path["model"]))


async def answer_chat(call: Call) -> Reply:
    """Answer a chat completion."""
    request = await decode_aside(call.body, ChatCompletionRequest, CHAT_REFUSED)
    answer = await call.state.openai_serving_chat.answer(request, call.caller)
    return _reply(call, answer)


async def answer_completion(call: Call) -> Reply:
    """Answer a text completion."""
    request = await decode_aside(call.body, CompletionRequest, COMPLETION_REFUSED)
    answer = await call.state.openai_serving_completion.answer(request, call.caller)
    return _reply(call, answer)


def _reply(call: Call, answer: Any) -> Reply:
    """Return an answer, a whole one with the server's load where the request asks for it."""
    if isinstance(answer, EventStream):
        return Reply(answer, content_type=EVENT_STREAM)
    return Reply.json(answer)._replace(headers=load_headers(call.state.engine_client, call.headers))


async def tokenize(call: Call) -> Reply:
    """Turn a text, or a conversation, into token ids."""
    request = await decode_aside(call.body, TokenizeRequest, TOKENIZE_REFUSED)
    return Reply.json(await call.state.openai_serving_tokenization.tokenize(request))


async def detokenize(call: Call) -> Reply:
    """Turn token ids into text."""
    request = await decode_aside(call.body, DetokenizeRequest, {})
    return Reply.json(await call.state.openai_serving_tokenization.detokenize(request))


async def show_tokenizer(call: Call) -> Reply:
    """Show the tokenizer, where the server was told to."""
    return Reply.json(call.state.openai_serving_tokenization.info())
