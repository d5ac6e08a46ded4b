"""What is out of a field's bounds is refused by name (R13), in the same words whichever way it comes in."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from tests.server.bad_requests import FLOATS, INTEGERS, Bad, bad_requests
from tests.server.grpc_support import Client, client_of, grpc_opened, message_of, refusal
from tests.server.support import Served

GOOD = {"prompt": "a", "max_tokens": 1}
FREE = ("logprobs", "seed", "stream_interval", "top_k")
"""The integers whose bounds depend on nothing else, and cost little."""
BOUNDS: list[tuple[str, float]] = [(name, bound) for name in FREE for bound in INTEGERS[name]]
BOUNDS += [(name, bound) for name, bounds in FLOATS.items() for bound in bounds if (name, bound) != ("top_p", 0.0)]


@pytest.fixture(scope="module")
def client(tiny_server: Served) -> Iterator[Client]:
    with grpc_opened(tiny_server) as address, client_of(address) as client:
        yield client


@pytest.mark.server
@pytest.mark.parametrize("bad", list(bad_requests()), ids=lambda bad: bad.name)
def test_r13_bad_requests_are_refused_by_name_over_http_and_grpc(tiny_server: Served, client: Client, bad: Bad) -> None:
    fields, words = {**GOOD, **bad.fields}, None
    if bad.has_json:
        answer = tiny_server.post("/v1/completions", fields)
        assert answer.status == 400, answer.body
        assert answer.json["error"]["param"] == bad.parameter
        words = answer.json["error"]["message"]
    if bad.has_message:
        code, details, metadata = refusal(lambda: client.whole(message_of(fields)))
        assert (code, metadata.get("param")) == (grpc.StatusCode.INVALID_ARGUMENT, bad.parameter)
        assert words in (None, details)
        code, _, metadata = refusal(lambda: list(client.stream(message_of(fields))))
        assert (code, metadata.get("param")) == (grpc.StatusCode.INVALID_ARGUMENT, bad.parameter)
    else:
        with pytest.raises((ValueError, TypeError)):
            message_of(fields)


@pytest.mark.parametrize(("name", "bound"), BOUNDS)
def test_r13_what_is_just_within_its_bounds_is_accepted(mock_server: Served, name: str, bound: float) -> None:
    fields = {**GOOD, name: bound}
    assert mock_server.post("/v1/completions", fields).status == 200
    if bound < 2**63:
        with grpc_opened(mock_server) as address, client_of(address) as client:
            assert client.whole(message_of(fields)).usage.completion_tokens == 1


@pytest.mark.server
def test_r13_without_a_prompt_nothing_is_done(client: Client) -> None:
    code, details, metadata = refusal(lambda: client.whole(message_of({"max_tokens": 1})))
    assert (code, metadata["param"]) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt")
    assert "text or token_ids" in details


@pytest.mark.server
def test_r13_what_does_not_go_with_a_stream_is_refused_in_both(tiny_server: Served, client: Client) -> None:
    fields = {**GOOD, "prompt_logprobs": 1}
    refused = tiny_server.post("/v1/completions", {**fields, "stream": True}).json["error"]
    code, details, metadata = refusal(lambda: list(client.stream(message_of(fields))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert (details, metadata["param"]) == (refused["message"], refused["param"])
