"""Chat completions in front of an engine without a model: their form, and what is refused."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from typing import Any

import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from tests.async_engine.support import metric
from tests.server.support import Answer, Served

PATH = "/v1/chat/completions"
BASE: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 5,
    "temperature": 0,
    "seed": 1,
    "ignore_eos": True,
}


def chat(server: Served, **fields: Any) -> Answer:
    return server.post(PATH, BASE | fields)


def joined(events: list[Any], index: int = 0) -> str:
    choices = [each["choices"][0] for each in events if each["choices"]]
    return "".join(each["delta"].get("content", "") for each in choices if each["index"] == index)


def test_a_whole_answer(mock_server: Served) -> None:
    answer = chat(mock_server, n=2, return_token_ids=True, return_prompt_text=True).json
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["system_fingerprint"] is None
    assert answer["prompt_text"] == "<user>hi<assistant>"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] == "length"
        assert len(choice["token_ids"]) == 5
    num_prompt = len(answer["prompt_token_ids"])
    usage = {"prompt_tokens": num_prompt, "completion_tokens": 10, "total_tokens": num_prompt + 10}
    assert answer["usage"] == usage | {"prompt_tokens_details": None, "completion_tokens_details": None}


@pytest.mark.parametrize("extra", [{}, {"return_token_ids": True}, {"stream_options": {"include_usage": True}}])
def test_a_stream_joined_is_the_whole_answer(mock_server: Served, extra: dict[str, Any]) -> None:
    whole = chat(mock_server, n=2).json
    answer = chat(mock_server, n=2, stream=True, **extra)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.events
    assert len({(each["id"], each["created"], each["object"]) for each in events}) == 1
    for choice in whole["choices"]:
        pieces = [each["choices"][0] for each in events if each["choices"]]
        mine = [each for each in pieces if each["index"] == choice["index"]]
        assert joined(events, choice["index"]) == choice["message"]["content"]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + ["length"]
        if "return_token_ids" in extra:
            assert sum(len(each.get("token_ids", [])) for each in mine) == 5
    if "stream_options" in extra:
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == whole["usage"]
    else:
        assert all("usage" not in each for each in events)


def test_continuous_usage_counts_up(mock_server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = chat(mock_server, stream=True, stream_options=options).events
    counts = [each["usage"]["completion_tokens"] for each in events]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == 5


def test_max_completion_tokens_count_before_max_tokens(mock_server: Served) -> None:
    assert chat(mock_server, max_completion_tokens=2).json["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_message_that_is_continued(mock_server: Served, stream: bool) -> None:
    messages = [*BASE["messages"], {"role": "assistant", "content": "Well"}]
    flags = {"add_generation_prompt": False, "continue_final_message": True, "messages": messages}
    plain = chat(mock_server, **flags).json["choices"][0]["message"]["content"]
    answer = chat(mock_server, **flags, echo=True, stream=stream)
    text = joined(answer.events) if stream else answer.json["choices"][0]["message"]["content"]
    assert text == "Well" + plain


def test_parts_and_roles(mock_server: Served) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": parts}]
    answer = chat(mock_server, messages=messages, return_prompt_text=True).json
    assert answer["prompt_text"] == "<system>d<user>a\nb<assistant>"


def test_fields_without_effect_are_taken(mock_server: Served) -> None:
    fields = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k"}
    more = {"safety_identifier": "s", "parallel_tool_calls": True, "modalities": ["text"], "nobody_knows": 1}
    assert chat(mock_server, **fields, **more, audio=None).status == 200


def test_options_of_a_stream_that_ask_for_nothing_may_come_without_one(mock_server: Served) -> None:
    for options in ({}, None, {"include_usage": False}, {"continuous_usage_stats": None}):
        assert chat(mock_server, stream_options=options, max_tokens=1).status == 200
        assert mock_server.post("/v1/completions", {"prompt": "a", "stream_options": options}).status == 200


def test_as_many_answers_as_are_returned_are_made(mock_server: Served) -> None:
    for fields in ({"best_of": 1}, {"best_of": 1, "n": 1}, {"best_of": 2, "n": 2}, {"best_of": None, "n": 2}):
        assert len(chat(mock_server, **fields).json["choices"]) == (fields.get("n") or 1)
    answer = chat(mock_server, n=2, best_of=3)
    assert (answer.status, answer.json["error"]["param"]) == (400, "best_of")
    assert "n=3" in answer.json["error"]["message"]


REFUSED: list[tuple[str, Any]] = [
    ("audio", {}),
    ("modalities", ["text", "audio"]),
    ("functions", []),
    ("web_search_options", {}),
    ("prediction", {}),
    ("best_of", 2),
    ("guided_json", {}),
    ("chat_template", "{{ 1 }}"),
    ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}),
    ("top_logprobs", 2),
    ("stream_options", {"include_usage": True}),
    ("length_penalty", 2.0),
    ("messages", []),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_has_no_meaning_here_is_refused_by_name(mock_server: Served, name: str, value: Any) -> None:
    """R15: nor is a request's template run."""
    answer = chat(mock_server, **{name: value})
    assert (answer.status, answer.json["error"]["param"]) == (400, name), answer.body


def test_ids_are_the_clients_only_if_well_formed(mock_server: Served) -> None:
    """R24: no id is used inside but the server's own, so that two may bear one name at once."""
    assert chat(mock_server, request_id="mine-1").json["id"] == "chatcmpl-mine-1"
    asked = mock_server.post(PATH, BASE | {"request_id": "b"}, {"x-request-id": "a.b_c"})
    assert asked.json["id"] == "chatcmpl-a.b_c"
    strange = mock_server.post(PATH, BASE | {"request_id": "a/../b"}, {"x-request-id": "x y"})
    assert len(strange.json["id"]) == len("chatcmpl-") + 32


def test_a_client_that_leaves_ends_its_request(mock: AsyncLLM, mock_server: Served) -> None:
    before = metric(mock, "request_success", finished_reason="abort")
    connection = http.client.HTTPConnection("127.0.0.1", mock_server.port, timeout=30)
    body = json.dumps(BASE | {"stream": True, "max_tokens": 450, "min_tokens": 450})
    with contextlib.closing(connection):
        connection.request("POST", PATH, body, {"content-type": "application/json"})
        with connection.getresponse() as response:
            assert response.readline().startswith(b"data: ")
    deadline = time.monotonic() + 10
    while mock.front.outputs.num_unfinished_requests and time.monotonic() < deadline:
        time.sleep(0.01)
    assert metric(mock, "request_success", finished_reason="abort") == before + 1


def test_beams(mock_server: Served) -> None:
    answer = chat(mock_server, use_beam_search=True, n=3).json
    assert len(answer["choices"]) == 3
    assert chat(mock_server, use_beam_search=True, stream=True).json["error"]["param"] == "use_beam_search"
    assert chat(mock_server, use_beam_search=True, stop="x").json["error"]["param"] == "stop"
