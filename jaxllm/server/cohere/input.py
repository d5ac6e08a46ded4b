"""Convert Cohere's conversations to OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown
from jaxllm.server.cohere.protocol import CohereChatRequest, CohereDocument, CohereResponseFormat
from jaxllm.server.openai.chat_protocol import ChatCompletionRequest

_CHOICES = {None: None, "REQUIRED": "required", "NONE": "none"}
_ROLES = ("system", "developer", "user", "assistant", "tool")


def as_chat(request: CohereChatRequest, knows: Callable[[str], bool]) -> ChatCompletionRequest:
    """Return the chat request of a request; `knows` returns whether the chat template has a variable.

    Raises VLLMValidationError, naming the field.
    """
    thinking = request.thinking
    return ChatCompletionRequest(
        model=request.model,
        messages=[_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)],
        stream=request.stream,
        tools=_tools(request.tools, is_strict=request.strict_tools),
        tool_choice=_CHOICES[request.tool_choice],
        documents=_documents(request.documents, is_known=knows("documents")),
        response_format=_response_format(request.response_format),
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        temperature=request.temperature,
        seed=request.seed,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        top_k=request.k,
        top_p=request.p,
        logprobs=request.logprobs,
        thinking_token_budget=thinking.token_budget if thinking and thinking.type == "enabled" else None,
        priority=request.priority,
        chat_template_kwargs=_template_kwargs(request, has_safety=knows("safety_mode")),
    )


def _template_kwargs(request: CohereChatRequest, *, has_safety: bool) -> dict[str, Any] | None:
    """Return the variables of the chat template, among them thinking by the names that templates use for it."""
    variables, mode = dict[str, Any](), request.safety_mode
    if request.thinking is not None:
        variables |= dict.fromkeys(("enable_thinking", "reasoning"), request.thinking.type == "enabled")
    if mode is not None and has_safety:
        variables["safety_mode"] = "NONE" if mode == "OFF" else mode  # OFF is NONE in Cohere's templates
    elif mode not in (None, "OFF"):
        message = f"safety_mode={mode!r} has no effect, since the model's chat template has no such variable: "
        message += "leave it out, and write a system message."
        raise VLLMValidationError(message, parameter="safety_mode", value=mode)
    return {**variables, **(request.chat_template_kwargs or {})} or None


def _tools(tools: list[dict[str, Any]] | None, *, is_strict: bool) -> list[dict[str, Any]] | None:
    """Return the tools, which `read_tools` checks; with `is_strict` all are strict."""
    if not tools:
        return None
    functions = [tool.get("function") for tool in tools]
    return [
        {**tool, "function": {**function, "strict": True}} if is_strict and isinstance(function, Mapping) else tool
        for tool, function in zip(tools, functions, strict=True)
    ]


def _documents(documents: Sequence[str | CohereDocument] | None, *, is_known: bool) -> list[dict[str, Any]] | None:
    """Return the documents as chat templates read them."""
    if not documents:
        return None
    if not is_known:
        message = "documents have no effect, since the model's chat template shows none: write them into messages."
        raise VLLMValidationError(message, parameter="documents")
    return [(CohereDocument(each) if isinstance(each, str) else each).fields for each in documents]


def _response_format(form: CohereResponseFormat | None) -> dict[str, Any] | None:
    """Return the form of the answer as OpenAI's."""
    if form is None or form.json_schema is None:
        return None if form is None else {"type": form.type}
    if form.type == "text":
        message = "response_format.json_schema needs the type 'json_object'."
        raise VLLMValidationError(message, parameter="response_format", value=form.type)
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.json_schema}}


def _message(message: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return a message in OpenAI's form. The system's and the user's have it; `render` checks their content."""
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        text = f"{label}: role must be one of {', '.join(_ROLES)}, got {shown(role)}."
        raise VLLMValidationError(text, parameter="messages", value=shown(role))
    if role == "assistant":
        return _assistant(message, label)
    if role == "tool" and isinstance(content, list):
        return {
            **message,
            "content": "\n".join(_result(each, f"{label}.content[{j}]") for j, each in enumerate(content)),
        }
    return dict(message)


def _assistant(message: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return the assistant's message: blocks of thinking, and the plan of calls, are its reasoning."""
    if message.get("citations"):
        text = f"{label}: citations are not written into prompts: leave them out."
        raise VLLMValidationError(text, parameter="messages")
    blocks, thoughts = message.get("content"), list[Any]()
    if isinstance(blocks, list):
        thoughts = [each.get("thinking") for each in blocks if _is_thinking(each)]
        blocks = [each for each in blocks if not _is_thinking(each)] or None
    if message.get("tool_plan") is not None:
        thoughts.append(message["tool_plan"])
    if not all(isinstance(thought, str) for thought in thoughts):
        raise VLLMValidationError(f"{label}: thinking and tool_plan must be texts.", parameter="messages")
    left = {name: value for name, value in message.items() if name not in ("citations", "tool_plan")}
    return {**left, "content": blocks} | ({"reasoning": "".join(thoughts)} if thoughts else {})


def _is_thinking(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") == "thinking"


def _result(block: Any, label: str) -> str:
    """Return the text of a part of a tool's result; a document's is JSON."""
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "document", "document": document}:
            try:
                return json.dumps(msgspec.convert(document, CohereDocument).fields, ensure_ascii=False)
            except msgspec.ValidationError as error:
                raise VLLMValidationError(f"{label}.document: {error}.", parameter="messages") from None
        case _:
            message = f"{label}: must be of type 'text' or 'document', got {shown(block)}."
            raise VLLMValidationError(message, parameter="messages", value=shown(block))
