"""Anthropic's conversations become OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import INT32_MAX, check_int, shown
from jaxllm.server.log_once import LogOnce
from jaxllm.server.protocol.chat import ChatCompletionRequest
from jaxllm.server.protocol.messages import MessagesRequest

_LEFT_OUT = LogOnce("tools of these types are left out, since no server here runs them: %s")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(request: MessagesRequest, *, has_thinking_tokens: bool) -> ChatCompletionRequest:
    """Return the chat completion that a request asks for. Raises VLLMValidationError, naming the field."""
    thinking = request.thinking or {}
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in (None, "enabled", "disabled", "adaptive"):
        message = f"thinking.type must be 'enabled', 'disabled' or 'adaptive', got {shown(kind)}."
        raise VLLMValidationError(message, parameter="thinking", value=kind)
    if budget is not None:
        check_int("thinking.budget_tokens", budget, 1, INT32_MAX, parameter="thinking")
    tools = _tools(request.tools)
    choice = request.tool_choice or {}
    return ChatCompletionRequest(
        model=request.model,
        messages=[*_system(request.system), *_messages(request.messages)],
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stream=request.stream,
        tools=tools or None,
        tool_choice=_tool_choice(choice) if tools else None,
        parallel_tool_calls=False if choice.get("disable_parallel_tool_use") else None,
        chat_template_kwargs={"enable_thinking": kind == "enabled"} if kind in ("enabled", "disabled") else None,
        thinking_token_budget=budget if kind == "enabled" and has_thinking_tokens else None,
    )


def _system(system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the system's message, if there is one."""
    if system is None:
        return []
    text = system if isinstance(system, str) else "\n\n".join(_texts(system, "system"))
    return [{"role": "system", "content": text}] if text else []


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the functions; tools that a server would have to run itself are left out, and named in the log once."""
    found: list[dict[str, Any]] = []
    for tool in tools or ():
        kind = tool.get("type")
        if kind not in (None, "custom"):
            _LEFT_OUT.note([str(kind)])
            continue
        function = {"name": tool.get("name"), "description": tool.get("description")}
        function |= {"parameters": tool.get("input_schema"), "strict": tool.get("strict") is True}
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(choice: Mapping[str, Any]) -> str | dict[str, Any] | None:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind is not None and kind not in _CHOICES:
        message = f"tool_choice.type must be 'auto', 'any', 'tool' or 'none', got {shown(kind)}."
        raise VLLMValidationError(message, parameter="tool_choice", value=kind)
    return None if kind is None else _CHOICES[kind]


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        role, content, label = message.get("role"), message.get("content"), f"messages[{i}]"
        if role not in ("user", "assistant", "system"):
            text = f"{label}: role must be 'user' or 'assistant', got {shown(role)}."
            raise VLLMValidationError(text, parameter="messages", value=role)
        blocks: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
            text = f"{label}: content must be a text or a list of blocks, got {shown(content)}."
            raise VLLMValidationError(text, parameter="messages", value=shown(content))
        if role == "assistant":
            found.append(_assistant(blocks, label))
        else:  # some clients put the system's words between those of others, where templates have no place for them
            found += _user(blocks, label)
    return found


def _assistant(blocks: list[dict[str, Any]], label: str) -> dict[str, Any]:
    calls, thoughts, texts = [], [], []
    for j, block in enumerate(blocks):
        match block.get("type"):
            case "tool_use":
                arguments = block.get("input") or {}
                function = {"name": block.get("name"), "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "thinking":
                thoughts.append(_text(block, "thinking", f"{label}.content[{j}]"))
            case "redacted_thinking":
                pass
            case _:
                texts += _texts([block], f"{label}.content", j)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _user(blocks: list[dict[str, Any]], label: str) -> list[dict[str, Any]]:
    """Return the results of tools, then what else was said."""
    results, texts = [], []
    for j, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            content = block.get("content")
            given = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
            text = "\n".join(_texts(given, f"{label}.content[{j}].content"))
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            texts += _texts([block], f"{label}.content", j)
    said = [{"role": "user", "content": "\n\n".join(texts)}] if texts or not results else []
    return [*results, *said]


def _texts(blocks: Sequence[Any], label: str, first: int = 0) -> list[str]:
    """Return the texts of text blocks; any other block is refused by its type."""
    found = []
    for j, block in enumerate(blocks, first):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind != "text":
            message = f"{label}[{j}]: blocks of type {shown(kind)} are not supported: this engine reads text only."
            raise VLLMValidationError(message, parameter=label.partition("[")[0], value=kind)
        found.append(_text(block, "text", f"{label}[{j}]"))
    return found


def _text(block: Mapping[str, Any], key: str, label: str) -> str:
    text = block.get(key)
    if not isinstance(text, str):
        message = f"{label}: needs {key!r} as a text, got {shown(text)}."
        raise VLLMValidationError(message, parameter=label.partition("[")[0], value=shown(text))
    return text
