"""Tokens by themselves are those that prompts have."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from tests.server.support import Answer, Served, served

MESSAGES = [{"role": "user", "content": "ab"}]


def tokenize(server: Served, **fields: Any) -> Answer:
    return server.post("/tokenize", {"model": "tiny", **fields})


def prompt_ids(server: Served, path: str, **fields: Any) -> list[int]:
    """Return the token ids of a prompt as a completion has seen them."""
    choice = server.post(path, {"model": "tiny", "max_tokens": 1, "return_token_ids": True, **fields}).json
    return choice.get("prompt_token_ids") or choice["choices"][0]["prompt_token_ids"]


@pytest.mark.parametrize("fields", [{}, {"add_special_tokens": False}, {"add_special_tokens": True}])
@pytest.mark.parametrize("text", ["a", "ab c é 😀", "x" * 300])
def test_ids_are_those_of_a_prompt(mock_server: Served, text: str, fields: dict[str, Any]) -> None:
    answer = tokenize(mock_server, prompt=text, **fields).json
    assert answer["tokens"] == prompt_ids(mock_server, "/v1/completions", prompt=text, **fields)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == mock_server.llm.model_config.max_model_len
    back = mock_server.post("/detokenize", {"tokens": answer["tokens"]}).json
    assert back["prompt"] == mock_server.llm.front.require_tokenizer().backend.decode(answer["tokens"], False)


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "be"}]}, *MESSAGES]},
    ],
)
def test_ids_of_a_conversation_are_those_of_its_prompt(mock_server: Served, fields: dict[str, Any]) -> None:
    fields = {"messages": MESSAGES} | fields
    expected = prompt_ids(mock_server, "/v1/chat/completions", **fields)
    assert tokenize(mock_server, **fields).json["tokens"] == expected
    if "tools" in fields:
        assert len(expected) > len(prompt_ids(mock_server, "/v1/chat/completions", messages=MESSAGES))


def test_each_token_has_its_text(mock_server: Served) -> None:
    answer = tokenize(mock_server, prompt="ab c", return_token_strs=True).json
    assert len(answer["token_strs"]) == answer["count"]
    assert "".join(answer["token_strs"]).endswith("ab c")
    assert tokenize(mock_server, prompt="ab c").json["token_strs"] is None


def test_nothing_has_no_tokens(mock_server: Served) -> None:
    assert tokenize(mock_server, prompt="", add_special_tokens=False).json["tokens"] == []
    assert mock_server.post("/detokenize", {"tokens": []}).json == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"content": "a"}]}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
        ("/tokenize", {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        ("/tokenize", {"messages": MESSAGES, "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"prompt": "x" * 1_000_000}, "prompt"),
        ("/detokenize", {}, None),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**31]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
def test_r13_bad_requests_name_the_field(
    mock_server: Served, path: str, body: dict[str, Any], parameter: str | None
) -> None:
    answer = mock_server.post(path, body)
    assert (answer.status, answer.json["error"]["param"]) == (400, parameter), answer.body


def test_another_model_is_not_here(mock_server: Served) -> None:
    assert tokenize(mock_server, model="other", prompt="a").status == 404
    assert mock_server.post("/detokenize", {"model": "other", "tokens": [1]}).status == 404


def test_the_tokenizer_is_shown_where_the_server_was_told_to(mock: AsyncLLM, mock_server: Served) -> None:
    assert mock_server.get("/tokenizer_info").status == 404
    with served(mock, "--enable-tokenizer-info-endpoint") as server:
        info = server.get("/tokenizer_info").json
    assert info["vocab_size"] == 256
    assert "message.role" in info["chat_template"]
