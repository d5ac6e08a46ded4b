"""R15: chat templates that loop or make huge texts end within their limits, and harm no other request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.text.template_limits import MAX_SOURCE
from jaxllm.text.templates import ChatTemplates
from tests.async_engine.support import mock_llm, tiny_args
from tests.server.support import TEMPLATE, Answer, Served, mock_served, served

PATH = "/v1/chat/completions"
SECONDS = 0.5
"""The limit of the tests' servers; a server's own is 10."""
LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
HUGE = "{% for i in range(100000) %}{{ 'a' * 100000 }}{% endfor %}"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "ignore_eos": True}
HOSTILE = {
    "endless": (LOOP, "longer than"),
    "huge": (HUGE, "characters of text"),
    "endless macro": ("{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(100) }}", ""),
    "too long": ("a{{ 1 }}" * (MAX_SOURCE // 8 + 1), "longer than"),
    "attributes": ("{{ ''.__class__.__mro__ }}{{ messages.__init__.__globals__ }}", ""),
    "writes": ("{% set x = messages.append(1) %}", ""),
    "no template": ("{% for %}", ""),
    "an object": ("{{ raise_exception(messages[0].items | string) }}", ""),
}


@pytest.fixture(scope="module")
def server(tokenizer: str) -> Iterator[Served]:
    with mock_served(tokenizer, "--trust-request-chat-template") as server:
        server.llm.front.chat_renderer._templates = ChatTemplates(SECONDS)
        yield server


@pytest.mark.parametrize("name", HOSTILE)
def test_r15_a_requests_template_is_refused_within_the_limits(server: Served, name: str) -> None:
    template, words = HOSTILE[name]
    for path, body in ((PATH, BODY), ("/tokenize", {"messages": BODY["messages"]})):
        began = time.monotonic()
        answer = server.post(path, body | {"chat_template": template})
        assert time.monotonic() - began < SECONDS + 5
        assert answer.status == 400, answer.body[:200]
        error = answer.json["error"]
        assert error["param"] in ("chat_template", "messages")
        assert words in error["message"]
        assert "0x" not in error["message"]
    good = server.post(PATH, BODY | {"chat_template": "{{ messages[0].content }}", "return_prompt_text": True})
    assert good.json["prompt_text"] == "a"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "/"),
        ({"reasoning_effort": "low"}, "True/low"),
        ({"reasoning_effort": "none"}, "False/none"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "True/none"),
    ],
)
def test_an_effort_turns_thinking_on_or_off_unless_the_request_says_otherwise(
    server: Served, fields: dict[str, Any], text: str
) -> None:
    template = {"chat_template": "{{ enable_thinking }}/{{ reasoning_effort }}"}
    answer = server.post(PATH, BODY | template | {"return_prompt_text": True} | fields).json
    assert answer["prompt_text"] == text
    responses = {name: value for name, value in fields.items() if name != "reasoning_effort"}
    if "reasoning_effort" in fields:
        responses["reasoning"] = {"effort": fields["reasoning_effort"]}
    body = {"input": "a", "max_output_tokens": 2, "store": False} | template | responses
    assert server.post("/v1/responses", body).json["usage"]["input_tokens"] == answer["usage"]["prompt_tokens"]


def test_r15_variables_bring_no_template(server: Served, mock_server: Served) -> None:
    """Nor without the flag that lets requests bring one."""
    for path, body in ((PATH, BODY), ("/tokenize", {"messages": BODY["messages"]})):
        for name in ("chat_template", "chat_template_kwargs"):
            value = "{{ 1 }}" if name == "chat_template" else {"chat_template": "{{ 1 }}"}
            answer = mock_server.post(path, body | {name: value})
            assert (answer.status, answer.json["error"]["param"]) == (400, name)
            assert "--trust-request-chat-template" in answer.json["error"]["message"]
        smuggled = server.post(path, body | {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}})
        assert (smuggled.status, smuggled.json["error"]["param"]) == (400, "chat_template_kwargs")


def test_r15_a_models_template_may_loop_while_others_are_answered(tokenizer: str) -> None:
    template = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}" + TEMPLATE
    answers: list[Answer] = []
    body = BODY | {"messages": [{"role": "user", "content": "loop"}]}
    with mock_llm(tiny_args(tokenizer, chat_template=template), tokens_per_second=1000) as llm, served(llm) as server:
        llm.front.chat_renderer._templates = ChatTemplates(2.0)
        threads = [threading.Thread(target=lambda: answers.append(server.post(PATH, body))) for _ in range(2)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        num_others = 0
        while any(each.is_alive() for each in threads):
            assert server.get("/health").status == 200
            assert server.post("/v1/completions", {"prompt": [5], "max_tokens": 1}).status == 200
            num_others += 1
        assert [each.status for each in answers] == [400, 400]
        assert num_others >= 5, "a template has held up the others"
        assert time.monotonic() - began < 30
        assert server.post(PATH, BODY).status == 200
