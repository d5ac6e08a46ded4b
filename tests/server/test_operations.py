"""What those who run a server ask it."""

from __future__ import annotations

import jaxllm
from tests.server.support import Served


def test_models_health_and_version(mock_server: Served) -> None:
    assert [each["id"] for each in mock_server.get("/v1/models").json["data"]] == ["tiny"]
    assert mock_server.get("/health").status == 200
    assert mock_server.get("/version").json == {"version": jaxllm.__version__}
