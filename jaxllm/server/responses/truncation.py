"""Responses' `truncation="auto"`: a conversation that does not fit the model loses its oldest messages."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.openai.chat_protocol import ChatCompletionRequest
from jaxllm.server.openai.serving_chat import OpenAIServingChat


async def fitted(chat: OpenAIServingChat, request: ChatCompletionRequest) -> list[dict[str, Any]]:
    """Return the most of a request's latest messages that leave room for an answer, after the system's.

    They begin with one of the user's. If not even the last of these has room, they begin with it. Room is left for
    the tokens that the request asks for, or an eighth of the context, but for no more than a half.
    Raises what `errors.error_response` has answers for.
    """
    chat.check(request)
    messages, longest = request.messages, chat.engine_client.model_config.max_model_len
    most = longest - min(request.most_tokens or longest // 8, longest // 2)
    head = next((i for i, each in enumerate(messages) if each["role"] != "system"), len(messages))
    starts = [head, *(i for i in range(head + 1, len(messages)) if messages[i]["role"] == "user")]
    if await _fits(chat, request, most):
        return messages

    def since(start: int) -> list[dict[str, Any]]:
        return [*messages[:head], *messages[start:]]

    low, high = min(1, len(starts) - 1), len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if await _fits(chat, msgspec.structs.replace(request, messages=since(starts[middle])), most):
            high = middle
        else:
            low = middle + 1
    return since(starts[high])


async def _fits(chat: OpenAIServingChat, request: ChatCompletionRequest, most: int) -> bool:
    """Say whether a conversation has at most so many tokens."""
    prompt = await chat.render(request)
    try:
        encoded = await asyncio.to_thread(chat.engine_client.front.inputs.encode, prompt, request.tokenization_kwargs())
    except VLLMValidationError as error:
        if error.parameter != "prompt":
            raise
        return False
    return len(encoded.token_ids) <= most
