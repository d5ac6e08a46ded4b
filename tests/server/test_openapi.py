"""The OpenAPI document describes every route, and answers match it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from starlette.routing import Route

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.server.app import build_app
from jaxllm.server.page.routes import PAGE_FILES
from tests.server.support import Served, command_line, served

REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "logprobs": True},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2, "logprobs": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture(scope="module")
def document(mock_server: Served) -> dict[str, Any]:
    answer = mock_server.get("/openapi.json")
    assert answer.status == 200
    return answer.json


def test_every_route_is_described(document: dict[str, Any]) -> None:
    app = build_app(command_line())
    hidden = {"/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc", *PAGE_FILES}
    paths = {route.path_format for route in app.routes if isinstance(route, Route)} - hidden
    assert document["paths"].keys() >= paths
    operations = [each for path in document["paths"].values() for each in path.values()]
    assert all(each["summary"] for each in operations)
    names = [each["operationId"] for each in operations]
    assert len(names) == len(set(names))


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    names = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document))
    assert names
    assert document["components"]["schemas"].keys() >= set(names)


@pytest.mark.parametrize("path", REQUESTS)
def test_answers_have_the_properties_described(mock_server: Served, document: dict[str, Any], path: str) -> None:
    operation, schemas = document["paths"][path]["post"], document["components"]["schemas"]

    def properties(content: dict[str, Any]) -> dict[str, Any]:
        return schemas[content["application/json"]["schema"]["$ref"].rpartition("/")[2]]["properties"]

    assert properties(operation["requestBody"]["content"]).keys() >= REQUESTS[path].keys()
    answer = mock_server.post(path, REQUESTS[path]).json
    assert properties(operation["responses"]["200"]["content"]).keys() == answer.keys()
    failed = mock_server.post(path, {"model": "other", **REQUESTS[path]}).json
    assert properties(operation["responses"]["default"]["content"]).keys() == failed.keys()


def test_keys_are_described_where_there_are_some(mock_server: Served, document: dict[str, Any]) -> None:
    assert "security" not in document
    with_keys = build_app(command_line("--api-key", "k")).openapi()
    assert with_keys["security"] == [{"key": []}]
    assert with_keys["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


def test_without_docs_there_are_none(mock: AsyncLLM, mock_server: Served) -> None:
    paths = ("/openapi.json", "/docs", "/redoc")
    assert [mock_server.get(path).status for path in paths] == [200, 200, 200]
    with served(mock, "--disable-fastapi-docs") as server:
        assert [server.get(path).status for path in paths] == [404, 404, 404]
