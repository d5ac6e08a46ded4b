"""`/v1/systemone` and `/v1/decisions` of a real, tiny model have the probabilities of `LLM.decide`."""

from __future__ import annotations

import concurrent.futures
import json
from typing import Any

import pytest

from jaxllm import LLM
from jaxllm.server.decisions.openai_protocol import DecisionRequest
from jaxllm.server.http.decoding import decode
from tests.server.support import Answer, Served

pytestmark = pytest.mark.server

STATE = {"ticket": "charged twice"}
QUESTIONS: dict[str, Any] = {
    "team": {"type": "choice", "instructions": "Which?", "criteria": {"bill": "paid", "bills": None, "ship": None}},
    "urgent": {"type": "noul", "instructions": "Urgent?", "criteria": {"true": "money"}},
    "tone": {"type": "score", "criteria": ["calm", "cross"]},
}
SYSTEMONE = {"state": STATE, "questions": QUESTIONS}
INPUT = [
    {"role": "user", "content": "My card"},
    {
        "role": "user",
        "content": [{"type": "input_text", "text": "was charged"}, {"type": "input_text", "text": "twice"}],
    },
]
OPENAI: list[dict[str, Any]] = [
    {"type": "predicate", "name": "urgent", "instructions": "Urgent?"},
    {
        "type": "choice",
        "instructions": "Refund?",
        "choices": [{"value": True, "description": "pay"}, {"value": "later"}, {"value": False}],
    },
    {
        "type": "score",
        "name": "tone",
        "instructions": "Tone?",
        "levels": [{"label": "calm"}, {"label": "cross", "description": "angry"}],
    },
]
DECISION = {"model": "tiny", "input": INPUT, "questions": OPENAI}


def test_systemone_answers_as_the_program_does(offline: LLM, tiny_server: Served) -> None:
    [expected] = offline.decide(STATE, QUESTIONS)
    answer = tiny_server.post("/v1/systemone", SYSTEMONE, {"X-Request-Id": "mine"}).json
    team, urgent, tone = (expected.answers[name] for name in ("team", "urgent", "tone"))
    assert (answer["id"], answer["object"], answer["model"]) == ("decision-mine", "structured_decision", "tiny")
    assert answer["answers"] == {
        "team": {
            "type": "choice",
            "choice": max(team.probabilities, key=team.probabilities.__getitem__),
            "probabilities": team.probabilities,
            "confidence": max(team.probabilities.values()) * team.label_mass,
        },
        "urgent": {
            "type": "noul",
            "noul": urgent.probabilities["yes"],
            "probabilities": urgent.probabilities,
            "confidence": max(urgent.probabilities.values()) * urgent.label_mass,
        },
        "tone": {
            "type": "score",
            "score": tone.probabilities["1"],
            "legend": {"0": "calm", "1": "cross"},
            "probabilities": tone.probabilities,
            "confidence": max(tone.probabilities.values()) * tone.label_mass,
        },
    }
    assert answer["diagnostics"] == {
        name: {"label_mass": each.label_mass, "argmax_is_label": each.argmax_is_label}
        for name, each in expected.answers.items()
    }
    assert answer["usage"] == {"input_tokens": expected.num_input_tokens, "output_tokens": expected.num_rows}


def test_decisions_answer_as_the_program_does(offline: LLM, tiny_server: Served) -> None:
    asked = {
        "0": {"type": "noul", "instructions": "Urgent?"},
        "1": {
            "type": "choice",
            "instructions": "Refund?",
            "criteria": {"true": "pay", "later": None, "false": None},
        },
        "2": {"type": "score", "instructions": "Tone?", "criteria": ["calm", "cross: angry"]},
    }
    [expected] = offline.decide("My card\n\nwas charged\n\ntwice", asked)
    answer = tiny_server.post("/v1/decisions", DECISION).json
    urgent, refund, tone = (expected.answers[name].probabilities for name in "012")
    best = max(range(3), key=list(refund.values()).__getitem__)
    assert answer["model"] == "tiny"
    assert answer["answers"] == [
        {"type": "predicate", "name": "urgent", "probability": urgent["yes"]},
        {
            "type": "choice",
            "name": None,
            "choice": [True, "later", False][best],
            "probabilities": [
                {"value": True, "probability": refund["true"]},
                {"value": "later", "probability": refund["later"]},
                {"value": False, "probability": refund["false"]},
            ],
            "confidence": max(refund.values()) * expected.answers["1"].label_mass,
        },
        {
            "type": "score",
            "name": "tone",
            "score": tone["1"],
            "probabilities": [
                {"value": 0, "label": "calm", "probability": tone["0"]},
                {"value": 1, "label": "cross", "probability": tone["1"]},
            ],
            "confidence": max(tone.values()) * expected.answers["2"].label_mass,
        },
    ]
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (expected.num_input_tokens, expected.num_rows)
    assert usage["total_tokens"] == expected.num_input_tokens + expected.num_rows
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert 0 < usage["input_tokens_details"]["cached_tokens"] < expected.num_input_tokens


def test_options_of_a_request_are_the_programs(offline: LLM, tiny_server: Served) -> None:
    options: dict[str, Any] = {"instructions": "Be fair.", "calibrate": True, "num_orders": 2}
    [expected] = offline.decide(STATE, QUESTIONS, **options)
    answers = tiny_server.post("/v1/systemone", SYSTEMONE | options).json["answers"]
    for name, answer in expected.answers.items():
        assert answers[name]["probabilities"] == answer.probabilities


def test_a_text_and_a_boolean_of_the_same_spelling_are_two_options() -> None:
    choices = [{"value": "true"}, {"value": True}, {"value": "no"}]
    body = {"input": "a", "questions": [{"type": "choice", "instructions": "?", "choices": choices}]}
    request = decode(json.dumps(body).encode(), DecisionRequest, {})
    options = request.questions_asked()["0"].options
    assert [each.spellings for each in options] == [('"true"',), ("true",), ('"no"',)]
    assert [json.loads(each.name) for each in options] == ["true", True, "no"]


def test_many_decisions_at_once_are_those_alone(tiny_server: Served) -> None:
    bodies = [SYSTEMONE | {"state": f"state {i % 3}", "cache_salt": str(i % 2)} for i in range(12)]
    alone = [tiny_server.post("/v1/systemone", body).json["answers"] for body in bodies[:6]]

    def ask(body: dict[str, Any]) -> Answer:
        return tiny_server.post("/v1/systemone", body)

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = [answer.json["answers"] for answer in pool.map(ask, bodies)]
    assert answers == alone * 2


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/systemone", {"questions": {}}, "questions"),
    ("/v1/systemone", {"questions": {"": QUESTIONS["tone"]}}, "questions"),
    ("/v1/systemone", {"questions": {"a": {"type": "box"}}}, "questions"),
    ("/v1/systemone", {"questions": {"a": QUESTIONS["tone"] | {"weight": 1}}}, "questions"),
    ("/v1/systemone", {"questions": {"a": QUESTIONS["tone"] | {"criteria": {"a": 1}}}}, "questions"),
    ("/v1/systemone", {"questions": {"a": QUESTIONS["team"] | {"criteria": ["a", "b"]}}}, "questions"),
    ("/v1/systemone", {"state": "word " * 2000}, "state"),
    ("/v1/systemone", {"images": ["data:image/png;base64,AA"]}, "images"),
    ("/v1/systemone", {"seed": 1}, "seed"),
    ("/v1/systemone", {"assets": {"a": {}}}, "assets"),
    ("/v1/systemone", {"stream": True}, "stream"),
    ("/v1/decisions", {"questions": []}, "questions"),
    ("/v1/decisions", {"questions": [{"type": "predicate"}]}, "questions"),
    ("/v1/decisions", {"questions": [OPENAI[1] | {"choices": [{"value": "a"}]}]}, "questions"),
    ("/v1/decisions", {"questions": [OPENAI[1] | {"choices": [{"value": "a"}, {"value": "a"}]}]}, "questions"),
    ("/v1/decisions", {"questions": [OPENAI[1] | {"choices": [{"value": 1}, {"value": 2}]}]}, "questions"),
    ("/v1/decisions", {"questions": [OPENAI[2] | {"levels": [{"label": "a"}]}]}, "questions"),
    ("/v1/decisions", {"input": []}, "input"),
    ("/v1/decisions", {"input": [{"role": "system", "content": "a"}]}, "input"),
    ("/v1/decisions", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input"),
    ("/v1/decisions", {"input": "word " * 2000}, "input"),
    ("/v1/decisions", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input"),
]


@pytest.mark.parametrize(("path", "fields", "name"), BAD)
def test_bad_requests_are_refused_by_name(tiny_server: Served, path: str, fields: dict[str, Any], name: str) -> None:
    answer = tiny_server.post(path, (SYSTEMONE if path == "/v1/systemone" else DECISION) | fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, name), answer.body


def test_unknown_models_are_not_found(tiny_server: Served) -> None:
    for path, body in (("/v1/systemone", SYSTEMONE), ("/v1/decisions", DECISION)):
        assert tiny_server.post(path, body | {"model": "other"}).status == 404


def test_models_that_pool_refuse_decisions(embedding_server: Served) -> None:
    for path, body in (("/v1/systemone", SYSTEMONE), ("/v1/decisions", DECISION)):
        answer = embedding_server.post(path, body)
        assert answer.status == 400
        assert "does not support Decisions" in answer.json["error"]["message"]
