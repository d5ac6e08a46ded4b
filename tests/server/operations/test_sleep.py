"""A server with a real core sleeps and wakes over HTTP: the same process, the same answers, and steady memory."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from tests.async_engine.support import nothing_left, tiny_args
from tests.server.support import Served, served

pytestmark = pytest.mark.server

BODY = {"prompt": [[5, 6, 7, 8] * 4, [9, 10, 11] * 5], "max_tokens": 12, "temperature": 0, "logprobs": 3}
MOST_GROWTH = 16 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """Return a server with routes that let its engine sleep."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_SERVER_DEV_MODE", "1")
        with nothing_left(), AsyncLLM.from_engine_args(tiny_args()) as llm, served(llm) as server:
            yield server


def choices(server: Served) -> list[object]:
    answer = server.post("/v1/completions", BODY)
    assert answer.status == 200, answer.body
    return answer.json["choices"]


def is_sleeping(server: Served) -> bool:
    return server.get("/is_sleeping").json["is_sleeping"]


def test_twenty_sleeps(server: Served) -> None:
    expected, pids = choices(server), server.llm.core_pids
    core, sizes = psutil.Process(pids[0]), []
    for number in range(20):
        assert server.post(f"/sleep?level={1 + number % 2}", None).status == 200
        assert is_sleeping(server)
        assert [server.get("/health").status, server.post("/v1/completions", BODY).status] == [503, 503]
        sizes.append(core.memory_info().rss)
        if number % 3:
            assert server.post("/wake_up?tags=weights", None).status == 200
            assert is_sleeping(server)
        assert server.post("/wake_up?tags=weights&tags=kv_cache" if number % 2 else "/wake_up", None).status == 200
        assert not is_sleeping(server)
        assert server.get("/health").status == 200
        assert choices(server) == expected
    assert server.llm.core_pids == pids
    assert max(sizes[10:]) < max(sizes[4:10]) + MOST_GROWTH


def test_bad_arguments(server: Served) -> None:
    for path, words in (
        ("/sleep?level=3", "level must be 1 or 2"),
        ("/sleep?mode=keep", "requests cannot be kept"),
        ("/wake_up?tags=kv", "tags must be None or a list"),
    ):
        answer = server.post(path, None)
        assert (answer.status, words in answer.json["error"]["message"]) == (400, True)
    assert not is_sleeping(server)
