"""R17: whatever routes there are, by any method and any spelling of their paths, nothing but what is open opens."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from starlette.routing import Route

from jaxllm.server.app import OPEN_PATHS
from jaxllm.server.http.auth import KeyChecker
from tests.server.support import Served, mock_served

KEY = "the-key"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
BAD_KEYS = (
    *("", KEY, f"Basic {KEY}", "Bearer", "Bearer ", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", f"Bearer x{KEY}"),
    *(f"Bearer {KEY.upper()}", f"Bearer {KEY}\x00", f"Bearer {KEY},{KEY}", f"Bearer Bearer {KEY}"),
)
ROOT_PATHS = ("", "/v", "/health")


@pytest.fixture(scope="module", params=ROOT_PATHS)
def server(request: pytest.FixtureRequest, tokenizer: str) -> Iterator[Served]:
    """Return a server with an engine of its own: some routes ask the core, which is for a single event loop."""
    words = ("--root-path", request.param) if request.param else ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_SERVER_DEV_MODE", "1")
        with mock_served(tokenizer, "--api-key", KEY, *words) as server:
            yield server


class Client:
    """This asks on one connection for as long as it is kept."""

    def __init__(self, port: int) -> None:
        self._port, self._connection = port, self._connect(port)

    @staticmethod
    def _connect(port: int) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), timeout=20)

    def status(self, method: str, target: str, *headers: str) -> int:
        """Return the status of the answer to one request."""
        lines = [f"{method} {target} HTTP/1.1", "host: localhost", *headers, "content-length: 0"]
        self._connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        head = b""
        while b"\r\n\r\n" not in head:
            piece = self._connection.recv(65536)
            if not piece:
                break
            head += piece
        head, _, body = head.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        missing = 0 if method == "HEAD" else int(fields.get(b"content-length", b"0")) - len(body)
        while missing > 0 and (piece := self._connection.recv(65536)):
            missing -= len(piece)
        if fields.get(b"connection") == b"close" or not head:
            self.close()
            self._connection = self._connect(self._port)
        return int(head.split()[1])

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


@pytest.fixture
def client(server: Served) -> Iterator[Client]:
    with contextlib.closing(Client(server.port)) as client:
        yield client


def paths(server: Served) -> list[str]:
    listed = [route.path.replace("{model:path}", "tiny") for route in server.app.routes if isinstance(route, Route)]
    assert {"/v1/models", "/v1/completions", "/metrics", "/docs", "/openapi.json", "/sleep"} <= set(listed)
    return [*listed, "/nothing", "/"]


def spellings(path: str) -> set[str]:
    """Return ways to write a path that a server could take for it."""
    escaped = "/" + "".join(f"%{ord(character):02x}" for character in path[1:])
    return {
        *(path + "/", "/" + path, path.upper(), path.title(), "/." + path, "/x/.." + path, path + "/.", path + "//"),
        *(path + "?", path + "?/health", path + ";x", path + "#", path + "%20", path + "%00", path + "%2f", escaped),
        *("/health/.." + path, "/health/%2e%2e" + path, "/%2e" + path, "/health" + path, path + "/health"),
        *(f"http://x{path}", f"http://x/health{path}", path.replace("/", "%2F", 1), path.replace("/", "\\")),
    }


def test_r17_every_route_by_every_method_needs_a_key(server: Served, client: Client) -> None:
    root = server.app.state.server_args.root_path or ""
    for path in paths(server):
        for prefix in dict.fromkeys(("", root)):
            target = prefix + path
            for method in METHODS:
                status = client.status(method, target)
                is_open = path in OPEN_PATHS or target in OPEN_PATHS
                assert (status == 401) is not is_open, (method, target, status)


def test_r17_no_spelling_opens_a_route(server: Served, client: Client) -> None:
    root = server.app.state.server_args.root_path or ""
    is_open = OPEN_PATHS | {root + path for path in OPEN_PATHS}
    for path in paths(server):
        for target in spellings(path):
            sent = target.removeprefix("http://x").partition("?")[0].partition("#")[0]
            status = client.status("GET", target)
            if sent not in is_open:
                assert status in (400, 401), (target, status)


def test_r17_no_other_key_opens_a_route(server: Served, client: Client) -> None:
    for path in paths(server):
        if path in OPEN_PATHS:
            continue
        assert client.status("GET", path, f"authorization: Bearer {KEY}") != 401
        assert client.status("GET", path, f"authorization: Bearer {KEY[:-1]}") == 401
    for key in BAD_KEYS:
        assert client.status("GET", "/v1/models", f"authorization: {key}") in (400, 401), key
    for headers in (
        [f"authorization: Bearer {KEY}", "authorization: Bearer x"],
        [f"x-api-key: {KEY}x"],
        [f"x-api-key: {KEY}", f"x-api-key: {KEY}"],
        [f"x-api-key: {KEY}", "authorization: Bearer x"],
        [f"cookie: authorization=Bearer {KEY}"],
        ["x-forwarded-prefix: /health", "x-original-url: /health", "x-rewrite-url: /health"],
        ["host: x/health", "x-forwarded-host: x/health"],
    ):
        assert client.status("GET", "/v1/models", *headers) in (400, 401), headers


def test_r17_keys_are_compared_as_digests_of_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append((first, second))
        return first == second

    monkeypatch.setattr("jaxllm.server.http.auth.hmac.compare_digest", compare)
    checker = KeyChecker(["a", "b" * 1000, KEY])
    for token in (b"", b"a", KEY.encode(), b"x" * 100_000):
        compared.clear()
        checker.accepts(token)
        assert [(len(first), len(second)) for first, second in compared] == [(32, 32)] * 3  # the first too goes on
