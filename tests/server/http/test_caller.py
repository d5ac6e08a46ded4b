"""The log and the engine know a request by an id of the server's own that ends with the client's."""

from __future__ import annotations

from jaxllm.server.http.caller import Caller
from tests.server.support import Served


def test_the_clients_id_is_in_the_engines(mock_server: Served) -> None:
    caller = Caller.of(mock_server.llm, {}, "0123", "mine")
    assert caller.request_id == "0123-mine"
    assert caller.shown_id("cmpl", None) == "cmpl-mine"
    assert Caller.of(mock_server.llm, {}, "0123", None).shown_id("cmpl", None) == "cmpl-0123"
