"""Implement `truncation="auto"`: drop the oldest messages of a conversation that does not fit."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxllm.engine.online.prompt_encoding import encode_prompt
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.openai.chat_protocol import ChatCompletionRequest
from jaxllm.server.openai.serving_chat import OpenAIServingChat


async def fitted(chat: OpenAIServingChat, request: ChatCompletionRequest) -> list[dict[str, Any]]:
    """Return the system's messages and as many of the latest ones as leave room for an answer.

    They begin with a user message, at the latest the last one, even if it does not fit. The room is the tokens that
    the request asks for, or an eighth of the context, but at most a half.
    Raises exceptions that `error_response` handles.
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
    """Return whether a conversation fits a number of tokens."""
    prompt = await chat.render(request)
    try:
        encoded = await encode_prompt(chat.engine_client.front.inputs, prompt, request.tokenization_kwargs())
    except VLLMValidationError as error:
        if error.parameter != "prompt":
            raise
        return False
    return len(encoded.token_ids) <= most
