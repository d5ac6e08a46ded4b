"""R24: no error reveals anything about the machine, and clients cannot make the metrics grow."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import (
    EngineBusyError,
    EngineDeadError,
    EngineGenerateError,
    QueueOverflowError,
    VLLMValidationError,
)
from jaxllm.server.http.errors import RequestFailedError, error_response
from tests.async_engine.support import mock_llm, tiny_args
from tests.server.request_bounds import CHAT, DETOKENIZE, TOKENIZE
from tests.server.support import Answer, Served, mock_served, served

SECRETS = "<object at 0x7f05231eee40>, /srv/model/file.py, ipc:///tmp/jaxllm-x1/socket, psm_1a2b"
TELLS = re.compile(
    r"0x[0-9a-f]{4}|\.py\b|Traceback|ipc://|psm_|site-packages|jaxllm-|/(tmp|home|root|usr|opt|var|work|srv)/|\bline \d"
)
BASE = '"messages":[{"role":"user","content":"a"}],"max_tokens":1'


def assert_hygienic(answer: Answer, expected: int | None = None) -> None:
    """Check the form of an answer that is an error."""
    assert expected in (None, answer.status), answer.body
    assert answer.headers["content-type"] == "application/json", answer.body
    assert len(answer.body) <= 4096
    error = answer.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], bool(error["message"])) == (answer.status, True)
    assert not TELLS.search(answer.body.decode()), answer.body


def test_r24_what_is_refused_tells_nothing(mock_server: Served) -> None:
    for path, bounds, base in (
        ("/v1/chat/completions", CHAT, BASE),
        ("/tokenize", TOKENIZE, ""),
        ("/detokenize", DETOKENIZE, ""),
    ):
        for name, bound in bounds.items():
            for value in bound.beyond:
                if len(value) < 100_000:
                    body = "{" + ",".join(filter(None, (base, f'"{name}":{value}'))) + "}"
                    assert_hygienic(mock_server.ask("POST", path, body.encode()), 400)


LONG_NAMES = ["\x00" * 3000, "é" * 3000, "😀" * 3000, "\\" * 3000, "a" * 100_000]


@pytest.mark.parametrize("name", LONG_NAMES)
def test_r12_errors_that_quote_a_client_stay_small(mock_server: Served, name: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
        fields: dict[str, Any] = {"prompt": "a"} if path != "/v1/chat/completions" else {"messages": [{}]}
        assert_hygienic(mock_server.post(path, fields | {"model": name}), 404)
        other = mock_server.post(
            path, fields | {"model": "tiny", "chat_template": name, "truncation_side": name, name: 1}
        )
        if path != "/tokenize":
            assert_hygienic(other, 400)


ROUTES = [
    ("GET", "/nothing", 404),
    ("GET", "/v1/models/" + "x" * 5000, 404),
    ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404),
    ("DELETE", "/v1/models", 405),
    ("GET", "/v1/chat/completions", 405),
    ("PROPFIND", "/v1/models", 405),
    ("POST", "/sleep", 404),
    ("GET", "/server_info", 404),
]


@pytest.mark.parametrize(("method", "path", "status"), ROUTES)
def test_r24_paths_and_methods_that_are_not_there(mock_server: Served, method: str, path: str, status: int) -> None:
    assert_hygienic(mock_server.ask(method, path), status)


def test_what_is_allowed_is_of_all_routes_at_a_path(mock_server: Served) -> None:
    for path, methods in (("/v1/responses/x", "DELETE, GET, HEAD"), ("/v1/chat/completions", "POST")):
        refused = mock_server.ask("OPTIONS", path)
        assert (refused.status, refused.headers["allow"]) == (405, methods)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"", {}, 400),
        (b"\xff\xfe", {}, 400),
        (b'{"user":"\xff"}', {}, 400),
        (b"[" * 100_000, {}, 400),
        (b"{" + BASE.encode() + b',"vllm_xargs":{"a":' + b"[" * 600 + b"]" * 600 + b"}}", {}, 400),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{}", {"content-type": "/srv/x.py"}, 415),
        (b" " * (33 * 2**20), {}, 413),
    ],
)
def test_r24_bodies_that_are_none(mock_server: Served, body: bytes, headers: dict[str, str], status: int) -> None:
    assert_hygienic(mock_server.ask("POST", "/v1/chat/completions", body, headers), status)


@pytest.mark.parametrize(
    "data", [b"FOO / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9\r\n\r\n", b"a\r\n\r\n"]
)
def test_r12_what_is_not_http_has_an_answer_in_openais_form_too(mock_server: Served, data: bytes) -> None:
    with contextlib.closing(socket.create_connection(("127.0.0.1", mock_server.port), timeout=10)) as connection:
        connection.sendall(data)
        head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 400 Bad Request"
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    assert_hygienic(Answer(400, headers, body))


@pytest.mark.parametrize(
    "kind",
    [
        *(OSError, KeyError, ValueError, RecursionError, MemoryError, AssertionError, asyncio.InvalidStateError),
        *(EngineDeadError, EngineGenerateError),
    ],
)
def test_r24_what_nobody_foresaw_is_told_in_general_words(mock: AsyncLLM, kind: type[Exception]) -> None:
    told = error_response(kind(SECRETS)).error
    assert told.code == 500
    assert not TELLS.search(told.message)


def test_r24_addresses_are_in_no_error() -> None:
    """What these errors say is told to clients as it is, but for places in memory."""
    text = "<built-in method items of dict object at 0x7f05231eee40>"
    for error in (
        VLLMValidationError(text, parameter="a"),
        EngineBusyError(text),
        QueueOverflowError(text),
        RequestFailedError(HTTPStatus.NOT_FOUND, text),
    ):
        assert error_response(error).error.message == "<built-in method items of dict object>"


def test_r24_an_engine_that_has_ended_tells_nothing(tokenizer: str) -> None:
    with mock_llm(tiny_args(tokenizer), tokens_per_second=1000) as llm, served(llm) as server:
        llm.shutdown()
        body = {"prompt": [5], "max_tokens": 2}
        for stream in (False, True):
            assert_hygienic(server.post("/v1/completions", body | {"stream": stream}), 500)
        for path in ("/health", "/livez", "/ping"):
            assert_hygienic(server.get(path), 500)


def test_r24_a_full_queue_tells_nothing(tokenizer: str) -> None:
    args = tiny_args(tokenizer, max_num_queued_reqs=16)
    with mock_llm(args, tokens_per_second=1) as llm, served(llm) as server:
        body = json.dumps({"prompt": [5], "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 16}).encode()
        with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), timeout=10)) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
            connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            connection.recv(100)
            refused = server.post("/v1/completions", {"prompt": [5], "n": 2})
            assert_hygienic(refused, 503)
            assert refused.headers["retry-after"] == "1"


def series(server: Served) -> set[str]:
    """Return the names and labels of all that is counted."""
    lines = server.get("/metrics").body.decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if line and not line.startswith("#")}


def strange_requests(number: int) -> Iterator[tuple[str, str, Any, dict[str, str]]]:
    name = f"stranger{number}"
    yield "GET", f"/{name}", None, {"x-request-id": name, "user-agent": name, "host": name}
    yield "GET", f"/v1/models/{name}", None, {}
    yield "GET", f"/v1/models?{name}={name}", None, {}
    yield "MKCOL" if number % 2 else "SEARCH", f"/{name}", None, {}
    yield "HEAD", f"/{name}", None, {}
    yield "POST", "/v1/completions", {"prompt": [5], "max_tokens": 1, "model": name}, {}
    yield "POST", "/v1/completions", {"prompt": [5], "max_tokens": 1, "user": name, name: 1, "request_id": name}, {}
    yield "POST", "/v1/chat/completions", {"messages": [{"role": name, "content": name}], "max_tokens": 1}, {}


def test_r24_strangers_make_no_series(tokenizer: str) -> None:
    with mock_served(tokenizer) as server:
        for round_ in range(2):
            series(server)
            for method, path, body, headers in strange_requests(round_):
                server.ask(method, path, body, headers)
        before = series(server)
        for number in range(10, 40):
            for method, path, body, headers in strange_requests(number):
                server.ask(method, path, body, headers)
        after = series(server)
    assert not any("stranger" in each for each in after)
    assert after == before


def test_a_models_folder_is_in_no_error(mock_server: Served) -> None:
    folder = str(Path(mock_server.llm.model_config.model).resolve())
    answer = mock_server.post("/v1/completions", {"prompt": "a", "model": "other"})
    assert folder not in answer.body.decode()
