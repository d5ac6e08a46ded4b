"""A body becomes a request by one rule for all routes: values are coerced as vLLM's are, and null is as left out."""

from __future__ import annotations

import gzip
import json
from typing import Any

import msgspec
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.parsers.function_tool import read_tools
from jaxllm.server.anthropic.protocol import MessagesRequest
from jaxllm.server.decisions.systemone_protocol import SystemOneRequest
from jaxllm.server.http.decoding import decode
from jaxllm.server.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest
from jaxllm.server.openai.chat_protocol import CHAT_REFUSED, ChatCompletionRequest
from jaxllm.server.openai.completion_protocol import CompletionRequest
from jaxllm.server.responses.request import ResponsesRequest
from tests.server.openai.test_bounds import ROUTES
from tests.server.support import Served

KINDS: list[Any] = [kind for kind, _, _ in ROUTES.values()]
KINDS += [CompletionRequest, OllamaChatRequest, OllamaGenerateRequest]
REQUIRED: dict[str, Any] = {"messages": [], "input": "a", "prompt": "a", "tokens": [], "texts": ["a"], "query": "a"}
REQUIRED |= {"documents": ["a"], "state": "a", "model": "m", "items": ["a"], "label_token_ids": [5]}
REQUIRED |= {"token_ids": [5], "sampling_params": {}}
COERCED = [
    ("max_tokens", "3.0", 3),
    ("max_tokens", '"3"', 3),
    ("max_tokens", '"3.0"', 3),
    ("max_tokens", "1e3", 1000),
    ("temperature", '"0.5"', 0.5),
    ("temperature", "1", 1.0),
    ("logprobs", '"true"', True),
    ("logprobs", "0", False),
    ("echo", "1", True),
    ("stop_token_ids", '[5.0, "6"]', [5, 6]),
    ("logit_bias", '{"5": "1.5"}', {"5": 1.5}),
    ("stop", '["5"]', ["5"]),
    ("user", '"5"', "5"),
    ("cache_salt", '"null"', "null"),
]
NOT_COERCED = [
    ("max_tokens", "3.5"),
    ("max_tokens", '"many"'),
    ("max_tokens", "true"),
    ("temperature", "true"),
    ("echo", "2"),
    ("echo", '"maybe"'),
    ("user", "5"),
    ("stop", "[5]"),
]


def chat(fields: str) -> ChatCompletionRequest:
    return decode(f'{{"messages": [], {fields}}}'.encode(), ChatCompletionRequest, CHAT_REFUSED)


@pytest.mark.parametrize("kind", KINDS)
def test_null_is_as_if_a_field_was_left_out(kind: Any) -> None:
    fields = msgspec.structs.fields(kind)
    known = REQUIRED | {"questions": {} if kind is SystemOneRequest else []}
    needed = {field.encode_name: known[field.encode_name] for field in fields if field.required}
    nulls = {field.encode_name: None for field in fields if not field.required}
    assert nulls
    assert decode(json.dumps(needed | nulls).encode(), kind, {}) == decode(json.dumps(needed).encode(), kind, {})
    for name in needed:
        with pytest.raises(VLLMValidationError, match=f"^{name}: .*null"):
            decode(json.dumps(needed | {name: None}).encode(), kind, {})


@pytest.mark.parametrize(("name", "text", "read"), COERCED)
def test_values_are_coerced_as_pydantic_does_it(name: str, text: str, read: Any) -> None:
    value = getattr(chat(f'"{name}": {text}'), name)
    assert value == read
    assert type(value) is type(read)


@pytest.mark.parametrize(("name", "text"), NOT_COERCED)
def test_what_means_nothing_else_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(VLLMValidationError, match=f"^{name}") as caught:
        chat(f'"{name}": {text}')
    assert caught.value.parameter == name


def test_fields_within_fields_are_coerced_too() -> None:
    options = chat('"stream_options": {"include_usage": "true", "continuous_usage_stats": null}').stream_options
    assert options is not None
    assert (options.include_usage, options.continuous_usage_stats) == (True, None)
    tool = {"type": "function", "function": {"name": "f", "strict": None, "parameters": None}}
    assert not read_tools([tool])[0].strict
    text = decode(b'{"input": "a", "text": {"format": null, "verbosity": null}}', ResponsesRequest, {}).text
    assert text is not None
    assert text.format is None


def test_null_max_tokens_is_the_default_of_each_route() -> None:
    assert decode(b'{"prompt": "a", "max_tokens": null}', CompletionRequest, {}).max_tokens == 16
    assert chat('"max_tokens": null').max_tokens is None
    assert decode(b'{"messages": [], "max_tokens": null}', MessagesRequest, {}).max_tokens is None


@pytest.mark.parametrize("text", [r"a\ud83d", r"\uDE00a", r"\ud83dA", r"\ud83d\ud83d\ude00", r"\\\ud800"])
def test_half_of_a_surrogate_pair_is_named(text: str) -> None:
    with pytest.raises(VLLMValidationError, match=r"half of a surrogate pair.*emoji") as caught:
        chat(f'"user": "{text}"')
    body = f'{{"messages": [], "user": "{text}"}}'
    offset = int(str(caught.value).partition("at byte ")[2].partition(" ")[0])
    assert body[offset:].lower().startswith((r"\ud8", r"\ude"))
    assert body[offset : offset + 6] in str(caught.value)


def test_escapes_that_only_look_like_halves_are_text() -> None:
    assert chat(r'"user": "\ud83d\uDE00 \\ud83d"').user == "\N{GRINNING FACE} \\ud83d"
    with pytest.raises(VLLMValidationError, match=r"^The body is not JSON: .*"):
        chat(r'"user": "\\ud83d')


def test_a_body_that_is_encoded_is_refused_by_name(mock_server: Served) -> None:
    body = gzip.compress(b'{"prompt": "a"}')
    for encoding in ("gzip", "deflate, gzip", "br"):
        answer = mock_server.post("/v1/completions", body, {"Content-Encoding": encoding})
        assert answer.status == 415
        assert f"Content-Encoding: {encoding} is not decoded" in answer.json["error"]["message"]
    assert mock_server.post("/v1/completions", {"prompt": "a"}, {"Content-Encoding": "identity"}).status == 200
