"""List the input items of a stored response, page by page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown

MAX_LISTED, DEFAULT_LISTED = 100, 20
_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""The beginnings of items' ids by type; that of messages is "msg"."""


class Page(NamedTuple):
    """What part of a list is wanted."""

    after: str | None = None
    """The id of the item before the first one."""
    limit: int = DEFAULT_LISTED
    order: Literal["asc", "desc"] = "desc"


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of input items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    """None for a page without items, as is `last_id`."""
    last_id: str | None
    has_more: bool


def list_items(turns: Sequence[bytes], num_output: int, response_id: str, page: Page) -> ItemList:
    """Return a page of a conversation's items, given as lists in JSON, without the last `num_output` ones.

    Items without an id of their own get one from the response's and their position.
    Raises VLLMValidationError if no item has the id `after`.
    """
    items, ids = _identified(turns, response_id)
    items, ids = items[: len(items) - num_output], ids[: len(items) - num_output]
    positions = list(range(len(items)))
    if page.order == "desc":
        positions.reverse()
    if page.after is not None:
        if page.after not in ids:
            message = f"after: no input item has the id {shown(page.after)}."
            raise VLLMValidationError(message, parameter="after", value=page.after)
        positions = positions[positions.index(ids.index(page.after)) + 1 :]
    chosen = positions[: page.limit]
    return ItemList(
        data=[_whole(items[i], ids[i]) for i in chosen],
        first_id=ids[chosen[0]] if chosen else None,
        last_id=ids[chosen[-1]] if chosen else None,
        has_more=len(positions) > len(chosen),
    )


def made_for(item_id: str) -> str | None:
    """Return the id of the response for whose list an item's id may have been made."""
    parts = item_id.split("_")
    return f"resp_{parts[1]}" if len(parts) == 3 else None


def items_by_id(turns: Sequence[bytes], response_id: str) -> dict[str, dict[str, Any]]:
    """Return a conversation's items by the ids that `list_items` shows."""
    items, ids = _identified(turns, response_id)
    return {item_id: {**item, "id": item_id} for item_id, item in zip(ids, items, strict=True)}


def _identified(turns: Sequence[bytes], response_id: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a conversation's items, and the id of each."""
    items = [item for turn in turns for item in msgspec.json.decode(turn)]
    return items, _ids(items, response_id.removeprefix("resp_"))


def _ids(items: Iterable[Mapping[str, Any]], name: str) -> list[str]:
    """Return a unique id for each item."""
    ids: dict[str, None] = {}
    for i, item in enumerate(items):
        item_id = item.get("id")
        if not isinstance(item_id, str) or not item_id or item_id in ids:
            item_id = f"{_PREFIXES.get(item.get('type') or 'message', 'msg')}_{name}_{i}"
        ids[item_id] = None
    return list(ids)


def _whole(item: Mapping[str, Any], item_id: str) -> dict[str, Any]:
    """Return an item with all fields of its type."""
    kind = item.get("type") or "message"
    whole = {"status": "completed", **item, "id": item_id, "type": kind}
    if kind == "message":
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        content = item.get("content")
        whole["content"] = [_part(each, part) for each in (content if isinstance(content, list) else [content])]
    return whole


def _part(content: Any, kind: str) -> Any:
    """Return a part of a message's content; texts without a type become parts of a type."""
    if not isinstance(content, str):
        return content
    part: dict[str, Any] = {"type": kind, "text": content}
    return {**part, "annotations": []} if kind == "output_text" else part
