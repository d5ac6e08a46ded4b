"""Chat completions of a real, tiny model are those of `LLM.chat`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.sampling_params import RequestOutputKind
from tests.server.openai.test_chat import PATH, joined
from tests.server.support import Served

MESSAGES = [{"role": "user", "content": "Tell me"}]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 8},
    {"temperature": 0.9, "seed": 7, "max_tokens": 8, "n": 2},
    {"temperature": 0.9, "seed": 7, "max_tokens": 8, "stop": ["e", "a"]},
]

F = {"name": "f"}
BAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)b"}}, "required": ["a"]}
"""No grammar here can look ahead."""


def tool_of(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {**F, "parameters": parameters}}


@pytest.mark.server
@pytest.mark.parametrize("parameters", KINDS)
def test_texts_tokens_and_logprobs_are_those_of_the_program(
    offline: LLM, tiny_server: Served, parameters: dict[str, Any]
) -> None:
    [expected] = offline.chat(MESSAGES, SamplingParams(**parameters, logprobs=2, prompt_logprobs=1), use_tqdm=False)
    body = {"messages": MESSAGES, **parameters, "return_token_ids": True}
    scored = tiny_server.post(PATH, body | {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}).json
    assert scored["prompt_token_ids"] == expected.prompt_token_ids
    assert len(scored["prompt_logprobs"]) == len(expected.prompt_logprobs or ())
    for choice, output in zip(scored["choices"], expected.outputs, strict=True):
        assert choice["token_ids"] == list(output.token_ids)
        assert choice["message"]["content"] == output.text
        assert (choice["finish_reason"], choice["stop_reason"]) == (output.finish_reason, output.stop_reason)
        assert output.logprobs is not None
        for shown, token, position in zip(
            choice["logprobs"]["content"], output.token_ids, output.logprobs, strict=True
        ):
            assert shown["logprob"] == position[token].logprob
            best = max(each.logprob for each in position.values())
            assert shown["top_logprobs"][0]["logprob"] == best
            assert len(shown["top_logprobs"]) == 2
    events = tiny_server.post(PATH, body | {"stream": True, "logprobs": True, "top_logprobs": 2}).events
    for choice in scored["choices"]:
        assert joined(events, choice["index"]) == choice["message"]["content"]
        pieces = [each["choices"][0] for each in events if each["choices"][0]["index"] == choice["index"]]
        tokens = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
        assert tokens == choice["logprobs"]["content"]


@pytest.mark.server
def test_log_probabilities_of_ids_stand_in_for_the_most_likely_ones(tiny_server: Served) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "seed": 5, "return_tokens_as_token_ids": True, "logprobs": True}
    alone = tiny_server.post(PATH, body | {"logprob_token_ids": [40, 41, 42]}).json["choices"][0]["logprobs"]["content"]
    for beside in (0, 1, 3, 20):
        shown = tiny_server.post(PATH, body | {"logprob_token_ids": [40, 41, 42], "top_logprobs": beside}).json
        assert shown["choices"][0]["logprobs"]["content"] == alone
    for entry in alone:
        assert {each["token"] for each in entry["top_logprobs"]} == {"token_id:40", "token_id:41", "token_id:42"} | {
            entry["token"]
        }
    none = tiny_server.post(PATH, body | {"logprob_token_ids": []}).json["choices"][0]["logprobs"]["content"]
    assert [(each["token"], each["top_logprobs"]) for each in none] == [(each["token"], []) for each in alone]
    completion = {"prompt": "ab", "max_tokens": 2, "logprob_token_ids": [40, 41], "return_tokens_as_token_ids": True}
    for asked in ({}, {"logprobs": 1}, {"logprobs": 5}):
        [choice] = tiny_server.post("/v1/completions", completion | asked).json["choices"]
        for token, top in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True):
            assert top.keys() == {"token_id:40", "token_id:41", token}


@pytest.mark.server
def test_ollamas_form_has_the_same_log_probabilities(tiny_server: Served) -> None:
    body = {"messages": MESSAGES, "max_tokens": 6, "seed": 5, "logprobs": True, "top_logprobs": 2}
    expected = tiny_server.post(PATH, body).json["choices"][0]["logprobs"]["content"]
    ollama_body = {"model": "tiny", "messages": MESSAGES, "options": {"num_predict": 6, "seed": 5}}
    ollama_body |= {"logprobs": True, "top_logprobs": 2}
    assert tiny_server.post("/api/chat", ollama_body | {"stream": False}).json["logprobs"] == expected
    lines = [json.loads(line) for line in tiny_server.post("/api/chat", ollama_body).body.splitlines()]
    assert [each for line in lines for each in line.get("logprobs", [])] == expected
    plain = tiny_server.post("/api/chat", ollama_body | {"stream": False, "logprobs": False, "top_logprobs": None}).json
    assert "logprobs" not in plain


@pytest.mark.server
@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("tools", {"tools": [tool_of(BAD)], "tool_choice": "required"}),
        ("tools", {"tools": [tool_of(BAD) | {"type": "function"}], "tool_choice": {"type": "function", "function": F}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": BAD}}}),
        ("structured_outputs", {"structured_outputs": {"json": BAD}}),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_own_field(
    tiny_server: Served, field: str, fields: dict[str, Any]
) -> None:
    answer = tiny_server.post(PATH, {"messages": MESSAGES, "max_tokens": 3, **fields})
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, field), answer.body
    assert "look-around" in error["message"]
    assert error["message"].startswith(field)
    if field != "structured_outputs":
        assert error["message"].startswith(f"{field}: cannot be enforced: ")
        assert "start:" not in error["message"]


@pytest.mark.server
def test_the_sampled_token_is_among_the_likeliest(tiny_server: Served) -> None:
    body = {"messages": MESSAGES, "max_tokens": 20, "seed": 5, "temperature": 2.0, "logprobs": True, "top_logprobs": 1}
    shown = tiny_server.post(PATH, body).json["choices"][0]["logprobs"]["content"]
    assert all(entry["token"] == entry["top_logprobs"][0]["token"] for entry in shown)
    wider = tiny_server.post(PATH, body | {"top_logprobs": 2}).json["choices"][0]["logprobs"]["content"]
    assert any(entry["token"] != entry["top_logprobs"][0]["token"] for entry in wider)
    assert all(entry["token"] in [each["token"] for each in entry["top_logprobs"]] for entry in wider)


@pytest.mark.server
def test_response_format(tiny_server: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40, "response_format": wanted}
    answer = tiny_server.post(PATH, body)
    assert answer.status == 200
    assert answer.json["choices"][0]["message"]["content"].lstrip().startswith("{")
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    for stream in (False, True):
        refused = tiny_server.post(PATH, body | {"response_format": bad, "stream": stream})
        assert refused.status == 400


@pytest.mark.server
def test_progress_of_a_prompt_is_what_the_core_has_computed(tiny: AsyncLLM, tiny_server: Served) -> None:
    async def run() -> tuple[list[tuple[int, int]], tuple[int, int]]:
        params = SamplingParams(max_tokens=1, temperature=0.0, output_kind=RequestOutputKind.DELTA)
        stream = await tiny.add_request("progress", {"prompt_token_ids": list(range(30, 90))}, params)
        seen: list[tuple[int, int]] = []
        progress = await tiny.prefill_progress("progress")
        while (output := stream.get_nowait()) is None:
            seen.append(progress)
            progress = await tiny.prefill_progress("progress")
        assert output.finished
        return seen, await tiny.prefill_progress("progress")

    seen, after = asyncio.run_coroutine_threadsafe(run(), tiny_server.loop).result(30)
    counts = [count for count, _ in seen]
    assert counts == sorted(counts)
    assert {length for _, length in seen} == {60}
    assert any(0 < count < 60 for count in counts)  # steps take 16 tokens
    assert after == (0, 0)


@pytest.mark.server
def test_rules_that_leave_no_token_are_the_requests_fault(tiny_server: Served) -> None:
    tokens = [tiny_server.post("/tokenize", {"prompt": text}).json["tokens"][-1] for text in ("a", '"')]
    rules: dict[str, Any] = {"allowed_token_ids": tokens, "max_tokens": 5}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["b"]}}}
    asked: list[tuple[str, dict[str, Any], str]] = [
        (PATH, {"messages": MESSAGES, "structured_outputs": {"choice": ["ab"]}}, "structured_outputs"),
        (PATH, {"messages": MESSAGES, "response_format": form}, "response_format"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"choice": ["ab"]}}, "structured_outputs"),
    ]
    for path, fields, name in asked:
        refused = tiny_server.post(path, rules | fields)
        error = refused.json["error"]
        assert (refused.status, error["param"], "leave no token" in error["message"]) == (400, name, True)
        *_, last = tiny_server.post(path, rules | fields | {"stream": True}).body.split(b"data: ")
        assert json.loads(last)["error"]["code"] == 400
