"""Responses, of answers that the model's core is told to give: input, output, events, and what is kept."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.http.errors import RequestFailedError
from jaxllm.server.responses.store import ResponseStore, StoredResponse
from tests.server.response_support import events_of, without_ids
from tests.server.support import Answer, Served
from tests.server.tool_support import ARGUMENTS, CALL, WEATHER, tool_served

PATH = "/v1/responses"
TOOL = {"type": "function", **WEATHER}


@pytest.fixture(scope="module")
def server(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tool_served(tokenizer, tmp_path_factory.mktemp("replies")) as server:
        yield server


def ask(server: Served, given_input: Any, **fields: Any) -> Answer:
    return server.post(PATH, {"model": "tiny", "input": given_input, "temperature": 0} | fields)


def respond(server: Served, given_input: Any, **fields: Any) -> Any:
    answer = ask(server, given_input, **fields)
    assert answer.status == 200, answer.body
    return answer.json


def text_of(response: Any) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("weather?", {"tools": [TOOL]}, ["function_call"]),
    ("both?", {"tools": [TOOL]}, ["message", "function_call", "function_call"]),
    ("broken?", {"tools": [TOOL]}, ["message"]),
    ("think?", {}, ["reasoning", "message"]),
    ("think and call?", {"tools": [TOOL]}, ["reasoning", "function_call"]),
    ("weather?", {"tools": [TOOL], "tool_choice": "none"}, ["message"]),
    ("think?", {"max_output_tokens": 3}, ["reasoning"]),
    ("nobody knows", {"max_output_tokens": 5, "ignore_eos": True, "seed": 1}, ["message"]),
]


@pytest.mark.parametrize(("content", "fields", "kinds"), CASES)
def test_a_streamed_response_is_the_whole_one(
    server: Served, content: str, fields: dict[str, Any], kinds: list[str]
) -> None:
    whole = respond(server, content, **fields)
    assert [item["type"] for item in whole["output"]] == kinds
    answer = ask(server, content, stream=True, **fields)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer)
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert whole["status"] == ("incomplete" if "max_output_tokens" in fields else "completed")
    for index, item in enumerate(whole["output"]):
        mine = [each for each in events if each.get("output_index") == index]
        text = "".join(each["delta"] for each in mine if each["type"].endswith(".delta"))
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    assert server.get(f"{PATH}/{events[0]['response']['id']}").json == events[-1]["response"]


def test_usage_counts_the_tokens_of_the_reasoning(server: Served) -> None:
    usage = respond(server, "think?")["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert respond(server, "weather?")["usage"]["output_tokens_details"]["reasoning_tokens"] == 0


def test_a_conversation_goes_on_by_items_or_by_id(server: Served) -> None:
    first = respond(server, "weather?", tools=[TOOL], instructions="Be brief.")
    call = first["output"][0]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", json.loads(ARGUMENTS))
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21 degrees"}
    by_id = respond(server, [result], tools=[TOOL], previous_response_id=first["id"])
    assert text_of(by_id) == "It is warm."
    assert (by_id["previous_response_id"], by_id["instructions"]) == (first["id"], None)
    by_items = respond(server, [{"role": "user", "content": "weather?"}, *first["output"], result], tools=[TOOL])
    by_reference = respond(
        server,
        [{"role": "user", "content": "weather?"}, {"type": "item_reference", "id": call["id"]}, result],
        tools=[TOOL],
    )
    expected = (by_id["usage"]["input_tokens"], "It is warm.")
    assert [(each["usage"]["input_tokens"], text_of(each)) for each in (by_items, by_reference)] == [expected] * 2
    third = respond(server, "both?", previous_response_id=by_id["id"])
    assert third["usage"]["input_tokens"] > by_id["usage"]["input_tokens"]


def test_input_items_can_be_referred_to_by_the_ids_in_their_list(server: Served) -> None:
    first = respond(server, "weather?", tools=[TOOL])
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "21 degrees"}
    second = respond(server, [result], previous_response_id=first["id"], tools=[TOOL])
    listed = server.get(f"{PATH}/{second['id']}/input_items?order=asc").json["data"]
    references = [{"type": "item_reference", "id": item["id"]} for item in listed]
    again = respond(server, references, tools=[TOOL])
    assert (text_of(again), again["usage"]) == (text_of(second), second["usage"])
    assert server.get(f"{PATH}/{again['id']}/input_items?order=asc").json["data"] == listed
    for name in (f"{listed[0]['id']}0", listed[0]["id"].replace("msg", "fco"), "msg__0", "resp_x_y"):
        refused = ask(server, [{"type": "item_reference", "id": name}])
        assert (refused.status, refused.json["error"]["param"]) == (404, "input"), name


def test_what_agents_send_is_taken(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    others = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}, {"type": "heard_of_only_here"}]
    fields = {
        "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Hear."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "think?"}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        ],
        "tools": [{**TOOL, "strict": False}, *others],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
        "service_tier": "auto",
        "truncation": "disabled",
        "metadata": {"a": "b"},
        "user": "u",
        "max_tool_calls": 3,
        "stream_options": None,
        "client_metadata": {"x": "y"},
    }
    answer = respond(server, **{"given_input": fields.pop("input"), **fields})
    assert [each["type"] for each in answer["tools"]] == ["function"]
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert (answer["reasoning"], answer["metadata"]) == ({"effort": "medium", "summary": "auto"}, {"a": "b"})
    assert server.get(f"{PATH}/{answer['id']}").status == 404
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    choice = respond(server, "weather?", tools=[TOOL, *others], tool_choice=allowed)
    assert text_of(choice) == CALL
    named = respond(server, "weather?", tools=[TOOL], tool_choice={"type": "function", "name": "get_weather"})
    assert [item["type"] for item in named["output"]] == ["function_call"]
    log = [each.getMessage() for each in caplog.records if "left out" in each.getMessage()]
    assert sum("'heard_of_only_here'" in line for line in log) == 1


@pytest.mark.server
def test_a_text_has_the_form_that_is_asked_for(tiny_server: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [10, 20]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    answer = respond(tiny_server, "hi", text={"format": form}, max_output_tokens=100)
    assert json.loads(text_of(answer))["a"] in (10, 20)
    assert answer["text"]["format"] == form


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": []}),
    ("messages", {"messages": []}),
    ("max_tokens", {"max_tokens": 5}),
    ("n", {"n": 2}),
    ("conversation", {"conversation": "c"}),
    ("prompt", {"prompt": {"id": "p"}}),
    ("include", {"include": ["anything"]}),
    ("top_logprobs", {"top_logprobs": 21}),
    ("logprobs", {"logprobs": True}),
    ("truncation", {"truncation": "never"}),
    ("stream_options", {"stream_options": {"include_obfuscation": False}}),
    ("background", {"background": True, "store": False}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("text", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
    ("text", {"text": {"format": {"type": "grammar"}}}),
    ("tools", {"tools": [{"type": "function"}]}),
    ("tools", {"tools": [TOOL, TOOL]}),
    ("tools", {"tools": [{**TOOL, "parameters": 3}]}),
    ("tool_choice", {"tool_choice": "required", "tools": [{"type": "web_search"}]}),
    ("tool_choice", {"tool_choice": {"type": "function", "name": "other"}, "tools": [TOOL]}),
    ("temperature", {"temperature": 5}),
    ("metadata", {"metadata": dict.fromkeys(map(str, range(17)), "a")}),
]


@pytest.mark.parametrize(("name", "fields"), REFUSED)
def test_what_has_no_meaning_here_is_refused_by_name(server: Served, name: str, fields: dict[str, Any]) -> None:
    answer = ask(server, "a", **fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, name), answer.body


def test_what_is_not_kept_is_not_found(server: Served) -> None:
    unknown = [
        ask(server, "a", previous_response_id="resp_x"),
        ask(server, [{"type": "item_reference", "id": "msg_x"}]),
    ]
    unknown += [server.ask(method, f"{PATH}/resp_x") for method in ("GET", "DELETE")]
    unknown += [server.ask("POST", f"{PATH}/resp_x/cancel")]
    assert [each.status for each in unknown] == [404] * 5
    names = ["previous_response_id", "input", "response_id", "response_id", "response_id"]
    assert [each.json["error"]["param"] for each in unknown] == names
    kept = respond(server, "weather?")
    assert server.ask("POST", f"{PATH}/{kept['id']}/cancel").json["error"]["param"] == "response_id"
    assert server.get(f"{PATH}/{kept['id']}?stream=true").json["error"]["param"] == "stream"
    assert server.get(f"{PATH}/{kept['id']}?stream=false").json == kept
    deleted = {"id": kept["id"], "object": "response", "deleted": True}
    assert server.ask("DELETE", f"{PATH}/{kept['id']}").json == deleted
    assert server.get(f"{PATH}/{kept['id']}").status == 404


def until(server: Served, response_id: str, status: str) -> Any:
    """Return a response in the background once it has some output, and a status."""
    deadline = time.monotonic() + 20
    while True:
        response = server.get(f"{PATH}/{response_id}").json
        if response["output"] and response["status"] == status:
            return response
        assert time.monotonic() < deadline, response
        time.sleep(0.01)


LONG = {"max_output_tokens": 450, "min_tokens": 450, "background": True, "seed": 1, "ignore_eos": True}


def test_a_response_in_the_background_is_made_after_its_request(mock_server: Served) -> None:
    begun = respond(mock_server, "hi", **LONG)
    assert (begun["status"], begun["output"], begun["background"]) == ("queued", [], True)
    early = ask(mock_server, "a", previous_response_id=begun["id"])
    assert (early.status, early.json["error"]["param"]) == (400, "previous_response_id")
    part = until(mock_server, begun["id"], "in_progress")
    assert part["output"][0]["status"] == "in_progress"
    assert mock_server.app.state.load.num_requests == 1
    whole = until(mock_server, begun["id"], "incomplete")
    assert text_of(whole).startswith(text_of(part))
    assert whole["usage"]["output_tokens"] == 450
    assert mock_server.app.state.load.num_requests == 0
    assert mock_server.ask("POST", f"{PATH}/{begun['id']}/cancel").json == whole


def test_a_response_that_is_cancelled_ends_its_request(mock_server: Served) -> None:
    begun = respond(mock_server, "hi", **LONG)
    until(mock_server, begun["id"], "in_progress")
    cancelled = mock_server.ask("POST", f"{PATH}/{begun['id']}/cancel").json
    assert (cancelled["status"], cancelled["output"][0]["status"]) == ("cancelled", "incomplete")
    assert mock_server.llm.front.outputs.num_unfinished_requests == 0
    assert mock_server.get(f"{PATH}/{begun['id']}").json == cancelled
    again = respond(mock_server, "hi", **LONG)
    assert mock_server.ask("DELETE", f"{PATH}/{again['id']}").status == 200
    assert mock_server.llm.front.outputs.num_unfinished_requests == 0


def test_a_client_that_leaves_ends_its_request(mock_server: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", mock_server.port, timeout=30)
    body = json.dumps({"input": "hi", "stream": True} | LONG | {"background": False})
    connection.request("POST", PATH, body, {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.readline() == b"event: response.created\n"
    response.close()
    connection.close()
    deadline = time.monotonic() + 10
    while mock_server.llm.front.outputs.num_unfinished_requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_truncation_drops_the_oldest_messages(mock_server: Served) -> None:
    turn = [{"role": "user", "content": "word " * 30}, {"role": "assistant", "content": "yes"}]
    long = [{"role": "system", "content": "s"}, *turn * 30, {"role": "user", "content": "hi"}]
    refused = ask(mock_server, long, max_output_tokens=3)
    assert (refused.status, refused.json["error"]["param"]) == (400, "input")
    answer = respond(mock_server, long, max_output_tokens=3, truncation="auto")
    longest = mock_server.llm.model_config.max_model_len
    one_turn = respond(mock_server, turn, max_output_tokens=3)["usage"]["input_tokens"]
    assert longest - 3 - one_turn < answer["usage"]["input_tokens"] <= longest - 3
    alone = ask(mock_server, "word " * 5000, truncation="auto")
    assert (alone.status, alone.json["error"]["param"]) == (400, "input")


def stored(size: int, *item_ids: str) -> StoredResponse:
    items = json.dumps([{"id": each} for each in item_ids]).encode()
    return StoredResponse(b"x" * size, (items,), item_ids, False)


def test_the_store_is_bounded_by_number_and_by_bytes() -> None:
    few = ResponseStore(2, 2**20)
    for name in "ab":
        few.put(name, stored(1, f"item_{name}"))
    few.find("a", "response_id")
    few.put("c", stored(1, "item_c"))
    assert few.finder()("item_b") is None
    assert few.finder()("item_a") == {"id": "item_a"}
    with pytest.raises(RequestFailedError, match="'b' not found"):
        few.find("b", "response_id")
    small = ResponseStore(100, 10_000)
    for number in range(50):
        small.put(str(number), stored(1000))
        small.put(str(number), stored(1000))
    assert small.num_bytes <= 10_000
    assert len(small) == 4
    small.put("large", stored(20_000))
    assert (len(small), small.num_bytes) == (0, 0)
    with pytest.raises(VLLMValidationError, match="store=false"):
        small.check_room((b"x" * 1000, b"x" * 1000))
