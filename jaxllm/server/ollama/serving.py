"""Serve Ollama's API by way of chat completions and embeddings."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.content_parts import read_media_part
from jaxllm.params.checks import shown
from jaxllm.server.http.caller import Caller
from jaxllm.server.http.errors import error_response
from jaxllm.server.http.sse import EventStream
from jaxllm.server.ollama.answers import AnswerBuilder, encode_line, lines
from jaxllm.server.ollama.keep_alive import read_keep_alive
from jaxllm.server.ollama.listing import spellings
from jaxllm.server.ollama.protocol import (
    OllamaAnswer,
    OllamaChatRequest,
    OllamaDetails,
    OllamaEmbedAnswer,
    OllamaEmbedding,
    OllamaEmbeddingRequest,
    OllamaEmbedFields,
    OllamaEmbedRequest,
    OllamaError,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaShow,
)
from jaxllm.server.openai.chat_protocol import ChatCompletionRequest
from jaxllm.server.openai.model_tasks import supported
from jaxllm.server.openai.prompt_fields import renamed
from jaxllm.server.openai.serving_chat import OpenAIServingChat
from jaxllm.server.pooling.embedding_protocol import EmbeddingRequest
from jaxllm.server.pooling.serving_embedding import ServingEmbedding
from jaxllm.server.pooling.vectors import numbers
from jaxllm.text.prompts import ParsedPrompt
from jaxllm.utils.async_utils import threaded_if_long

_NAMES = {
    **{name: f"options.{name}" for name in OllamaOptions.__struct_fields__},
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "reasoning_effort": "think",
    "response_format": "format",
}
_REFUSED = {
    "suffix": "text is only ever added at the end",
    "template": "the model's own chat template is used; with raw=true none is",
    "context": "send the conversation to /api/chat",
}
"""Fields that are refused unless empty: they would change the answer."""


class OllamaServing:
    """Answers Ollama's requests."""

    def __init__(self, chat: OpenAIServingChat, embedding: ServingEmbedding | None) -> None:
        """Answer by way of `chat`, and of `embedding` if the model makes embeddings."""
        self._chat, self._embedding = chat, embedding

    def known(self, name: str) -> str:
        """Return the model's name on this server: Ollama's clients may add a tag. Raises what `models.check` does."""
        for known_name in spellings(name):
            if self._chat.models.has(known_name):
                return known_name
        self._chat.models.check(name)
        return name

    async def chat(self, request: OllamaChatRequest, caller: Caller) -> EventStream | OllamaAnswer:
        """Answer a conversation; a stream is returned once it is admitted."""
        if not request.messages:
            return self._loaded(request, is_chat=True)
        chat = self._request(request, messages=messages_in_chat(request.messages), tools=request.tools)
        return await self._answer(request, chat, caller, is_chat=True)

    async def generate(self, request: OllamaGenerateRequest, caller: Caller) -> EventStream | OllamaAnswer:
        """Answer a prompt: the user's only message, or with `raw` the text to continue."""
        for name, reason in _REFUSED.items():
            if getattr(request, name):
                raise VLLMValidationError(f"{name} is not supported: {reason}.", parameter=name)
        if request.raw and request.system:
            raise VLLMValidationError("system has no place in a prompt that is raw: leave it out.", parameter="system")
        if request.raw and request.images:
            raise VLLMValidationError(
                "images have no place in a prompt that is raw: leave them out.", parameter="images"
            )
        if not request.prompt:
            return self._loaded(request, is_chat=False)
        system = [{"role": "system", "content": request.system}] if request.system else []
        content = _with_images(request.prompt, request.images, "images")
        chat = self._request(request, messages=[*system, {"role": "user", "content": content}])
        prompt = ParsedPrompt(request.prompt) if request.raw else None
        return await self._answer(request, chat, caller, is_chat=False, prompt=prompt)

    async def embed(self, request: OllamaEmbedRequest, caller: Caller) -> OllamaEmbedAnswer:
        """Make embeddings of texts, cut to `dimensions` and normalized; none without texts."""
        begun = time.monotonic_ns()
        if isinstance(request.input, str):
            texts = [request.input] if request.input else []
        else:
            texts = request.input or []
        is_cut = request.truncate is not False
        vectors, num_tokens = await self._vectors(request, texts, caller, is_cut=is_cut, use_activation=True)
        if (request.dimensions or 0) > 0:
            vectors = [_normalized(each[: request.dimensions]) for each in vectors]
        return OllamaEmbedAnswer(
            model=request.model,
            embeddings=await threaded_if_long(sum(each.size for each in vectors), lambda: list(map(numbers, vectors))),
            total_duration=time.monotonic_ns() - begun,
            load_duration=0,
            prompt_eval_count=num_tokens,
        )

    async def embed_prompt(self, request: OllamaEmbeddingRequest, caller: Caller) -> OllamaEmbedding:
        """Make the embedding of one text, not normalized."""
        texts = [request.prompt] if request.prompt else []
        with renamed({"input": "prompt"}):
            vectors, _ = await self._vectors(request, texts, caller, is_cut=True, use_activation=False)
        return OllamaEmbedding(embedding=numbers(vectors[0]) if vectors else [])

    async def _vectors(
        self, request: OllamaEmbedFields, texts: list[str], caller: Caller, *, is_cut: bool, **options: Any
    ) -> tuple[list[np.ndarray], int]:
        """Return the vectors of texts and their number of tokens. Too long texts are cut if `is_cut`, else refused."""
        serving, name = supported(self._embedding, "Embeddings"), self.known(request.model)
        if not texts:
            return [], 0
        cut = -1 if is_cut else None
        asked = EmbeddingRequest(model=name, input=list(texts), truncate_prompt_tokens=cut, **options)
        outputs = await serving.outputs(asked, caller)
        return [each.outputs.data for each in outputs], sum(len(each.prompt_token_ids) for each in outputs)

    def show(self, name: str, details: OllamaDetails, modified_at: str) -> OllamaShow:
        """Return the description of the model for `/api/show`. Raises what `known` does."""
        self.known(name)
        ready = self._chat.engine_client.front.ready
        capabilities = ["completion"] if ready.generates else ["embedding"]
        if ready.generates and self._chat.parsers.tool_parser_name is not None:
            capabilities.append("tools")
        if ready.generates and self._chat.parsers.reasoning is not None:
            capabilities.append("thinking")
        if ready.takes_images:
            capabilities.append("vision")
        return OllamaShow(
            template=ready.chat_template or "",
            details=details,
            model_info={"general.architecture": "jaxllm", "jaxllm.context_length": ready.max_model_len},
            capabilities=capabilities,
            modified_at=modified_at,
        )

    def _loaded(self, request: OllamaFields, *, is_chat: bool) -> OllamaAnswer:
        self.known(request.model)
        return AnswerBuilder(request.model, is_chat=is_chat).loaded(is_unloaded=asks_to_unload(request))

    def _request(self, request: OllamaFields, **fields: Any) -> ChatCompletionRequest:
        """Return the chat request of a request. Raises VLLMValidationError, naming the field."""
        options = request.options or OllamaOptions()
        return ChatCompletionRequest(
            model=self.known(request.model),
            stream=request.stream is not False,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            max_tokens=options.num_predict if (options.num_predict or 0) > 0 else None,
            stop=options.stop,
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            seed=options.seed,
            repetition_penalty=None if options.repeat_last_n == 0 else options.repeat_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            chat_template_kwargs=None if request.think is None else {"enable_thinking": bool(request.think)},
            reasoning_effort=request.think if isinstance(request.think, str) else None,
            include_reasoning=request.think is not False,
            response_format=_format(request.format),
            **fields,
        )

    async def _answer(
        self,
        request: OllamaFields,
        chat: ChatCompletionRequest,
        caller: Caller,
        *,
        is_chat: bool,
        prompt: ParsedPrompt | None = None,
    ) -> EventStream | OllamaAnswer:
        builder = AnswerBuilder(request.model, is_chat=is_chat, num_logprobs=chat.num_logprobs)
        with renamed(_NAMES), chat.fields_named("messages" if is_chat else "prompt"):
            turn = await self._chat.begin(chat, caller, prompt, streams_calls=False)
        if chat.stream:
            pieces = lines(turn, builder, self._chat.args.sse_ping_interval)
            return EventStream(pieces, turn.outputs, last=b"", failed=_last_line)
        output = await turn.whole()
        [only] = output.outputs
        return builder.whole(turn.pieces(only), only, output)


def asks_to_unload(request: OllamaFields) -> bool:
    """Return whether a request without text asks for a model to leave. Raises VLLMValidationError."""
    return request.keep_alive is not None and read_keep_alive(request.keep_alive) == 0


def _normalized(vector: np.ndarray) -> np.ndarray:
    return vector / max(float(np.linalg.norm(vector)), 1e-12)


def _last_line(error: BaseException) -> bytes:
    return encode_line(OllamaError(error_response(error).error.message))


def _format(value: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if value in (None, ""):
        return None
    if value == "json":
        return {"type": "json_object"}
    if not isinstance(value, Mapping):
        raise VLLMValidationError(f"format must be 'json' or a JSON schema, got {shown(value)}.", parameter="format")
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": value}}


def messages_in_chat(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return Ollama's messages in OpenAI's form, where each call has an id that its result refers to."""
    conversation: list[dict[str, Any]] = []
    calls = _OpenCalls()
    for i, message in enumerate(messages):
        plain = {name: message[name] for name in ("role", "content", "tool_call_id") if message.get(name) is not None}
        if message.get("images"):
            plain["content"] = _with_images(plain.get("content"), message["images"], f"messages[{i}].images")
        if message.get("thinking"):
            plain["reasoning"] = message["thinking"]
        if message.get("tool_calls"):
            plain["tool_calls"] = _calls(message["tool_calls"], i)
            for call in plain["tool_calls"]:
                calls.add(call["function"].get("name"), call["id"])
        if message.get("role") == "tool":
            name = message.get("tool_name")
            call_id = calls.take(name)
            if call_id is not None:
                plain.setdefault("tool_call_id", call_id)
            if name:
                plain["name"] = name
        conversation.append(plain)
    return conversation


def _with_images(content: Any, images: Any, label: str) -> Any:
    """Return content in OpenAI's form, with images in base64 before the text."""
    if not images:
        return content
    if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        text = f"{label}: must be a list of images in base64, got {shown(images)}."
        raise VLLMValidationError(text, parameter=label.partition("[")[0], value=shown(images))
    parts = [
        read_media_part({"type": "image_url", "image_url": f"data:image/*;base64,{each}"}, f"{label}[{j}]")
        for j, each in enumerate(images)
    ]
    return [*parts, content or ""]


class _OpenCalls:
    """The calls of a conversation without a result yet. Each operation takes constant time."""

    def __init__(self) -> None:
        self._ids: OrderedDict[int, str] = OrderedDict()
        """The calls' ids by number, in order."""
        self._by_name: dict[str, deque[int]] = {}
        """The numbers of the calls of each function, including some with a result."""
        self._count = 0

    def add(self, name: Any, call_id: str) -> None:
        """Add a call."""
        self._ids[self._count] = call_id
        if isinstance(name, str):
            self._by_name.setdefault(name, deque()).append(self._count)
        self._count += 1

    def take(self, name: Any) -> str | None:
        """Remove the first call of a function, or of any for None, and return its id."""
        if name is None:
            return self._ids.popitem(last=False)[1] if self._ids else None
        numbers = self._by_name.get(name) if isinstance(name, str) else None
        while numbers:
            call_id = self._ids.pop(numbers.popleft(), None)
            if call_id is not None:
                return call_id
        return None


def _calls(calls: Any, first: int) -> list[dict[str, Any]]:
    """Return the calls of a message, each with an id."""
    tool_calls = []
    for j, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            text = f"messages[{first}].tool_calls[{j}]: a call is an object with 'function', got {shown(call)}."
            raise VLLMValidationError(text, parameter="messages")
        tool_calls.append({"id": call.get("id") or f"call_{first}_{j}", "type": "function", "function": function})
    return tool_calls
