"""Plain ASGI endpoints: they read a body and answer with JSON or a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from starlette.routing import BaseRoute, Route

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import EngineBusyError, VLLMValidationError
from jaxllm.server.http.caller import Caller
from jaxllm.server.http.errors import ErrorResponse, RequestFailedError, error_headers, error_response
from jaxllm.server.http.model_names import NameReader, name_in_json
from jaxllm.server.http.request_ids import new_request_id
from jaxllm.server.http.sse import AnswerRelay, EventStream
from jaxllm.server.http.state import Model, ServerState

type Scope = dict[str, Any]
type Receive = Callable[[], Awaitable[dict[str, Any]]]
type Send = Callable[[dict[str, Any]], Awaitable[None]]
type ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = b"application/json"
FORM = b"multipart/form-data"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
RELAY = "jaxllm.relay"
"""The key of a scope's `DirectWay`; the server's own HTTP protocol puts it in."""
BODY_SECONDS = 60.0
"""The time limit for receiving a body."""
_MAX_LENGTH_DIGITS = 18
_ENCODER = msgspec.json.Encoder()


class DirectWay(NamedTuple):
    """The way to a connection that passes ASGI by."""

    app: object
    """The application that the connection's server calls."""
    open: Callable[[], AnswerRelay]
    """Opens the way for the request that is being answered."""


class Call(NamedTuple):
    """A request, as handlers get it."""

    state: ServerState
    body: bytes
    headers: dict[bytes, bytes]
    """By lower-case name; the last one of each name."""
    request_id: str
    """The server's unique id for the request. The engine's id begins with it."""
    client_request_id: str | None
    """X-Request-Id, if it is well formed."""
    path: dict[str, str]
    """The variable parts of the route's path, by their names."""
    query: bytes = b""
    """The raw query string."""
    model: Model | None = None
    """The model that answers; None for routes of the whole server."""

    @property
    def engine_client(self) -> AsyncLLM:
        """Return the engine of the model that answers."""
        assert self.model is not None
        return self.model.engine

    @property
    def caller(self) -> Caller:
        """Return what the headers say about the request. Raises VLLMValidationError for a bad header."""
        return Caller.of(self.engine_client, self.headers, self.request_id, self.client_request_id)


class Reply(NamedTuple):
    """An answer: a whole body, or a generator of its pieces, which is closed when the client leaves."""

    body: bytes | AsyncGenerator[bytes, None]
    status: int = 200
    content_type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Reply:
        """Return an answer in JSON."""
        return cls(_ENCODER.encode(value), status)

    @classmethod
    def error(cls, error: BaseException | ErrorResponse) -> Reply:
        """Return the answer to an error."""
        response = error if isinstance(error, ErrorResponse) else error_response(error)
        return cls(_ENCODER.encode(response), response.error.code, headers=tuple(error_headers(response)))


class BodyLimit(NamedTuple):
    """The most bytes of a body, and what an operator sets it by."""

    num_bytes: int
    set_by: str


type _Refusal = Callable[[BaseException, str], Reply]
"""Makes the answer to a failed request from the error and the request's id."""


def refuse(error: BaseException, _request_id: str) -> Reply:
    """Return the answer to a request that failed, in OpenAI's form."""
    return Reply.error(error)


class Types(NamedTuple):
    """The types of a route's request and answers, for the OpenAPI document."""

    response: Any
    """A tuple if there are several types of answers, or none: the answer is then empty."""
    request: Any = None
    event: Any = None
    """One event of the stream that the route can answer with instead; a tuple if there are several types."""
    error: Any = ErrorResponse
    streams: str = "text/event-stream"
    """The content type of the stream."""
    has_text: bool = False
    """Whether an answer may be plain text."""


class Endpoint[S]:
    """An ASGI application for one route of the whole server: it reads the body, calls the handler, and answers.

    Whatever the handler raises becomes an answer. When the client leaves, the handler is cancelled.
    """

    runs_model = False
    """Whether its requests count as load, and are refused while the server drains."""

    def __init__(
        self,
        handler: Callable[[S, Call], Awaitable[Reply]],
        serving: Callable[[], S] | None,
        types: Types | None = None,
        *,
        takes_json: bool = True,
        form: BodyLimit | None = None,
        refusal: _Refusal = refuse,
    ) -> None:
        """Answer with `handler`, which gets what `serving` returns for each request.

        With `form` the route takes a form up to this limit, and no JSON. `refusal` makes the answer to an error,
        `types` describe the route.
        """
        self._handler, self._serving = handler, serving
        self._takes_json, self._form = takes_json and form is None, form
        self.types = types
        self.body_kind = (FORM if form else JSON).decode()
        """The content type of its requests, if they have a body."""
        self.refusal = refusal
        self.name = getattr(handler, "__name__", "")
        self.summary = (handler.__doc__ or "").partition("\n")[0].rstrip(".")
        """What the route does, for the OpenAPI document."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = dict(scope["headers"])
        state: ServerState = scope["app"].state
        if not self.runs_model:
            await self._serve(scope, headers, receive, send)
            return
        with state.load.counted():
            await self._serve(scope, headers, receive, send)

    async def reply(self, call: Call) -> Reply:
        """Return the handler's answer to a request. Raises what it raises."""
        assert self._serving is not None
        return await self._handler(self._serving(), call)

    async def _serve(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        state: ServerState = scope["app"].state
        new_id, client_request_id = new_request_id(headers)
        request_id = scope.get("request_id", new_id)
        try:
            if self.runs_model:
                state.load.check_open()
                state.models.check_room()  # under overload a refusal has to be cheap
            limit = BodyLimit(state.server_args.max_body_size, "--max-body-size")
            if self._takes_json:
                _check_json(headers)
            elif self._form is not None:
                _check_form(headers)
                limit = min(limit, self._form)
            body = await _read(receive, headers, limit)
        except (RequestFailedError, EngineBusyError) as error:
            await send_reply(self.refusal(error, request_id), send)
            return
        except ConnectionError:
            return
        path, query = scope.get("path_params", {}), scope["query_string"]
        call = Call(state, body, headers, request_id, client_request_id, path, query)
        answering = asyncio.create_task(self._answer(call, send, _way_to(scope)))
        leaving = asyncio.create_task(_wait_disconnect(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await answering

    async def _answer(self, call: Call, send: Send, way: Callable[[], AnswerRelay] | None) -> None:
        try:
            reply = await self.reply(call)
        except Exception as error:  # noqa: BLE001 - each has an answer
            reply = self.refusal(error, call.request_id)
        await _send(reply, send, way)


class ModelEndpoint[S](Endpoint[S]):
    """A route that a model answers: the one that the request names, which is loaded for it if it is not."""

    def __init__(
        self,
        handler: Callable[[S, Call], Awaitable[Reply]],
        pick: Callable[[Any], S],
        types: Types | None = None,
        *,
        runs_model: bool = False,
        wakes: bool | None = None,
        names: NameReader = name_in_json,
        **options: Any,
    ) -> None:
        """Answer with `handler`, which gets what `pick` returns for the model's record.

        A route that `runs_model` counts as load and is refused while the server drains. One that `wakes` needs a model
        that is loaded now; for others it is enough that it has been loaded. `names` reads the names that a request has
        for its model. `options` are those of `Endpoint`.
        """
        super().__init__(handler, None, types, **options)
        self.runs_model, self._pick, self._names = runs_model, pick, names
        self._wakes = runs_model if wakes is None else wakes

    async def reply(self, call: Call) -> Reply:
        """Return the handler's answer to a request, which must have its model. Raises what it raises."""
        assert call.model is not None
        return await self._handler(self._pick(call.model.record), call)

    async def _answer(self, call: Call, send: Send, way: Callable[[], AnswerRelay] | None) -> None:
        try:
            model = call.state.models.only or await self._find(call)
            record = model.begin()
            is_counted = record is not None
            if record is None and not self._wakes:
                record = model.record
            if record is None:
                record, is_counted = await model.wait(), True
        except Exception as error:  # noqa: BLE001 - each has an answer
            await send_reply(self.refusal(error, call.request_id), send)
            return
        try:
            if self.runs_model:
                await call.state.load.turns.take()
            try:
                if self.runs_model and call.state.models.only is None:
                    model.engine.admission.check_room()
                reply = await self.reply(call._replace(model=model))
            except Exception as error:  # noqa: BLE001 - each has an answer
                reply = self.refusal(error, call.request_id)
            await _send(reply, send, way)
        finally:
            if is_counted:
                model.end()

    async def _find(self, call: Call) -> Model:
        """Return the model that a request names. Raises VLLMValidationError or RequestFailedError."""
        names = await self._names(call.body, call.headers, call.query)
        if not names:
            message = "model: this server has several models: say which one. /v1/models lists them."
            raise VLLMValidationError(message, parameter="model")
        return call.state.models.find(names)


class Refusals:
    """Looks up the form of errors by path, for failures outside a route's endpoint."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._below: dict[str, set[_Refusal]] = {}
        """The forms of all routes at and below each path."""
        for route in routes:
            if isinstance(route, Route) and isinstance(route.endpoint, Endpoint):
                for path in _beginnings(route.path.split("/")):
                    self._below.setdefault(path, set()).add(route.endpoint.refusal)
        self._most_parts = 1 + max((path.count("/") for path in self._below), default=0)

    def at(self, path: str) -> _Refusal:
        """Return the form of errors at a path: that of its routes, or the one that all its neighbours share."""
        parts = path.split("/", self._most_parts)[: self._most_parts]  # a path may have thousands
        for beginning in _beginnings(parts):
            if forms := self._below.get(beginning):
                return next(iter(forms)) if len(forms) == 1 else refuse
        return refuse


def _beginnings(parts: Sequence[str]) -> list[str]:
    """Return the path of these parts and its parents, the longest first."""
    return ["/".join(parts[:end]) for end in range(len(parts), 1, -1)]


async def _send(reply: Reply, send: Send, way: Callable[[], AnswerRelay] | None) -> None:
    """Send an answer, by the direct way if there is one and the answer streams."""
    if way is not None and isinstance(reply.body, EventStream):
        reply.body.connect(way())
    await send_reply(reply, send)


async def send_reply(reply: Reply, send: Send) -> None:
    """Send an answer, the pieces of a stream as they come."""
    headers = [(b"content-type", reply.content_type), *reply.headers]
    if isinstance(reply.body, bytes):
        headers.append((b"content-length", str(len(reply.body)).encode()))
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})
        return
    last = b""
    async with contextlib.aclosing(reply.body) as pieces:
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        async for piece in pieces:
            if isinstance(pieces, EventStream) and pieces.is_ended:
                last = piece  # it goes out with the end of the body
            else:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": last})


async def _read(receive: Receive, headers: dict[bytes, bytes], limit: BodyLimit) -> bytes:
    """Return the body. Raises RequestFailedError 413 as soon as it exceeds the limit, 408 if it takes too long, and
    ConnectionError if the client leaves before its end.
    """
    length = headers.get(b"content-length", b"")
    if length.isdigit() and (len(length) > _MAX_LENGTH_DIGITS or int(length) > limit.num_bytes):
        raise _too_large(limit)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _read_pieces(receive, limit)
    except TimeoutError:
        raise RequestFailedError(HTTPStatus.REQUEST_TIMEOUT, "The body has not come in time.") from None


async def _read_pieces(receive: Receive, limit: BodyLimit) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client has left")
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > limit.num_bytes:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _too_large(limit: BodyLimit) -> RequestFailedError:
    message = f"The body is larger than {limit.num_bytes} bytes, the most that this server takes ({limit.set_by})."
    return RequestFailedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)


def _way_to(scope: Scope) -> Callable[[], AnswerRelay] | None:
    """Return what opens the direct way to a request's connection; None if there is none, or if others may want to see
    or change what is sent: middleware that is not the server's, or an application around this one.
    """
    way, app = scope.get(RELAY), scope["app"]
    if way is None or way.app is not app or len(app.user_middleware) > app.state.num_middleware:
        return None
    return way.open


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_json(headers: dict[bytes, bytes]) -> None:
    kind = _checked_kind(headers, "plain JSON")
    if kind != JSON and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise RequestFailedError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "The body must be JSON: send the header Content-Type: application/json."
        )


def _check_form(headers: dict[bytes, bytes]) -> None:
    if _checked_kind(headers, "a plain form") != FORM:
        raise RequestFailedError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "The body must be a form with a file: send it as multipart/form-data, by `curl -F file=@FILE` for example.",
        )


def _checked_kind(headers: dict[bytes, bytes], wanted: str) -> bytes:
    """Return the content type of a body that is not compressed. Raises RequestFailedError for another."""
    encoding = headers.get(b"content-encoding", b"").strip().lower()
    if encoding not in (b"", b"identity"):
        shown = encoding.decode("latin-1")[:40]
        message = f"Content-Encoding: {shown} is not decoded here: send the body as {wanted}, without that header."
        raise RequestFailedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message)
    return headers.get(b"content-type", b"").split(b";")[0].strip().lower()
