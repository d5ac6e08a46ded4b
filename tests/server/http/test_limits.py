"""What a client sends is bounded (R16)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.server.http import endpoint
from tests.server.support import Served, served

LIMIT = 4096


@pytest.fixture(scope="module")
def server(mock: AsyncLLM) -> Iterator[Served]:
    with served(mock, "--max-body-size", str(LIMIT)) as server:
        yield server


def send(server: Served, data: bytes) -> bytes:
    """Return what comes in answer to bytes."""
    with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), timeout=10)) as connection:
        connection.sendall(data)
        answer = b""
        while b"\r\n\r\n" not in answer and (more := connection.recv(65536)):
            answer += more
        return answer


def test_r16_a_body_of_the_limit_is_read_and_one_byte_more_is_not(server: Served) -> None:
    body = b'{"messages": 1}'
    assert server.post("/v1/chat/completions", body.ljust(LIMIT)).status == 400
    answer = server.post("/v1/chat/completions", body.ljust(LIMIT + 1))
    assert answer.status == 413
    assert "--max-body-size" in answer.json["error"]["message"]


def test_r16_a_body_is_refused_by_its_length_before_it_comes(server: Served) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    assert send(server, head + b"content-length: 999999999\r\n\r\n").startswith(b"HTTP/1.1 413")


def test_r16_a_chunked_body_is_refused_when_it_gets_too_long(server: Served) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    chunk = b"800\r\n" + b" " * 2048 + b"\r\n"
    assert send(server, head + b"transfer-encoding: chunked\r\n\r\n" + chunk * 3).startswith(b"HTTP/1.1 413")


def test_r16_a_body_that_does_not_come_is_not_waited_for(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "BODY_SECONDS", 0.2)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    assert send(server, head + b"content-length: 100\r\n\r\n{").startswith(b"HTTP/1.1 408")


def test_r16_deep_json_is_refused(server: Served) -> None:
    assert server.post("/v1/chat/completions", b"[" * LIMIT).status == 400
    assert server.post("/v1/chat/completions", b'{"messages":' + b"[" * 4000).status == 400


def test_a_body_that_is_not_json_is_not_read(server: Served) -> None:
    answer = server.ask("POST", "/v1/chat/completions", b"{}", {"content-type": "text/plain"})
    assert answer.status == 415
