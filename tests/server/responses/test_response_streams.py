"""Responses that are streamed from the background, and the lists of responses' input items."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.responses.event_log import EventLog, LogRoom
from jaxllm.server.responses.items import Page, list_items
from jaxllm.server.responses.stream import Event, TextDelta
from tests.server.response_support import events_of, without_ids
from tests.server.support import Answer, Served, mock_served
from tests.server.tool_support import WEATHER, tool_served

PATH = "/v1/responses"
TOOL = {"type": "function", **WEATHER}
STREAM = {"background": True, "stream": True}
LONG = {"input": "hi", "max_output_tokens": 300, "min_tokens": 300, "seed": 1, "ignore_eos": True} | STREAM


@pytest.fixture(scope="module")
def server(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tool_served(tokenizer, tmp_path_factory.mktemp("replies")) as server:
        yield server


def param_of(answer: Answer) -> tuple[int, str | None]:
    return answer.status, answer.json["error"]["param"]


@contextlib.contextmanager
def begun(server: Served) -> Iterator[tuple[str, http.client.HTTPResponse]]:
    """Begin a long response and yield its id and its connection, from which the first event was read."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", PATH, json.dumps(LONG), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.readline() == b"event: response.created\n"
        first = json.loads(answer.readline().removeprefix(b"data: "))
        assert first["response"]["status"] == "queued"
        yield first["response"]["id"], answer


@pytest.mark.parametrize(("content", "fields"), [("think?", {}), ("both?", {"tools": [TOOL]})])
def test_a_background_stream_is_the_foreground_one(server: Served, content: str, fields: dict[str, Any]) -> None:
    request = {"input": content, "temperature": 0, "stream": True} | fields
    foreground = events_of(server.post(PATH, request))
    events = events_of(server.post(PATH, request | STREAM))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]
    assert kinds[2:] == [event["type"] for event in foreground[1:]]
    last, whole = events[-1]["response"], foreground[-1]["response"]
    assert without_ids(last) == without_ids(whole) | {"background": True}
    path = f"{PATH}/{last['id']}"
    assert server.get(path).json == last
    assert events_of(server.get(f"{path}?stream=true")) == events
    later = server.get(f"{path}?stream=true&starting_after=4").named_events
    assert later == events[5:]
    assert server.get(f"{path}?stream=true&starting_after={len(events) - 1}").body == b""


def test_a_background_response_can_be_streamed_later(mock_server: Served) -> None:
    for fields in ({"input": "a", "max_output_tokens": 2}, LONG | {"stream": False}):
        begun = mock_server.post(PATH, fields | {"background": True}).json
        events = events_of(mock_server.get(f"{PATH}/{begun['id']}?stream=true"))
        assert events[0]["response"] == begun
        assert events[-1]["response"] == mock_server.get(f"{PATH}/{begun['id']}").json
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(deltas) == events[-1]["response"]["output"][0]["content"][0]["text"]


def test_the_response_goes_on_without_its_client(mock_server: Served) -> None:
    with begun(mock_server) as (response_id, answer):
        answer.close()
    path = f"{PATH}/{response_id}"
    assert mock_server.get(path).json["status"] in ("queued", "in_progress")
    events = events_of(mock_server.get(f"{path}?stream=true"))
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["usage"]["output_tokens"] == 300
    assert events[-1]["response"] == mock_server.get(path).json
    assert mock_server.app.state.load.num_requests == 0


def test_several_clients_follow_one_response_and_see_its_end(mock_server: Served) -> None:
    with begun(mock_server) as (response_id, answer):
        path = f"{PATH}/{response_id}"
        with begun(mock_server) as (other, _):
            cancelled = mock_server.ask("POST", f"{PATH}/{other}/cancel").json
        rest = Answer(200, {}, b"event: response.queued\n" + answer.read().partition(b"event: response.queued\n")[2])
        followed = mock_server.get(f"{path}?stream=true&starting_after=0").named_events
    assert rest.named_events == followed
    events = events_of(mock_server.get(f"{PATH}/{other}?stream=1"))
    assert (events[-1]["type"], events[-1]["response"]) == ("response.failed", cancelled)
    assert cancelled["status"] == "cancelled"


def test_what_cannot_be_streamed_is_refused(mock_server: Served) -> None:
    small = {"input": "a", "max_output_tokens": 2}
    kept = mock_server.post(PATH, small).json["id"]
    queries: list[tuple[str, str, str]] = [
        (kept, "stream=true", "stream"),
        (kept, "starting_after=1", "starting_after"),
        (kept, "stream=maybe", "stream"),
        *(
            (kept, f"stream=true&starting_after={value}", "starting_after")
            for value in ("-1", "a", "", "1.5", "9" * 30, "9" * 5000, "%C2%B2", "%00")
        ),
    ]
    for response_id, query, name in queries:
        assert param_of(mock_server.get(f"{PATH}/{response_id}?{query}")) == (400, name), query
    assert param_of(mock_server.get(f"{PATH}/resp_x?stream=true")) == (404, "response_id")
    assert mock_server.get(f"{PATH}/{kept}?stream=false&x=%C3%A9%ff").status == 200


def test_idle_streams_are_pinged(tokenizer: str) -> None:
    with mock_served(tokenizer, "--sse-ping-interval", "0.02", tokens_per_second=10) as server:
        answer = server.post(PATH, {"input": "a", "max_output_tokens": 3, "ignore_eos": True} | STREAM)
    assert b": waiting\n\n" in answer.body
    assert answer.named_events[-1]["type"] == "response.incomplete"


def delta(number: int, size: int = 100) -> Event:
    return TextDelta(sequence_number=number, output_index=0, item_id="m", delta="x" * size)


async def read(log: EventLog, number: int) -> list[Any]:
    frames = b"".join([piece async for piece in log.follow(number, 0)])
    return Answer(200, {}, frames).named_events


def test_a_log_drops_its_oldest_events_and_says_so() -> None:
    async def run() -> None:
        room = LogRoom(max_bytes=10_000, longest=3_000)
        log = EventLog(room)
        behind = log.follow(0, 0)
        log.add([delta(0)])
        assert b'"sequence_number":0' in await anext(behind)
        for number in range(1, 100):
            log.add([delta(number)])
            assert log.num_bytes <= 3_000
        told = b"".join([piece async for piece in behind])
        [error] = Answer(200, {}, told).named_events
        assert (error["type"], error["code"], error["sequence_number"]) == ("error", "events_dropped", 1)
        with pytest.raises(VLLMValidationError, match="starting_after must be at least"):
            log.check_kept(3)
        log.end()
        log.end()
        kept = await read(log, 95)
        assert [event["sequence_number"] for event in kept] == [95, 96, 97, 98, 99]
        log.check_kept(200)
        assert await read(log, 200) == []
        assert room.num_logs == 0

    asyncio.run(run())


def test_running_logs_share_their_room() -> None:
    async def run() -> None:
        room = LogRoom(max_bytes=10_000, longest=3_000)
        logs = [EventLog(room) for _ in range(10)]
        for number in range(50):
            for log in logs:
                log.add([delta(number)])
        assert sum(log.num_bytes for log in logs) <= 10_000
        huge = EventLog(room)
        huge.add([delta(0, 20_000)])
        huge.end()
        assert len(await read(huge, 0)) == 1

    asyncio.run(run())


def test_the_events_count_in_the_store(mock_server: Served) -> None:
    store = mock_server.app.state.kept_responses.store
    made = events_of(mock_server.post(PATH, LONG))[-1]["response"]["id"]
    kept, before = store.find(made, "response_id"), store.num_bytes
    assert kept.log.num_bytes > 300 * 100
    assert mock_server.ask("DELETE", f"{PATH}/{made}").status == 200
    assert before - store.num_bytes == kept.size > kept.log.num_bytes
    assert param_of(mock_server.get(f"{PATH}/{made}?stream=true")) == (404, "response_id")


def listed(server: Served, response_id: str, query: str = "") -> Any:
    answer = server.get(f"{PATH}/{response_id}/input_items?{query}")
    assert answer.status == 200, answer.body
    return answer.json


def test_input_items_are_those_of_the_conversation(server: Served) -> None:
    first = server.post(PATH, {"input": "weather?", "tools": [TOOL], "temperature": 0}).json
    [alone] = listed(server, first["id"])["data"]
    assert alone.pop("id").startswith("msg_")
    content = [{"type": "input_text", "text": "weather?"}]
    assert alone == {"type": "message", "role": "user", "status": "completed", "content": content}
    call = first["output"][0]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21 degrees"}
    second = server.post(PATH, {"input": [result], "previous_response_id": first["id"], "temperature": 0}).json
    whole = listed(server, second["id"], "order=asc")
    assert [item["type"] for item in whole["data"]] == ["message", "function_call", "function_call_output"]
    assert whole["data"][1] == call
    assert without_ids(whole["data"][2]) == without_ids(result) | {"status": "completed"}
    assert (whole["first_id"], whole["last_id"]) == (whole["data"][0]["id"], whole["data"][2]["id"])
    assert listed(server, second["id"])["data"] == whole["data"][::-1]


def test_input_items_come_in_pages(mock_server: Served) -> None:
    said = [{"role": "user" if i % 2 == 0 else "assistant", "content": str(i)} for i in range(45)]
    made = mock_server.post(PATH, {"input": said, "max_output_tokens": 2}).json["id"]
    for order in ("asc", "desc"):
        texts, ids, query = [], [], f"order={order}"
        while True:
            page = listed(mock_server, made, query)
            texts += [item["content"][0]["text"] for item in page["data"]]
            ids += [item["id"] for item in page["data"]]
            if not page["has_more"]:
                break
            assert len(page["data"]) == 20
            query = f"order={order}&after={page['last_id']}"
        assert texts == [str(i) for i in range(45)][:: 1 if order == "asc" else -1]
        assert len(set(ids)) == 45
    empty = listed(mock_server, made, f"after={ids[-1]}")
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert len(listed(mock_server, made, "limit=100")["data"]) == 45
    bad = [("limit", each) for each in ("0", "101", "a", "", "-1", "1e1")]
    bad += [("order", each) for each in ("up", "ASC", "%00")] + [
        ("after", each) for each in ("x", "", quote("é"), "%ff")
    ]
    for name, value in bad:
        assert param_of(mock_server.get(f"{PATH}/{made}/input_items?{name}={value}")) == (400, name), value
    assert param_of(mock_server.get(f"{PATH}/resp_x/input_items")) == (404, "response_id")
    running = mock_server.post(PATH, {**LONG, "stream": False}).json["id"]
    assert listed(mock_server, running)["data"][0]["content"][0]["text"] == "hi"
    assert mock_server.ask("DELETE", f"{PATH}/{running}").status == 200


def test_ids_of_items_are_unique_so_that_pages_end() -> None:
    items = [{"id": "a", "type": "reasoning", "summary": []}, {"id": "a"}, {"id": 3, "role": "user", "content": ["x"]}]
    turns = (json.dumps(items[:2]).encode(), json.dumps([items[2], {"id": "out"}]).encode())
    whole = list_items(turns, 1, "resp_1", Page(order="asc"))
    assert [item["id"] for item in whole.data] == ["a", "msg_1_1", "msg_1_2"]
    assert whole.data[2]["content"] == [{"type": "input_text", "text": "x"}]
    after = list_items(turns, 1, "resp_1", Page(after="a", limit=1, order="asc"))
    assert ([item["id"] for item in after.data], after.has_more) == (["msg_1_1"], True)
