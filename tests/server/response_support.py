"""Helpers that read and compare responses' events."""

from __future__ import annotations

from typing import Any

from tests.server.support import Answer


def events_of(answer: Answer) -> list[Any]:
    """Return the events of a stream, which are numbered."""
    events = answer.named_events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(value: Any) -> Any:
    """Return the parts of a response that do not vary between equal requests."""
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if not isinstance(value, dict):
        return value
    left_out = ("id", "call_id", "item_id", "created_at", "completed_at")
    return {name: without_ids(each) for name, each in value.items() if name not in left_out}
