"""Convert a response's input items to the messages of a conversation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.content_parts import read_media_part
from jaxllm.media.items import MediaPart
from jaxllm.params.checks import shown
from jaxllm.server.http.errors import RequestFailedError
from jaxllm.text.chat import SYSTEM_ROLES

_MAX_ITEMS = 65_536
_ROLES = ("user", "assistant", *SYSTEM_ROLES)
_TEXTS = {
    **dict.fromkeys(("input_text", "output_text", "text", "summary_text", "reasoning_text"), "text"),
    "refusal": "refusal",
}
"""The key of the text in each type of content part."""
_MEDIA = ("input_image",)
"""The types of content parts that are media."""


def read_input(
    value: str | Sequence[dict[str, Any]], find: Callable[[str], dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """Return a request's input as items. `find` returns a referenced item by id, or None.

    Raises VLLMValidationError, naming the position, for a bad item or a repeated reference, and RequestFailedError,
    404, for an unknown id.
    """
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if len(value) > _MAX_ITEMS:
        raise _refusal("input", f"must have at most {_MAX_ITEMS} items, got {len(value)}", len(value))
    known: set[str] = set()
    return [_resolved(item, f"input[{i}]", find, known) for i, item in enumerate(value)]


def _resolved(
    item: dict[str, Any], label: str, find: Callable[[str], dict[str, Any] | None], known: set[str]
) -> dict[str, Any]:
    """Return an item, or the one that it refers to; `known` has the ids referred to so far."""
    kind = item.get("type")
    if kind != "item_reference" and not (kind is None and "id" in item and "role" not in item):
        return item
    item_id = item.get("id")
    kept_item = find(item_id) if isinstance(item_id, str) else None
    if kept_item is None or not isinstance(item_id, str):
        message = f"{label}: Item with id {shown(item_id)} not found: items are kept with responses that are stored."
        raise RequestFailedError(HTTPStatus.NOT_FOUND, message, param="input")
    if item_id in known:
        raise _refusal(label, f"refers to item {shown(item_id)} once more: leave all but one out", item_id)
    known.add(item_id)
    return kept_item


def messages_of(
    items: Iterable[Mapping[str, Any]], instructions: str | None = None, earlier: Iterable[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return the chat messages of the instructions, `earlier` items and new ones.

    Adjacent reasoning, text and calls of the model become one message. The instructions are joined with the system
    and developer messages right after them, since many chat templates accept only one.
    Raises VLLMValidationError naming the item.
    """
    conversation = _Conversation(instructions)
    for item in earlier:
        conversation.add(item, "previous_response_id")
    for i, item in enumerate(items):
        conversation.add(item, f"input[{i}]")
    if not any(message["role"] not in SYSTEM_ROLES for message in conversation.messages):
        raise VLLMValidationError("input must have at least one message.", parameter="input", value=[])
    return conversation.whole()


class _Conversation:
    """Collects the messages of a conversation from items. Contents and reasoning stay lists until the end, since
    joining each as it comes would take quadratic time.
    """

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[dict[str, Any]] = []
        self._answer: dict[str, Any] | None = None
        """The model's message, while it may go on."""
        if instructions:
            self.messages.append({"role": "system", "content": [instructions]})

    def whole(self) -> list[dict[str, Any]]:
        """Return the messages."""
        for message in self.messages:
            if "content" in message:
                message["content"] = _joined(message["content"], "\n\n" if message["role"] in SYSTEM_ROLES else "")
            if "reasoning" in message:
                message["reasoning"] = "\n".join(message["reasoning"])
        return self.messages

    def add(self, item: Mapping[str, Any], label: str) -> None:
        """Add an item. Raises VLLMValidationError naming its position."""
        match item.get("type", "message"):
            case "message" | None:
                self._add_message(item, label)
            case "reasoning":
                self._add_reasoning(item, label)
            case "function_call":
                function = {name: _text(item, name, label) for name in ("name", "arguments")}
                call = {"id": _text(item, "call_id", label), "type": "function", "function": function}
                self._answering().setdefault("tool_calls", []).append(call)
            case "function_call_output":
                self._answer = None
                content = _content(item.get("output"), f"{label}.output")
                call_id = _text(item, "call_id", label)
                self.messages.append({"role": "tool", "tool_call_id": call_id, "content": [content]})
            case kind:
                message = (
                    "must be of type 'message', 'reasoning', 'function_call', 'function_call_output' or "
                    f"'item_reference', got {shown(kind)}"
                )
                raise _refusal(label, message, kind)

    def _add_message(self, item: Mapping[str, Any], label: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise _refusal(label, f"must have a role, one of {', '.join(_ROLES)}, got {shown(role)}", role)
        content = _content(item.get("content"), f"{label}.content")
        if role == "assistant":
            answer = self._answering()
            if "content" in answer and "tool_calls" not in answer:
                self._answer = None
                answer = self._answering()
            answer.setdefault("content", []).append(content)
            return
        self._answer = None
        if role in SYSTEM_ROLES and self.messages and all(each["role"] in SYSTEM_ROLES for each in self.messages):
            self.messages[-1]["content"].append(content)
            return
        self.messages.append({"role": role, "content": [content]})

    def _add_reasoning(self, item: Mapping[str, Any], label: str) -> None:
        texts = _texts(item.get("content") or [], f"{label}.content") or _texts(
            item.get("summary") or [], f"{label}.summary"
        )
        if not texts:  # it is encrypted by another server
            return
        if self._answer is not None and self._answer.keys() & {"content", "tool_calls"}:
            self._answer = None
        self._answering().setdefault("reasoning", []).extend(texts)

    def _answering(self) -> dict[str, Any]:
        """Return the model's current message, or a new one."""
        if self._answer is None:
            self._answer = {"role": "assistant"}
            self.messages.append(self._answer)
        return self._answer


def _joined(contents: list[Any], between: str) -> Any:
    """Return contents joined: leading texts become one text, and parts after them stay parts."""
    texts = list(itertools.takewhile(lambda content: isinstance(content, str), contents))
    text = [between.join(texts)] if texts else []
    if len(texts) == len(contents):
        return text[0]
    return [part for content in (*text, *contents[len(texts) :]) for part in _as_parts(content)]


def _as_parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _content(content: Any, label: str) -> str | list[dict[str, Any] | MediaPart]:
    """Return a message's content in chat's form: a text, or several as parts, with records of images and videos."""
    pieces = _pieces(content, label)
    if not pieces:
        return ""
    if len(pieces) == 1 and isinstance(pieces[0], str):
        return pieces[0]
    return [{"type": "text", "text": piece} if isinstance(piece, str) else piece for piece in pieces]


def _texts(content: Any, label: str) -> list[str]:
    """Return the texts of content. Raises VLLMValidationError for media."""
    pieces = _pieces(content, label)
    media = next((piece for piece in pieces if isinstance(piece, MediaPart)), None)
    if media is not None:
        raise _refusal(media.label, f"{media.modality}s are not supported here, texts alone", media.modality)
    return [piece for piece in pieces if isinstance(piece, str)]


def _pieces(content: Any, label: str) -> list[str | MediaPart]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise _refusal(label, f"must be a text or a list of parts, got {shown(content)}", content)
    return [_piece(part, f"{label}[{i}]") for i, part in enumerate(content)]


def _piece(part: Any, label: str) -> str | MediaPart:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise _refusal(label, f"must be an object with a type, got {shown(part)}", part)
    return _text(part, _TEXTS[kind], label) if kind in _TEXTS else read_media_part(part, label, _MEDIA)


def _text(item: Mapping[str, Any], name: str, label: str) -> str:
    text = item.get(name)
    if not isinstance(text, str):
        raise _refusal(label, f"needs {name!r}, a text, got {shown(text)}", text)
    return text


def _refusal(label: str, message: str, value: Any) -> VLLMValidationError:
    return VLLMValidationError(f"{label}: {message}.", parameter="input", value=shown(value))
