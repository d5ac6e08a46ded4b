"""Helpers that open gRPC beside a server and call it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf import json_format

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.server.grpc.inference_pb2 import (
    ChatRequest,
    ChatResponse,
    EmbedRequest,
    EmbedResponse,
    GenerateRequest,
    GenerateResponse,
)
from jaxllm.server.grpc.server import opened
from jaxllm.server.grpc.service import SERVICE
from jaxllm.server.run import bind_grpc
from tests.server.support import START_SECONDS, Served

SECONDS = 30.0
NO_METADATA: Sequence[tuple[str, str]] = ()


@contextlib.contextmanager
def grpc_opened(server: Served) -> Iterator[str]:
    """Open gRPC on the event loop of a server that runs, with its flags, and yield the address."""
    listener = bind_grpc(ServerArgs(host="127.0.0.1", grpc_port=0))
    assert listener is not None
    port = listener.getsockname()[1]
    state = server.app.state
    context = opened(state.openai_serving_completion, state, state.http_metrics, listener, 0.2)

    def run(step: Any) -> None:
        asyncio.run_coroutine_threadsafe(step, server.loop).result(START_SECONDS)

    run(context.__aenter__())
    try:
        yield f"127.0.0.1:{port}"
    finally:
        run(context.__aexit__(None, None, None))


class Client:
    """A client with all methods."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self._whole = self._method(channel.unary_unary, "Generate", GenerateRequest, GenerateResponse)
        self._stream = self._method(channel.unary_stream, "GenerateStream", GenerateRequest, GenerateResponse)
        self._chat = self._method(channel.unary_unary, "Chat", ChatRequest, ChatResponse)
        self._chat_stream = self._method(channel.unary_stream, "ChatStream", ChatRequest, ChatResponse)
        self._embed = self._method(channel.unary_unary, "Embed", EmbedRequest, EmbedResponse)

    def _method(self, kind: Callable[..., Any], name: str, request: Any, response: Any) -> Any:
        return kind(
            f"/{SERVICE}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )

    def chat(self, request: ChatRequest) -> ChatResponse:
        """Return the whole answer of a conversation."""
        return self._chat(request, timeout=SECONDS)

    def chat_stream(self, request: ChatRequest) -> Any:
        """Return the pieces of a conversation's answer as they come; the call can be cancelled."""
        return self._chat_stream(request, timeout=SECONDS)

    def embed(self, request: EmbedRequest) -> EmbedResponse:
        """Return the embeddings."""
        return self._embed(request, timeout=SECONDS)

    def whole(self, request: GenerateRequest, metadata: Sequence[tuple[str, str]] = NO_METADATA) -> GenerateResponse:
        """Return the whole answer."""
        return self._whole(request, timeout=SECONDS, metadata=metadata)

    def stream(self, request: GenerateRequest, metadata: Sequence[tuple[str, str]] = NO_METADATA) -> Any:
        """Return the answer's pieces as they come; the call can be cancelled."""
        return self._stream(request, timeout=SECONDS, metadata=metadata)


@contextlib.contextmanager
def client_of(
    address: str, credentials: grpc.ChannelCredentials | None = None, options: Sequence[tuple[str, int]] = ()
) -> Iterator[Client]:
    """Connect to a server."""
    if credentials is None:
        channel = grpc.insecure_channel(address, options)
    else:
        channel = grpc.secure_channel(address, credentials, options)
    with channel:
        yield Client(channel)


def message_of(fields: Mapping[str, Any]) -> GenerateRequest:
    """Return the message for a body's fields. Raises ValueError or TypeError for values that it cannot express."""
    converted = _converted({name: value for name, value in fields.items() if name != "prompt"})
    if "prompt" in fields:
        prompt = fields["prompt"]
        converted |= {"text": prompt} if isinstance(prompt, str) else {"token_ids": {"ids": prompt}}
    return GenerateRequest(**converted)


def _converted(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body in the types of a message."""
    converted = dict(fields)
    if isinstance(converted.get("stop"), str):
        converted["stop"] = [converted["stop"]]
    if "logit_bias" in converted:
        converted["logit_bias"] = {int(key): value for key, value in converted["logit_bias"].items()}
    if "allowed_token_ids" in converted:
        converted["allowed_token_ids"] = {"ids": converted["allowed_token_ids"]}
    return converted


def chat_message_of(fields: Mapping[str, Any]) -> ChatRequest:
    """Return the message for a chat body's fields. Raises ValueError or TypeError for values it cannot express."""
    converted = _converted(fields)
    json_fields = {"messages", "documents", "tools", "tool_choice", "response_format", "chat_template_kwargs"}
    message = ChatRequest(**{name: value for name, value in converted.items() if name not in json_fields})
    return json_format.ParseDict({name: converted[name] for name in json_fields & converted.keys()}, message)


def refusal(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Return the status of a call that must fail, its details and its trailing metadata."""
    try:
        call()
    except grpc.RpcError as error:
        failed: Any = error
        return failed.code(), failed.details(), dict(failed.trailing_metadata())
    raise AssertionError("the call has succeeded")
