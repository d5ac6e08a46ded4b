"""Chat templates that know no tools: the tools, calls and results of a conversation are told in plain messages."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

PARSER = "hermes"
"""The tool parser that reads what models are told here to write."""
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
    """Return whether a chat template shows tools by itself."""
    return "tools" in template


def has_calls(messages: Any) -> bool:
    """Return whether there are calls or results of tools among the messages, which need not be checked yet."""
    listed = messages if isinstance(messages, Sequence) else ()
    return any(isinstance(each, Mapping) and (each.get("tool_calls") or each.get("role") == "tool") for each in listed)


def tell_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the tools told in the system's, which is made if there is none, with calls as the text
    that made them, and with results as the user's. Contents that have to change are strings then.
    """
    told: list[dict[str, Any]] = []
    for are_results, group in itertools.groupby(messages, lambda message: message.get("role") == "tool"):
        if are_results:
            results = (f"<tool_response>\n{each.get('content') or ''}\n</tool_response>" for each in group)
            told.append({"role": "user", "content": "\n".join(results)})
        else:
            told += map(_told, group)
    if tools:
        prompt = _PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if told and told[0].get("role") in ("system", "developer"):
            told[0] = {**told[0], "content": f"{_text(told[0])}\n\n{prompt}"}
        else:
            told.insert(0, {"role": "system", "content": prompt})
    return told


def _told(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message that is no tool's result, with its calls as text."""
    plain = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id", "name")}
    if message.get("tool_calls"):
        calls = [_call(call["function"]) for call in message["tool_calls"]]
        plain["content"] = "\n".join([text for text in (_text(message),) if text] + calls)
    return plain


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function.get("name"), "arguments": function.get("arguments") or {}}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
