"""Connections are bounded (R16), and one whose client does not read disturbs nobody (R4, R12)."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import statistics
import time
from collections.abc import Iterator

import pytest

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.server.http.connection import MAX_AHEAD, PIECE, BoundedProtocol
from jaxllm.server.run import bind
from tests.server.support import Served, mock_served

HEAD_BYTES = 2048
BODY = {"prompt": [5], "max_tokens": 500, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 8}


@pytest.fixture(scope="module")
def server(tokenizer: str) -> Iterator[Served]:
    words = ("--h11-max-incomplete-event-size", str(HEAD_BYTES), "--h11-max-header-count", "20", "--header-timeout")
    with mock_served(tokenizer, *words, "0.4", "--stalled-client-timeout", "0.5") as server:
        yield server


@contextlib.contextmanager
def connected(server: Served) -> Iterator[socket.socket]:
    with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), timeout=10)) as connection:
        yield connection


def read_all(connection: socket.socket) -> bytes:
    """Return what comes until the server closes the connection."""
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def answer(server: Served, *pieces: bytes) -> bytes:
    with connected(server) as connection:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(0.01)  # as a packet of its own
        return read_all(connection)


START = b"GET /version HTTP/1.1\r\nhost: localhost\r\n"


def test_r16_a_head_of_the_limit_is_read_and_a_larger_one_is_not(server: Served) -> None:
    small = START + b"connection: close\r\nx: " + b"a" * (HEAD_BYTES - 200) + b"\r\n\r\n"
    assert answer(server, small).startswith(b"HTTP/1.1 200")
    large = START + b"x: " + b"a" * HEAD_BYTES + b"\r\n\r\n"
    refusal = answer(server, large)
    assert refusal.startswith(b"HTTP/1.1 431 ")
    body = json.loads(refusal.partition(b"\r\n\r\n")[2])
    assert body["error"]["code"] == 431
    assert "--h11-max-incomplete-event-size" in body["error"]["message"]


@pytest.mark.parametrize("line", [b"x: ", b"GET /"])
def test_r16_a_head_without_an_end_is_not_kept(server: Served, line: bytes) -> None:
    start = START + line if line != b"GET /" else line
    assert answer(server, start, *[b"a" * 1000] * 5).startswith(b"HTTP/1.1 431 ")


def test_r16_too_many_headers(server: Served) -> None:
    assert answer(server, START + b"a: b\r\n" * 30 + b"\r\n").startswith(b"HTTP/1.1 431 ")
    assert answer(server, START + b"connection: close\r\n" + b"a: b\r\n" * 10 + b"\r\n").startswith(b"HTTP/1.1 200 ")


def test_r16_a_head_in_small_pieces_has_to_come_in_time(server: Served) -> None:
    with connected(server) as connection:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in START * 10:
                connection.send(bytes([byte]))
                time.sleep(0.02)
        assert read_all(connection)[:13] in (b"HTTP/1.1 408 ", b"")  # what comes late may reset the connection
        assert time.monotonic() - began < 5


def test_r16_connections_that_say_nothing_are_closed(server: Served) -> None:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connected(server)) for _ in range(50)]
        assert server.get("/version").status == 200
        assert [read_all(each) for each in connections] == [b""] * 50


def test_the_next_request_of_a_connection_has_its_time_too(server: Served) -> None:
    with connected(server) as connection:
        connection.sendall(START + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        time.sleep(0.6)  # a connection may rest for longer than a head may take
        connection.sendall(START)
        assert b"HTTP/1.1 408 " in read_all(connection)  # the first answer's end may come before it


def test_nothing_waits_for_an_acknowledgement(server: Served) -> None:
    """A system acknowledges late, after 40 ms, what is followed by nothing."""
    times = []
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as connection:
        for _ in range(20):
            began = time.perf_counter()
            connection.request("GET", "/version")
            connection.getresponse().read()
            times.append(time.perf_counter() - began)
    assert statistics.median(times) < 0.035


def test_requests_in_one_packet_are_answered_in_order(server: Served) -> None:
    both = START + b"\r\n" + b"GET /nothing HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    answers = answer(server, both)
    assert answers.index(b"HTTP/1.1 200 ") < answers.index(b"HTTP/1.1 404 ")


def post(path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def test_r4_a_client_that_does_not_read_is_left_and_others_are_not_disturbed(server: Served) -> None:
    """Its answer waits for it in bounded memory; after the time that it has, its connection ends."""
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", server.port))
        stalled.sendall(post("/v1/completions", json.dumps(BODY).encode()))
        assert stalled.recv(100)
        other = server.post("/v1/completions", {"prompt": [5], "max_tokens": 200, "ignore_eos": True})
        assert other.status == 200
        deadline = time.monotonic() + 30
        while server.get("/load").json != {"server_load": 0}:
            assert time.monotonic() < deadline, "a client that does not read is waited for"
            time.sleep(0.05)


def test_a_client_that_reads_slowly_gets_everything(server: Served) -> None:
    """Deltas that wait for a slow reader become one."""
    body = {"prompt": [5], "max_tokens": 400, "ignore_eos": True, "stream": True, "seed": 3, "temperature": 0}
    quick = server.post("/v1/completions", body).body
    with connected(server) as connection:
        connection.sendall(post("/v1/completions", json.dumps(body).encode()))
        slow = b""
        while b"[DONE]" not in slow:
            slow += connection.recv(4096)
            time.sleep(0.002)
    texts = []
    for received in (quick, slow):
        events = [json.loads(line[6:]) for line in received.splitlines() if line.startswith(b"data: {")]
        texts.append("".join(event["choices"][0]["text"] for event in events if event["choices"]))
    assert texts[0] == texts[1]


def test_a_client_that_goes_in_the_middle_of_its_body_is_forgotten(server: Served) -> None:
    for _ in range(5):
        with connected(server) as connection:
            connection.sendall(post("/v1/completions", b"x" * 100)[:-50])
    deadline = time.monotonic() + 10
    while server.get("/load").json != {"server_load": 0}:
        assert time.monotonic() < deadline


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED += b"transfer-encoding: chunked\r\n\r\n"
STREAM = json.dumps({"prompt": [5], "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()


def test_few_requests_are_parsed_ahead_of_their_answers(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest waits unparsed, in bounded memory, and is answered in its turn."""
    ahead: list[int] = []
    begin = BoundedProtocol.on_headers_complete

    def note(protocol: BoundedProtocol) -> None:
        begin(protocol)
        ahead.append(len(protocol.pipeline))

    monkeypatch.setattr(BoundedProtocol, "on_headers_complete", note)
    count, request = 2000, b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with connected(server) as connection:
        connection.sendall(post("/v1/completions", STREAM) + request * (count - 1))
        connection.sendall(START + b"connection: close\r\n\r\n")
        answers = read_all(connection)
    assert (len(ahead), answers.count(b"HTTP/1.1 200 OK")) == (count + 1, count + 1)
    assert answers.index(b"[DONE]") < answers.index(b'{"version"')
    assert max(ahead) <= MAX_AHEAD + PIECE // len(request)


def test_what_waits_is_forgotten_when_the_client_leaves(tokenizer: str) -> None:
    with mock_served(tokenizer, tokens_per_second=2) as server:
        with connected(server) as connection:
            connection.sendall(post("/v1/completions", STREAM) + (START + b"\r\n") * 500)
            assert connection.recv(100)
        deadline = time.monotonic() + 30  # its answer would take 100 seconds
        while server.get("/load").json != {"server_load": 0}:
            assert time.monotonic() < deadline, "what was asked for first goes on"
            time.sleep(0.05)


def test_the_head_of_a_request_that_waits_has_to_come_in_time_too(server: Served) -> None:
    with connected(server) as connection:
        connection.sendall(START + b"\r\n" + START)
        assert b"HTTP/1.1 408 " in read_all(connection)


def test_r16_trailers_are_dropped(tokenizer: str) -> None:
    with mock_served(tokenizer, "--api-key", "secret") as keyed:
        body = b"2\r\n{}\r\n0\r\nauthorization: Bearer secret\r\nconnection: close\r\n\r\n"
        assert answer(keyed, CHUNKED + body + START + b"connection: close\r\n\r\n").startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    "pieces",
    [
        [b"2\r\n{}\r\n0\r\nx: ", *[b"a" * 1000] * 5],
        [b"2\r\n{}\r\n0\r\n", *[b"a: b\r\n" * 100] * 10],
        [b"2;", *[b"a" * 1000] * 5],
    ],
)
def test_r16_what_stands_around_chunks_is_bounded(server: Served, pieces: list[bytes]) -> None:
    refusal = answer(server, CHUNKED, *pieces)
    assert refusal.startswith(b"HTTP/1.1 431 ")
    assert "trailers" in json.loads(refusal.partition(b"\r\n\r\n")[2])["error"]["message"]


@pytest.mark.parametrize("body", [b"zz\r\n{}\r\n", b"2\r\n{}x\r\n0\r\n\r\n", b"-1\r\n", b"f" * 20 + b"\r\n", b"\r\n"])
def test_r16_malformed_chunks_are_bad_requests(server: Served, body: bytes) -> None:
    assert answer(server, CHUNKED + body).startswith(b"HTTP/1.1 400 ")


def test_chunks_of_one_byte_are_no_trailers(server: Served) -> None:
    body = json.dumps({"prompt": [5], "max_tokens": 1}).encode().ljust(HEAD_BYTES * 2)
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with connected(server) as connection:
        connection.sendall(CHUNKED + chunks + b"0\r\n\r\n" + START + b"connection: close\r\n\r\n")
        assert read_all(connection).count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0"])
def test_a_wish_for_another_protocol_is_ignored(server: Served, protocol: bytes) -> None:
    """Java's client sends one with each request."""
    body = json.dumps({"prompt": [5], "max_tokens": 3, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\nupgrade: " + protocol + b"\r\n"
    whole = head + b"content-length: %d\r\n\r\n" % len(body) + body
    chunked = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    with connected(server) as connection:
        connection.sendall(whole + chunked + START + b"connection: close\r\n\r\n")
        answers = read_all(connection)
    assert (answers.count(b"HTTP/1.1 200 OK"), answers.count(b'"completion_tokens":3')) == (3, 2)


def test_the_server_is_no_proxy(server: Served) -> None:
    assert answer(server, b"CONNECT x:80 HTTP/1.1\r\nhost: localhost\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_connections_have_the_options_of_their_listener() -> None:
    args = ServerArgs(host="127.0.0.1", port=0, stalled_client_timeout=7.5)
    with contextlib.closing(bind(args)) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), contextlib.closing(listener.accept()[0]) as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert 1 << 17 <= accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 1 << 18
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7500
