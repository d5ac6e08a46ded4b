"""Implement Generate as `/v1/completions`, Chat as `/v1/chat/completions` and Embed as `/v1/embeddings`, errors too."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from http import HTTPStatus
from typing import Any, Concatenate

import grpc

from jaxllm.server.grpc.chat import chat_request, pieces_of, whole_answer
from jaxllm.server.grpc.conversion import Responses, completion_request
from jaxllm.server.grpc.embedding import embedding_request, embedding_response
from jaxllm.server.grpc.inference_pb2 import DESCRIPTOR, ChatResponse, EmbedResponse, GenerateResponse
from jaxllm.server.http.caller import Caller
from jaxllm.server.http.decoding import LONG_BODY
from jaxllm.server.http.errors import (
    ErrorResponse,
    RequestFailedError,
    error_headers,
    error_response,
    retry_seconds,
)
from jaxllm.server.http.request_ids import new_request_id, shown_request_id
from jaxllm.server.http.sse import EngineOutputs, EventStream
from jaxllm.server.http.state import ServerState
from jaxllm.server.openai.model_tasks import supported
from jaxllm.server.openai.serving_chat import OpenAIServingChat
from jaxllm.server.openai.serving_completion import OpenAIServingCompletion
from jaxllm.server.operations.prometheus import HttpMetrics
from jaxllm.server.pooling.serving import PooledServing
from jaxllm.utils.async_utils import threaded_if_long

type Context = grpc.aio.ServicerContext[bytes, Any]

SERVICE = DESCRIPTOR.services_by_name["Inference"].full_name
_MAX_DETAILS = 500
"""The maximum characters of an error: percent-encoded it must fit the 8 KiB of headers that clients accept."""
_CLIENT_LEFT = 499
_STATUS_CODES = {
    HTTPStatus.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    HTTPStatus.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    HTTPStatus.REQUEST_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}
"""gRPC's codes for the HTTP statuses of errors; every other one is INTERNAL."""


class InferenceService:
    """Answers the methods of jaxllm.v1.Inference."""

    def __init__(
        self, serving: OpenAIServingCompletion, chat: OpenAIServingChat, state: ServerState, metrics: HttpMetrics
    ) -> None:
        """Answer as `serving` and `chat` do for HTTP, and count load and answers with those of HTTP."""
        self._serving, self._chat, self._state, self._metrics = serving, chat, state, metrics
        self._pooled = PooledServing.of(chat, state.server_args)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler for a gRPC server. The methods decode messages themselves, to report errors properly."""
        whole, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        methods = {
            "Generate": whole(self._generate, response_serializer=GenerateResponse.SerializeToString),
            "GenerateStream": stream(self._generate_stream, response_serializer=GenerateResponse.SerializeToString),
            "Chat": whole(self._answer_chat, response_serializer=ChatResponse.SerializeToString),
            "ChatStream": stream(self._stream_chat, response_serializer=ChatResponse.SerializeToString),
            "Embed": whole(self._embed, response_serializer=EmbedResponse.SerializeToString),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _generate(self, data: bytes, context: Context) -> GenerateResponse:
        async def answer() -> GenerateResponse:
            async with self._admitted(data, context, stream=False) as (outputs, responses):
                (final,) = [output async for output in outputs]
                return responses.of(final)

        return await self._serve("Generate", context, answer)

    async def _generate_stream(self, data: bytes, context: Context) -> None:
        async def answer() -> None:
            async with self._admitted(data, context, stream=True) as (outputs, responses):
                async for output in outputs:
                    await self._write(context, responses.of(output))

        await self._serve("GenerateStream", context, answer)

    async def _answer_chat(self, data: bytes, context: Context) -> ChatResponse:
        async def answer() -> ChatResponse:
            request = await _read(data, chat_request, stream=False)
            made = await self._chat.answer(request, self._caller(context))
            assert not isinstance(made, EventStream)
            return whole_answer(made)

        return await self._serve("Chat", context, answer)

    async def _stream_chat(self, data: bytes, context: Context) -> None:
        async def answer() -> None:
            request = await _read(data, chat_request, stream=True)
            stream = await self._chat.answer(request, self._caller(context), _raise)
            assert isinstance(stream, EventStream)
            async with contextlib.aclosing(stream) as frames:
                async for frame in frames:
                    for message in pieces_of(frame):
                        await self._write(context, message)

        await self._serve("ChatStream", context, answer)

    async def _embed(self, data: bytes, context: Context) -> EmbedResponse:
        async def answer() -> EmbedResponse:
            serving = supported(self._pooled.embedding or self._pooled.token_embedding, "Embeddings")
            request, caller = await _read(data, embedding_request), self._caller(context)
            outputs = await serving.outputs(request, caller)
            answer_id, model = caller.shown_id("embd", request.request_id), self._chat.models.shown(request.model)
            tells_cached = self._state.server_args.enable_prompt_tokens_details
            size = sum(each.outputs.data.size for each in outputs)
            return await threaded_if_long(
                size, embedding_response, answer_id, model, outputs, tells_cached=tells_cached
            )

        return await self._serve("Embed", context, answer)

    def _caller(self, context: Context) -> Caller:
        """Return what the metadata say about a request. Raises VLLMValidationError for a bad value."""
        headers = {name.encode(): _bytes(value) for name, value in context.invocation_metadata() or ()}
        return Caller.of(self._serving.engine_client, headers, *new_request_id(headers))

    async def _write(self, context: Context, message: GenerateResponse | ChatResponse) -> None:
        """Send a piece of an answer. Raises RequestFailedError, 408, if the client leaves what was sent unread."""
        try:
            async with asyncio.timeout(self._state.server_args.stalled_client_timeout):
                await context.write(message)
        except TimeoutError:
            raise RequestFailedError(HTTPStatus.REQUEST_TIMEOUT, "The answer was not read in time.") from None

    async def _serve[T](self, name: str, context: Context, answer: Callable[[], Awaitable[T]]) -> T:
        """Return a request's answer, or end it with the error's status. gRPC cancels this when the client leaves."""
        began, status = time.perf_counter(), _CLIENT_LEFT
        try:
            with self._state.load.counted():
                self._state.load.check_open()
                result = await answer()
            status = HTTPStatus.OK.value
            return result
        except Exception as error:  # noqa: BLE001 - each has an answer
            response = error_response(error)
            status = response.error.code
        finally:
            self._metrics.on_answer(f"grpc:{name}", "POST", status, time.perf_counter() - began)
        return await refuse(context, response)

    @contextlib.asynccontextmanager
    async def _admitted(
        self, data: bytes, context: Context, *, stream: bool
    ) -> AsyncGenerator[tuple[EngineOutputs, Responses], None]:
        """Check and queue a request, and abort it at the end if it still runs."""
        serving, args = self._serving, self._state.server_args
        request, caller = await _read(data, completion_request, stream=stream), self._caller(context)
        (outputs,) = await serving.admit(request, caller)
        shown_id = shown_request_id(caller.client_request_id, request.request_id, caller.request_id)
        name, tells_cached = serving.models.shown(request.model), args.enable_prompt_tokens_details
        async with contextlib.aclosing(outputs):
            yield outputs, Responses(request, shown_id, name, tells_cached=tells_cached)


async def refuse(context: grpc.aio.ServicerContext[Any, Any], response: ErrorResponse) -> Any:
    """End a request with an error's status. The trailing metadata has "param" and whether to retry, also in the form
    for clients that retry automatically.
    """
    error = response.error
    metadata = [(name.decode(), value.decode()) for name, value in error_headers(response)]
    if error.param is not None:
        metadata.append(("param", error.param))
    if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
        metadata.append(("grpc-retry-pushback-ms", str(retry_seconds(response) * 1000)))
    code = _STATUS_CODES.get(HTTPStatus(error.code), grpc.StatusCode.INTERNAL)
    try:
        await context.abort(code, error.message[:_MAX_DETAILS], tuple(metadata))
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None  # the client has left meanwhile


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


async def _read[**P, T](data: bytes, read: Callable[Concatenate[bytes, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `read` returns for a message, a long one in a thread. Raises what it raises."""
    if len(data) > LONG_BODY:
        return await asyncio.to_thread(read, data, *args, **kwargs)
    return read(data, *args, **kwargs)


def _raise(error: BaseException) -> Any:
    raise error
