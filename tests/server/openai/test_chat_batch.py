"""Several conversations at once: the answers that each has alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.support import Served

pytestmark = pytest.mark.server

PATH = "/v1/chat/completions/batch"
TALKS = [[{"role": "user", "content": text}] for text in ("one", "two words", "and three of them")]


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5, "n": 2, "logprobs": True}])
def test_each_answer_is_that_of_the_conversation_alone(tiny_server: Served, fields: dict[str, Any]) -> None:
    body = {**fields, "max_tokens": 6, "return_token_ids": True}
    answer = tiny_server.post(PATH, {"messages": TALKS, **body}).json
    alone = [tiny_server.post("/v1/chat/completions", {"messages": talk, **body}).json for talk in TALKS]
    expected = [choice for one in alone for choice in one["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    for choice, other in zip(answer["choices"], expected, strict=True):
        assert choice | {"index": 0} == other | {"index": 0}
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(one["usage"][name] for one in alone)


@pytest.mark.parametrize(
    ("fields", "name", "words"),
    [
        ({"stream": True}, "stream", "/v1/chat/completions"),
        ({"use_beam_search": True, "n": 2}, "use_beam_search", "/v1/chat/completions"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "/v1/chat/completions"),
        ({"messages": []}, "messages", ""),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", ""),
        ({"messages": [TALKS[0], [{"role": "user", "content": "a " * 900}]]}, "messages", "conversation 1"),
        ({"messages": [TALKS[0], [{"role": 5}]]}, "messages", "conversation 1"),
        ({"n": 16_384}, "n", "conversations"),
        ({"temperature": 5}, "temperature", ""),
    ],
)
def test_bad_requests_are_refused_by_name(tiny_server: Served, fields: dict[str, Any], name: str, words: str) -> None:
    answer = tiny_server.post(PATH, {"messages": TALKS, "max_tokens": 2, **fields})
    assert (answer.status, answer.json["error"]["param"]) == (400, name), answer.body
    assert words in answer.json["error"]["message"]
