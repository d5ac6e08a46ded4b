"""Describe tools, calls and results in plain messages, for chat templates without tools."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.text.message_content import text_of, with_media

PARSER = "hermes"
"""The tool parser for the calls that these messages ask for."""
_PROMPT = """\
You can call functions. These are their signatures, as JSON, between <tools> and </tools>:
<tools>
{tools}
</tools>
To call one, answer with a JSON object of its name and its arguments between <tool_call> and </tool_call>, as
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>"""


def knows_tools(template: str) -> bool:
    """Return whether a chat template shows tools."""
    return "tools" in template


def has_calls(messages: Any) -> bool:
    """Return whether the messages, which may be unchecked, contain tool calls or results."""
    listed = messages if isinstance(messages, Sequence) else ()
    return any(isinstance(each, Mapping) and (each.get("tool_calls") or each.get("role") == "tool") for each in listed)


def tell_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the tools described in the system message (added if missing), calls as their text, and
    results as user messages. Contents are as in `Content`; those that change become a text, after their media if any.
    """
    told: list[dict[str, Any]] = []
    for are_results, group in itertools.groupby(messages, lambda message: message.get("role") == "tool"):
        if are_results:
            contents = [each.get("content") for each in group]
            results = "\n".join(f"<tool_response>\n{text_of(each)}\n</tool_response>" for each in contents)
            told.append({"role": "user", "content": with_media(results, *contents)})
        else:
            told += map(_told, group)
    if tools:
        prompt = _PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if told and told[0].get("role") in ("system", "developer"):
            content = told[0].get("content")
            told[0] = {**told[0], "content": with_media(f"{text_of(content)}\n\n{prompt}", content)}
        else:
            told.insert(0, {"role": "system", "content": prompt})
    return told


def _told(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message other than a tool's result, with its calls as text."""
    plain = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id", "name")}
    if message.get("tool_calls"):
        calls = [_call(call["function"]) for call in message["tool_calls"]]
        content = message.get("content")
        plain["content"] = with_media("\n".join([*filter(None, (text_of(content),)), *calls]), content)
    return plain


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function.get("name"), "arguments": function.get("arguments") or {}}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
