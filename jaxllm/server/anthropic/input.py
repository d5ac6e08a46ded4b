"""Convert Anthropic's conversations to OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.content_parts import read_media_part
from jaxllm.media.items import MediaPart
from jaxllm.params.checks import INT32_MAX, check_int, shown
from jaxllm.server.anthropic.protocol import MessagesRequest
from jaxllm.server.openai.chat_protocol import ChatCompletionRequest
from jaxllm.server.openai.tools import LEFT_OUT
from jaxllm.text.chat import without_billing

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Anthropic's efforts as chat templates know them."""

type _Block = tuple[str, Mapping[str, Any]]
"""A content block after its label, which tells its position."""


def as_chat(request: MessagesRequest, *, has_thinking_tokens: bool) -> ChatCompletionRequest:
    """Return the chat request of a message request. Raises VLLMValidationError, naming the field."""
    kind, budget = _thinking(request.thinking or {})
    form, effort = _output(request.output_config or {})
    tools = _tools(request.tools)
    choice = request.tool_choice or {}
    messages = _messages(request.system, request.messages)
    is_begun = bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    return ChatCompletionRequest(
        model=request.model,
        messages=messages,
        add_generation_prompt=not is_begun,
        continue_final_message=is_begun,
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stream=request.stream,
        tools=tools or None,
        tool_choice=_tool_choice(choice) if tools else None,
        parallel_tool_calls=False if choice.get("disable_parallel_tool_use") else None,
        chat_template_kwargs=_template_kwargs(request, kind),
        cache_salt=request.cache_salt,
        vllm_xargs=request.vllm_xargs,
        thinking_token_budget=budget if kind == "enabled" and has_thinking_tokens else None,
        reasoning_effort=effort,
        response_format=form,
    )


def _thinking(thinking: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """Return the type of thinking and its budget."""
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in (None, "enabled", "disabled", "adaptive"):
        message = f"thinking.type must be 'enabled', 'disabled' or 'adaptive', got {shown(kind)}."
        raise VLLMValidationError(message, parameter="thinking", value=kind)
    if budget is not None:
        check_int("thinking.budget_tokens", budget, 1, INT32_MAX, parameter="thinking")
    return kind, budget


def _template_kwargs(request: MessagesRequest, kind: str | None) -> dict[str, Any] | None:
    """Return the variables of the chat template, among them whether the model thinks, if the request sets it."""
    if kind not in ("enabled", "disabled"):
        return request.chat_template_kwargs
    return {"enable_thinking": kind == "enabled", **(request.chat_template_kwargs or {})}


def _output(config: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """Return the answer's format and the effort."""
    effort, form = config.get("effort"), config.get("format")
    if effort is not None and (not isinstance(effort, str) or effort not in _EFFORTS):
        message = f"output_config.effort must be one of {', '.join(_EFFORTS)}, got {shown(effort)}."
        raise VLLMValidationError(message, parameter="output_config", value=shown(effort))
    if form is not None:
        if not isinstance(form, Mapping) or form.get("type") != "json_schema":
            message = f"output_config.format must be of type 'json_schema', got {shown(form)}."
            raise VLLMValidationError(message, parameter="output_config", value=shown(form))
        form = {"type": "json_schema", "json_schema": {"name": "output", "schema": form.get("schema")}}
    return form, None if effort is None else _EFFORTS[effort]


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the functions; tools that a server would have to run are left out and logged once."""
    messages: list[dict[str, Any]] = []
    for tool in tools or ():
        kind = tool.get("type")
        if kind not in (None, "custom"):
            LEFT_OUT.note([str(kind)])
            continue
        function = {"name": tool.get("name"), "description": tool.get("description")}
        function |= {"parameters": tool.get("input_schema"), "strict": tool.get("strict") is True}
        messages.append({"type": "function", "function": function})
    return messages


def _tool_choice(choice: Mapping[str, Any]) -> str | dict[str, Any] | None:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind is not None and (not isinstance(kind, str) or kind not in _CHOICES):
        message = f"tool_choice.type must be 'auto', 'any', 'tool' or 'none', got {shown(kind)}."
        raise VLLMValidationError(message, parameter="tool_choice", value=kind)
    return None if kind is None else _CHOICES[kind]


def _messages(system: str | list[dict[str, Any]] | None, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation that begins with one system message and alternates roles, as templates require."""
    first = (
        [("system", {"type": "text", "text": system})] if isinstance(system, str) else _blocks(system or [], "system")
    )
    turns: list[tuple[str, list[_Block]]] = []
    for i, message in enumerate(messages):
        role, content, label = message.get("role"), message.get("content"), f"messages[{i}]"
        if role not in ("user", "assistant", "system"):
            text = f"{label}: role must be 'user' or 'assistant', got {shown(role)}."
            raise VLLMValidationError(text, parameter="messages", value=role)
        blocks = _blocks(
            [{"type": "text", "text": content}] if isinstance(content, str) else content, f"{label}.content"
        )
        if role == "system":
            blocks = _without_billing(blocks)
            if not turns:
                first += blocks
            if not turns or not blocks:
                continue
        # Some clients put system messages between others, where templates do not allow them.
        speaker = "assistant" if role == "assistant" else "user"
        if not turns or turns[-1][0] != speaker:
            turns.append((speaker, []))
        turns[-1][1].extend(blocks)
    text = "\n\n".join(filter(None, _texts(_without_billing(first))))
    conversation = [{"role": "system", "content": text}] if text else []
    for speaker, blocks in turns:
        conversation += [_assistant(blocks)] if speaker == "assistant" else _user(blocks)
    return conversation


def _blocks(content: Any, label: str) -> list[_Block]:
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        text = f"{label}: must be a text or a list of blocks, got {shown(content)}."
        raise VLLMValidationError(text, parameter=label.partition("[")[0], value=shown(content))
    return [(f"{label}[{j}]", block) for j, block in enumerate(content)]


def _without_billing(blocks: Sequence[_Block]) -> list[_Block]:
    """Return the system's blocks without Claude Code's billing header."""
    kept: list[_Block] = []
    for label, block in blocks:
        text = block.get("text")
        if isinstance(text, str):
            kept += [(label, {**block, "text": rest}) for rest in without_billing([text])]
        else:
            kept.append((label, block))
    return kept


def _assistant(blocks: Sequence[_Block]) -> dict[str, Any]:
    calls, thoughts, texts = [], [], []
    for label, block in blocks:
        match block.get("type"):
            case "tool_use":
                arguments = block.get("input") or {}
                function = {"name": block.get("name"), "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "thinking":
                thoughts.append(_text(block, "thinking", label))
            case "redacted_thinking":
                pass
            case _:
                texts += _texts([(label, block)])
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _user(blocks: Sequence[_Block]) -> list[dict[str, Any]]:
    """Return the tools' results, then the user's other content after the results' images, as in vLLM: templates show
    no images in results.
    """
    results: list[dict[str, Any]] = []
    seen: list[str | MediaPart] = []
    said: list[str | MediaPart] = []
    for label, block in blocks:
        match block.get("type"):
            case "tool_result":
                text, images = _result(block, label)
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
                seen += images
            case "image":
                said.append(_image(block, label))
            case _:
                said += _texts([(label, block)])
    pieces = seen + said
    if results and not pieces:
        return results
    texts = [piece for piece in pieces if isinstance(piece, str)]
    return [*results, {"role": "user", "content": "\n\n".join(texts) if len(texts) == len(pieces) else pieces}]


def _result(block: Mapping[str, Any], label: str) -> tuple[str, list[MediaPart]]:
    """Return the text of a tool's result, marked as failed unless it tells so, and the result's images."""
    content = block.get("content")
    listed = [{"type": "text", "text": content or ""}] if content is None or isinstance(content, str) else content
    blocks = _blocks(listed, f"{label}.content")
    text = "\n".join(_texts([each for each in blocks if each[1].get("type") != "image"]))
    if block.get("is_error") is True and "error" not in text.lower():
        text = f"Error: {text}"
    return text, [_image(block, label) for label, block in blocks if block.get("type") == "image"]


def _image(block: Mapping[str, Any], label: str) -> MediaPart:
    """Return the record of an image block."""
    source, label = block.get("source"), f"{label}.source"
    match source.get("type") if isinstance(source, Mapping) else None:
        case "base64":
            assert isinstance(source, Mapping)
            url = f"data:{_text(source, 'media_type', label)};base64,{_text(source, 'data', label)}"
        case "url":
            assert isinstance(source, Mapping)
            url = _text(source, "url", label)
        case kind:
            message = f"{label}: must be of type 'base64' or 'url', got {shown(kind)}."
            raise VLLMValidationError(message, parameter=label.partition("[")[0], value=shown(kind))
    return read_media_part({"type": "image_url", "image_url": url}, label.removesuffix(".source"))


def _texts(blocks: Sequence[_Block]) -> list[str]:
    """Return the texts of blocks; other types are refused."""
    return [_block_text(block, label) for label, block in blocks]


def _block_text(block: Mapping[str, Any], label: str) -> str:
    match block.get("type"):
        case "text":
            return _text(block, "text", label)
        case "document":
            return _headed(block, ("title", "context"), _document(block.get("source"), f"{label}.source"), label)
        case "search_result":
            texts = _texts(_blocks(block.get("content"), f"{label}.content"))
            return _headed(block, ("title", "source"), "\n".join(texts), label)
        case "tool_reference":  # the prompt has the tool in any case
            return _text(block, "tool_name", label)
        case kind:
            raise _no_text(f"{label}: blocks of type {shown(kind)} are", label, kind)


def _document(source: Any, label: str) -> str:
    """Return the text of a document, which is plain or in blocks."""
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind == "text":
        return _text(source, "data", label)
    if kind == "content":
        content = source.get("content")
        return content if isinstance(content, str) else "\n".join(_texts(_blocks(content, f"{label}.content")))
    raise _no_text(f"{label}: documents of type {shown(kind)} are", label, kind)


def _headed(block: Mapping[str, Any], keys: Sequence[str], text: str, label: str) -> str:
    """Return a text below its block's title and context."""
    return "\n".join([*(_text(block, key, label) for key in keys if block.get(key)), text])


def _no_text(message: str, label: str, kind: Any) -> VLLMValidationError:
    parameter = label.partition("[")[0]
    return VLLMValidationError(
        f"{message} not supported: only text is read here.", parameter=parameter, value=shown(kind)
    )


def _text(block: Mapping[str, Any], key: str, label: str) -> str:
    text = block.get(key)
    if not isinstance(text, str):
        message = f"{label}: needs {key!r} as a text, got {shown(text)}."
        raise VLLMValidationError(message, parameter=label.partition("[")[0], value=shown(text))
    return text
