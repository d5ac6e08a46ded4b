"""Ollama's requests, answered as chat completions are, so that tools which only know Ollama find the model."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown
from jaxllm.server.errors import error_response
from jaxllm.server.ollama_answers import AnswerBuilder, encode_line, lines
from jaxllm.server.protocol.chat import ChatCompletionRequest
from jaxllm.server.protocol.ollama import (
    OPTIONS,
    OllamaAnswer,
    OllamaChatRequest,
    OllamaError,
    OllamaFields,
    OllamaGenerateRequest,
)
from jaxllm.server.protocol.prompts import renamed
from jaxllm.server.serving_chat import OpenAIServingChat
from jaxllm.server.sse import EventStream
from jaxllm.text.prompts import ParsedPrompt

LATEST = ":latest"
_NAMES = {**{chat: f"options.{own}" for own, chat in OPTIONS.items()}, "response_format": "format"}


class OllamaServing:
    """This answers Ollama's requests."""

    def __init__(self, chat: OpenAIServingChat) -> None:
        """Answer as `chat` does."""
        self._chat = chat
        self._started = datetime.now(UTC).isoformat()

    def known(self, name: str) -> str:
        """Return the model's name as the server knows it: Ollama's clients may add a tag. Raises as `models.check`."""
        models = self._chat.models
        plain = name.removesuffix(LATEST)
        models.check(plain if any(card.id == plain for card in models.show().data) else name)
        return plain

    async def chat(
        self, request: OllamaChatRequest, request_id: str, trace_headers: Mapping[str, str] | None = None
    ) -> EventStream | OllamaAnswer:
        """Answer a conversation; a stream is returned once it is admitted."""
        chat = self._request(request, messages=_messages(request.messages), tools=request.tools)
        return await self._answer(request, chat, request_id, trace_headers, is_chat=True)

    async def generate(
        self, request: OllamaGenerateRequest, request_id: str, trace_headers: Mapping[str, str] | None = None
    ) -> EventStream | OllamaAnswer:
        """Answer a prompt: it is the user's only message, or with `raw` the text to go on with."""
        system = [{"role": "system", "content": request.system}] if request.system else []
        chat = self._request(request, messages=[*system, {"role": "user", "content": request.prompt}])
        prompt = ParsedPrompt(request.prompt) if request.raw else None
        return await self._answer(request, chat, request_id, trace_headers, is_chat=False, prompt=prompt)

    def show(self, name: str) -> dict[str, Any]:
        """Return what is known of the model, as `/api/show` tells of it."""
        self.known(name)
        front = self._chat.engine_client.front
        config = front.ready.vllm_config.model_config
        capabilities = ["completion"]
        if self._chat.parsers.tool_parser_name is not None:
            capabilities.append("tools")
        if self._chat.parsers.reasoning is not None:
            capabilities.append("thinking")
        return {
            "modelfile": "",
            "parameters": "",
            "template": front.ready.chat_template or "",
            "details": self._details(),
            "model_info": {"general.architecture": "jaxllm", "jaxllm.context_length": config.max_model_len},
            "capabilities": capabilities,
            "modified_at": self._started,
        }

    def tags(self) -> dict[str, Any]:
        """Return the model's names, as `/api/tags` lists them."""
        return {"models": [self._model(card.id) for card in self._chat.models.show().data]}

    def running(self) -> dict[str, Any]:
        """Return the model's names, as `/api/ps` lists them: it is always loaded."""
        longest = self._chat.engine_client.model_config.max_model_len
        extra = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0, "context_length": longest}
        return {"models": [self._model(card.id) | extra for card in self._chat.models.show().data]}

    def _model(self, name: str) -> dict[str, Any]:
        tagged = name if ":" in name else name + LATEST
        return {
            "name": tagged,
            "model": tagged,
            "modified_at": self._started,
            "size": 0,
            "digest": "",
            "details": self._details(),
        }

    def _details(self) -> dict[str, Any]:
        dtype = str(self._chat.engine_client.model_config.dtype)
        return {
            "parent_model": "",
            "format": "jax",
            "family": "jaxllm",
            "families": ["jaxllm"],
            "parameter_size": "",
            "quantization_level": dtype.rpartition(".")[2],
        }

    def _request(self, request: OllamaFields, **given: Any) -> ChatCompletionRequest:
        """Return the chat completion of a request. Raises VLLMValidationError, naming the field."""
        options = {}
        for name, value in (request.options or {}).items():
            if name in OPTIONS and value is not None and not (name == "num_predict" and value in (-1, -2)):
                options[OPTIONS[name]] = value
        kwargs: dict[str, Any] | None = None
        if request.think is not None:
            kwargs = {"enable_thinking": bool(request.think)}
        fields = {"model": self.known(request.model), "stream": request.stream, **options, **given}
        try:
            return msgspec.convert(
                fields
                | {
                    "chat_template_kwargs": kwargs,
                    "reasoning_effort": request.think if isinstance(request.think, str) else None,
                    "include_reasoning": request.think is not False,
                    "response_format": _format(request.format),
                },
                ChatCompletionRequest,
            )
        except msgspec.ValidationError as error:
            raise VLLMValidationError(f"options: {error}.", parameter="options") from None

    async def _answer(
        self,
        request: OllamaFields,
        chat: ChatCompletionRequest,
        request_id: str,
        trace_headers: Mapping[str, str] | None,
        *,
        is_chat: bool,
        prompt: ParsedPrompt | None = None,
    ) -> EventStream | OllamaAnswer:
        builder = AnswerBuilder(request.model, is_chat=is_chat)
        with renamed(_NAMES):
            turn = await self._chat.begin(chat, request_id, trace_headers, prompt=prompt)
        if request.stream:
            return EventStream(lines(turn, builder), turn.outputs, last=b"", failed=_last_line)
        output = await turn.whole()
        builder.start(output)
        [only] = output.outputs
        answer = builder.add(turn.pieces(only), len(only.token_ids), only)
        assert answer is not None
        return answer


def _last_line(error: BaseException) -> bytes:
    return encode_line(OllamaError(error_response(error).error.message))


def _format(given: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if given in (None, ""):
        return None
    if given == "json":
        return {"type": "json_object"}
    if not isinstance(given, Mapping):
        raise VLLMValidationError(f"format must be 'json' or a JSON schema, got {shown(given)}.", parameter="format")
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": given}}


def _messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return Ollama's messages in OpenAI's form."""
    found: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        if message.get("images"):
            text = f"messages[{i}]: images are not supported: this engine reads text only."
            raise VLLMValidationError(text, parameter="messages")
        plain = {name: value for name, value in message.items() if name not in ("images", "thinking", "tool_name")}
        if message.get("thinking"):
            plain["reasoning"] = message["thinking"]
        if message.get("role") == "tool" and message.get("tool_name"):
            plain["name"] = message["tool_name"]
        found.append(plain)
    return found
