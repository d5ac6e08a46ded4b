"""What goes around the application: CORS, ids of requests, a proxy's path, middleware of users' own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.app import build_app
from tests.server.support import Served, command_line, mock_served, served

ORIGIN = "https://a.example"
PREFLIGHT = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "x-own"}


def test_pages_of_other_origins_are_kept_out_unless_named(mock: AsyncLLM, mock_server: Served) -> None:
    closed = mock_server.ask("OPTIONS", "/v1/completions", headers=PREFLIGHT)
    assert closed.status == 405
    assert not any(
        name.startswith("access-control") for name in mock_server.get("/version", {"origin": ORIGIN}).headers
    )
    with served(mock, "--allowed-origins", f'["{ORIGIN}"]', "--api-key", "k") as server:
        opened = server.ask("OPTIONS", "/v1/completions", headers=PREFLIGHT)
        assert (opened.status, opened.headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert "x-own" in opened.headers["access-control-allow-headers"].lower()
        assert server.get("/version", {"origin": ORIGIN}).headers["access-control-allow-origin"] == ORIGIN
        assert "access-control-allow-origin" not in server.get("/version", {"origin": "https://b.example"}).headers
        refused = server.post("/v1/completions", {}, {"origin": ORIGIN})
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, ORIGIN)


def test_credentials_go_to_named_origins_alone() -> None:
    with pytest.raises(VLLMValidationError, match="allow_credentials"):
        ServerArgs(allow_credentials=True, allowed_origins=["*"])


@pytest.fixture(scope="module")
def server(tokenizer: str) -> Iterator[Served]:
    words = ("--enable-request-id-headers", "--middleware", f"{__name__}.Stamp", "--middleware", f"{__name__}.refuse")
    with mock_served(tokenizer, *words) as server:
        yield server


@pytest.mark.parametrize("request_id", ["r1", "A-b_c.9" * 10])
def test_r24_a_well_formed_id_is_echoed(server: Served, request_id: str) -> None:
    for path in ("/health", "/nothing", "/v1/models"):
        assert server.get(path, {"x-request-id": request_id}).headers["x-request-id"] == request_id
    body = {"prompt": [5], "max_tokens": 1}
    answer = server.post("/v1/completions", body, {"x-request-id": request_id})
    assert (answer.headers["x-request-id"], answer.json["id"]) == (request_id, f"cmpl-{request_id}")


@pytest.mark.parametrize("request_id", ["", "a b", "ü", "a" * 129, "<script>", "../../etc"])
def test_r24_another_id_is_replaced(server: Served, request_id: str) -> None:
    header = {"x-request-id": request_id.encode().decode("latin-1")}
    answer = server.post("/v1/completions", {"prompt": [5], "max_tokens": 1}, header)
    shown = answer.headers["x-request-id"]
    assert len(shown) == 32
    assert answer.json["id"] == f"cmpl-{shown}"


def test_a_proxy_may_take_its_path_off_or_not(tokenizer: str, mock_server: Served) -> None:
    with mock_served(tokenizer, "--root-path", "/llm", "--api-key", "k") as server:
        for prefix in ("", "/llm"):
            assert server.get(f"{prefix}/health").status == 200
            assert server.get(f"{prefix}/v1/models").status == 401
            assert server.get(f"{prefix}/v1/models", {"authorization": "Bearer k"}).status == 200
        assert server.get("/other/health").status == 401
        document = server.get("/openapi.json", {"authorization": "Bearer k"}).json
        assert document["servers"] == [{"url": "/llm"}]
    assert mock_server.get("/llm/health").status == 404


class Stamp:
    """A user's middleware, as a class."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def stamp(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"class")]
            await send(message)

        await self.app(scope, receive, stamp)


async def refuse(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """A user's middleware, as a function."""
    return Response(status_code=418) if request.url.path == "/refused" else await call_next(request)


def test_middleware_of_users(server: Served) -> None:
    assert server.get("/refused").status == 418
    assert server.get("/health").headers["x-stamp"] == "class"
    answer = server.post("/v1/completions", {"prompt": [5], "max_tokens": 2, "stream": True})
    assert answer.events


@pytest.mark.parametrize("name", ["nothing", "no.such.Module", f"{__name__}.ORIGIN", f"{__name__}.Absent", "."])
def test_middleware_that_is_none_is_refused_by_name(name: str) -> None:
    with pytest.raises(VLLMValidationError, match="middleware") as caught:
        build_app(command_line("--middleware", name))
    assert caught.value.parameter == "middleware"


@pytest.mark.parametrize("path", ["llm", "/llm/", "/"])
def test_a_root_path_of_another_form_is_refused(path: str) -> None:
    with pytest.raises(VLLMValidationError, match="root_path"):
        ServerArgs(root_path=path)
