"""Required calls in the form of each parser: a model with random weights makes them, since it can write nothing else.

Marks of calls are special tokens of its tokenizer, as they are of the models that a parser is for.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from transformers import PreTrainedTokenizerFast

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.parsers.registry import ToolParserManager
from jaxllm.server.openai.output_parsers import OutputParsers
from tests.async_engine.support import tiny_args
from tests.e2e.tiny_tokenizer import SPECIALS, make_backend
from tests.server.openai.test_chat_tools import message_of, without_ids
from tests.server.support import TEMPLATE, Served, served

pytestmark = pytest.mark.server

PARSERS = {ToolParserManager.get_tool_parser(name): name for name in reversed(ToolParserManager.names())}
"""A name of each parser."""
SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Ulm", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "add_book": {
        "type": "object",
        "properties": {"title": {"enum": ["a", "b c"]}, "lent": {"type": "boolean"}},
        "required": ["title"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
BOOK = {"type": "function", "function": {"name": "add_book"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    marks = {mark for parser in PARSERS for mark in parser.marks if not mark.isalpha() and "=" not in mark}
    alone = sorted(mark for mark in marks if not any(other in mark for other in marks - {mark}))
    backend = make_backend((*SPECIALS, *alone))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.save_pretrained(folder := str(tmp_path_factory.mktemp("tokenizer")))
    # Without white space in JSON no call is long.
    settings: dict[str, Any] = {"structured_outputs_config": {"disable_any_whitespace": True}}
    settings |= {"hf_overrides": {"max_position_embeddings": 1024}, "chat_template": TEMPLATE}
    llm = AsyncLLM.from_engine_args(tiny_args(folder, **settings))
    try:
        with served(llm) as server:
            yield server
    finally:
        llm.shutdown()


@pytest.mark.parametrize("name", PARSERS.values())
def test_required_calls_match_their_schemas(server: Served, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    chat = server.app.state.openai_serving_chat
    monkeypatch.setattr(chat, "parsers", OutputParsers(ServerArgs(tool_call_parser=name), "", "tools"))
    for choice, reason in (("required", "tool_calls"), (BOOK, "stop")):
        fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": secrets.randbits(31)}
        fields |= {"messages": [{"role": "user", "content": "x"}]}
        whole = server.post("/v1/chat/completions", fields)
        assert whole.status == 200, whole.body
        answer = whole.json["choices"][0]
        message, seed = answer["message"], f"seed {fields['seed']}"
        assert (message["content"] or "", answer["finish_reason"]) == ("", reason), seed
        [call] = message["tool_calls"]
        assert choice == "required" or call["function"]["name"] == "add_book", seed
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])

        events = server.post("/v1/chat/completions", fields | {"stream": True}).events
        streamed = message_of(events)
        assert (streamed["content"], without_ids(streamed["tool_calls"])) == ("", without_ids([call])), seed
        assert [end for event in events if (end := event["choices"][0]["finish_reason"])] == [reason], seed
