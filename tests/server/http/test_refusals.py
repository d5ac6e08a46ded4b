"""The form of an error is that of the routes at its path, and finding it costs the same for any path."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.server.http.endpoint import Endpoint, Refusals, refuse
from tests.server.support import Served


class Counted(dict[str, Any]):
    """A dict that counts how often it is asked, and how long the keys are."""

    asked = length = 0

    def get(self, key: str, default: Any = None) -> Any:
        """Return what a dict does."""
        self.asked, self.length = self.asked + 1, self.length + len(key)
        return super().get(key, default)


@pytest.mark.parametrize("path", ["/" * 60_000, "/api" * 15_000, "/v1/messages" + "/x" * 30_000])
def test_a_path_of_many_parts_is_looked_up_a_few_times(mock_server: Served, path: str) -> None:
    refusals = Refusals(mock_server.app.routes)
    counted = refusals._below = Counted(refusals._below)
    refusals.at(path)
    assert counted.asked <= 10
    assert counted.length <= 1000


def test_paths_have_the_form_of_their_routes(mock_server: Served) -> None:
    refusals = Refusals(mock_server.app.routes)
    forms = {
        route.path: route.endpoint.refusal
        for route in mock_server.app.routes
        if isinstance(getattr(route, "endpoint", None), Endpoint)
    }
    assert refusals.at("/v1/messages/a/b/c/d/e/f") is forms["/v1/messages"]
    assert refusals.at("/api/nothing/here") is forms["/api/chat"]
    assert refusals.at("/v1/chat/completions") is refuse
    assert refusals.at("/") is refusals.at("") is refuse
