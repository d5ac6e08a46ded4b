"""A server without keys is used by its own pages and by programs, and not by pages from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.server.http.own_pages import listens_on_loopback
from tests.async_engine.support import mock_llm, tiny_args
from tests.server.support import Served, served

CHANGING = (
    "/sleep",
    "/pause",
    "/resume",
    "/reset_prefix_cache",
    "/wake_up",
    "/v1/completions",
    "/api/chat",
    "/nothing",
)


@pytest.fixture(scope="module")
def server(tokenizer: str) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        with mock_llm(tiny_args(tokenizer)) as llm, served(llm) as server:
            yield server


@pytest.mark.parametrize("origin", ["http://evil.example", "https://evil.example:8000", "null", "http://localhost:1"])
def test_pages_of_other_origins_change_nothing(server: Served, origin: str) -> None:
    """A text/plain body needs no leave of the server's: the browser would send it at once."""
    for path in CHANGING:
        answer = server.ask("POST", path, b"", {"content-type": "text/plain", "origin": origin})
        assert (answer.status, "--allowed-origins" in answer.body.decode()) == (403, True), path
    assert server.get("/is_sleeping").json == {"is_sleeping": False}
    assert server.get("/is_paused").json == {"is_paused": False}
    assert isinstance(server.post("/api/chat", {}, {"origin": origin}).json["error"], str)  # in Ollama's form
    assert server.get("/version", {"origin": origin}).status == 200


def test_own_pages_and_programs_do(server: Served) -> None:
    origin = f"http://127.0.0.1:{server.port}"
    for headers in (
        {},
        {"origin": origin},
        {"origin": origin.upper()},
        {"origin": f"http://localhost:{server.port}", "host": f"localhost:{server.port}"},
        {"origin": "https://proxy.example", "sec-fetch-site": "same-origin"},
        {"origin": "chrome-extension://abc"},
    ):
        assert server.post("/resume", {}, headers).status == 200, headers


def test_origins_that_are_named_do(mock: AsyncLLM) -> None:
    body = {"prompt": [1], "model": "no such"}
    for allowed, statuses in (('["https://a.example"]', (404, 403)), ('["*"]', (404, 404))):
        with served(mock, "--allowed-origins", allowed) as server:
            origins = ("https://a.example", "https://b.example")
            assert tuple(server.post("/v1/completions", body, {"origin": each}).status for each in origins) == statuses
    with served(mock, "--api-key", "k") as server:  # a page has no key that it is not given
        headers = {"origin": "https://a.example", "authorization": "Bearer k"}
        assert server.post("/v1/completions", body, headers).status == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost.:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("192.168.1.2", 200),
        ("host.docker.internal:8000", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("[::1].evil.example", 403),
    ],
)
def test_on_loopback_a_host_is_a_local_name_or_an_address(server: Served, host: str, status: int) -> None:
    """A page from elsewhere may have its own name point to this machine, and so be of the server's origin."""
    for method, path in (("GET", "/version"), ("POST", "/resume")):
        assert server.ask(method, path, b"", {"host": host, "origin": f"http://{host}"}).status == status


def test_hosts_that_are_named_may_be_asked_for(mock: AsyncLLM) -> None:
    def statuses(*words: str) -> list[int]:
        with served(mock, *words) as server:
            key = {"authorization": "Bearer k"}
            return [server.get("/v1/models", {"host": each, **key}).status for each in ("a.example", "b.example")]

    assert statuses() == [403, 403]
    assert statuses("--allowed-hosts", '["a.example"]') == [200, 403]
    assert statuses("--allowed-hosts", '["*"]') == [200, 200]
    assert statuses("--api-key", "k") == [200, 200]
    assert statuses("--api-key", "k", "--allowed-hosts", '["A.example"]') == [200, 403]
    assert statuses("--host", "0.0.0.0") == [200, 200]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"host": "127.0.0.1"}, True),
        ({"host": "127.9.9.9"}, True),
        ({"host": "::1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "LOCALHOST"}, True),
        ({"host": "127.1"}, True),
        ({"host": "no such host"}, False),
        ({"host": "0.0.0.0"}, False),
        ({"host": "10.0.0.1"}, False),
        ({}, False),
        ({"uds": "/tmp/socket"}, False),
    ],
)
def test_what_loopback_is(arguments: dict[str, str], expected: bool) -> None:
    assert listens_on_loopback(ServerArgs(**arguments)) is expected  # type: ignore[arg-type]
