"""Templates that know no tools get them told in messages."""

from __future__ import annotations

from typing import Any

from jaxllm.text.tool_prompt import has_calls, tell_tools

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {"zone": "CET"}}}


def test_tools_are_told_in_the_systems_message() -> None:
    user = {"role": "user", "content": "hi"}
    [system, *rest] = tell_tools([user], [TOOL])
    assert (system["role"], rest) == ("system", [user])
    assert '{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}' in system["content"]
    [system, *rest] = tell_tools([{"role": "system", "content": "Be brief."}, user], [TOOL])
    assert system["content"].startswith("Be brief.\n\nYou can call functions.")
    assert rest == [user]


def test_calls_and_results_are_text() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "when?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "tool", "tool_call_id": "c2", "content": "one"},
        {"role": "assistant", "content": "Noon."},
    ]
    call = '<tool_call>\n{"name": "now", "arguments": {"zone": "CET"}}\n</tool_call>'
    results = "<tool_response>\nnoon\n</tool_response>\n<tool_response>\none\n</tool_response>"
    assert has_calls(messages)
    assert tell_tools(messages, []) == [
        {"role": "user", "content": "when?"},
        {"role": "assistant", "content": f"{call}\n{call}"},
        {"role": "user", "content": results},
        {"role": "assistant", "content": "Noon."},
    ]
    assert not has_calls(messages[:1])
    assert not has_calls("no conversation")
