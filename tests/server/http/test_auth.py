"""Keys (R17): every route needs one, however its path is spelled, but those that are listed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.app import OPEN_PATHS
from jaxllm.server.http.auth import KeyChecker, read_keys
from tests.server.support import Served, served

KEYS = ("first-key", "second key")


@pytest.fixture(scope="module")
def server(mock: AsyncLLM) -> Iterator[Served]:
    with served(mock, "--api-key", *KEYS) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_r17_every_route_needs_a_key(server: Served) -> None:
    paths = {(route.path, method) for route in server.app.routes for method in route.methods}
    assert {path for path, _ in paths} >= {"/v1/models", "/v1/chat/completions", "/openapi.json", "/docs"}
    for path, method in paths:
        status = server.ask(method, path).status
        assert (status == 401) is (path not in OPEN_PATHS), (method, path)


SPELLINGS = """
//v1/models /v1/models/ /V1/models /v1/%6dodels /health/ /health/../v1/models /HEALTH /%68ealth //health /health;x
/v1/models?/health /nothing // /. /index.html /page /page/ /page/../v1/models /page/other.js /page/%6dain.js
"""


@pytest.mark.parametrize("path", SPELLINGS.split())
def test_r17_spellings_of_a_path_are_not_open(server: Served, path: str) -> None:
    answer = server.get(path)
    assert answer.status == 401
    assert answer.json["error"]["type"] == "UnauthorizedError"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "headers", [{"host": "x/health"}, {"x-forwarded-prefix": "/health"}, {"x-original-url": "/health"}]
)
def test_r17_headers_open_nothing(server: Served, headers: dict[str, str]) -> None:
    assert server.get("/v1/models", headers).status == 401


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer ", "first-key", "Basic first-key", "Bearer first-ke", "Bearer first-keys", "Bearer second"],
)
def test_r17_wrong_keys(server: Served, value: str) -> None:
    assert server.get("/v1/models", {"authorization": value}).status == 401


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_good(server: Served, key: str) -> None:
    assert server.get("/v1/models", bearer(key)).status == 200
    assert server.get("/v1/models", {"authorization": f"bearer {key}"}).status == 200


def test_what_is_not_there_says_so_to_those_with_a_key(server: Served) -> None:
    for method, path, status in (("GET", "/nothing", 404), ("GET", "/v1/chat/completions", 405)):
        answer = server.ask(method, path, headers=bearer(KEYS[0]))
        assert (answer.status, answer.json["error"]["code"]) == (status, status)


def test_without_keys_nothing_is_asked_for(mock_server: Served) -> None:
    assert mock_server.get("/v1/models").status == 200


def test_keys_come_from_flags_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\n  third \nfirst\n")
    monkeypatch.setenv("JAXLLM_API_KEY", "fourth")
    args = ServerArgs(api_key=["first", "second"], api_key_file=str(file))
    assert read_keys(args) == ["first", "second", "third", "fourth"]


@pytest.mark.parametrize("text", [None, "", "# none\n\n"])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(VLLMValidationError, match="api_key_file") as caught:
        read_keys(ServerArgs(api_key_file=str(file)))
    assert caught.value.parameter == "api_key_file"


def test_a_checker_without_keys_accepts_nothing() -> None:
    assert not KeyChecker([]).accepts(b"")
