"""The items of a response's input become the messages of a conversation, or are refused by their places."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.server.responses.input import messages_of, read_input

MESSAGE = {"type": "message", "role": "user", "content": "a"}
IMAGE = {"type": "input_image", "image_url": "http://x"}
CALLED = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "r"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]}
TOLD_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
INPUTS: list[tuple[Any, list[dict[str, Any]]]] = [
    ("a", [{"role": "user", "content": "a"}]),
    ([{"role": "user", "content": "a"}], [{"role": "user", "content": "a"}]),
    (
        [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    ),
    (
        [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}, MESSAGE],
        [{"role": "system", "content": "s\n\nd"}, {"role": "user", "content": "a"}],
    ),
    (
        [{"role": "developer", "content": "d"}, MESSAGE, {"role": "developer", "content": "e"}],
        [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": "a"},
            {"role": "developer", "content": "e"},
        ],
    ),
    (
        [MESSAGE, THOUGHT, ANSWER, CALLED, RESULT],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "reasoning": "hm", "content": "b", "tool_calls": [TOLD_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
    ),
    (
        [MESSAGE, THOUGHT, CALLED, CALLED, RESULT, RESULT, THOUGHT, ANSWER],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "reasoning": "hm", "tool_calls": [TOLD_CALL, TOLD_CALL]},
            *[{"role": "tool", "tool_call_id": "c", "content": "r"}] * 2,
            {"role": "assistant", "reasoning": "hm", "content": "b"},
        ],
    ),
    (
        [MESSAGE, {"type": "reasoning", "id": "r", "summary": [], "content": None, "encrypted_content": None}, ANSWER],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    ),
    (
        [MESSAGE, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]}, ANSWER, ANSWER],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "reasoning": "so", "content": "b"},
            {"role": "assistant", "content": "b"},
        ],
    ),
    (
        [MESSAGE, {**CALLED, "arguments": '{"x'}, {**RESULT, "output": [{"type": "input_text", "text": "r"}]}],
        [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "tool_calls": [{**TOLD_CALL, "function": {"name": "f", "arguments": '{"x'}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
    ),
    (
        [{**MESSAGE, "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
        [{"role": "assistant", "content": "no"}],
    ),
    (
        [MESSAGE, {"type": "item_reference", "id": "msg_1"}, {"id": "msg_2"}],
        [{"role": "user", "content": "a"}, *[{"role": "assistant", "content": "b"}] * 2],
    ),
]


@pytest.mark.parametrize(("request_input", "messages"), INPUTS)
def test_input_becomes_messages(request_input: Any, messages: list[dict[str, Any]]) -> None:
    assert messages_of(read_input(request_input, {"msg_1": ANSWER, "msg_2": ANSWER}.get)) == messages


def test_an_item_is_referred_to_once() -> None:
    with pytest.raises(VLLMValidationError, match=r"input\[1\]: refers to item 'm' once more"):
        read_input([{"type": "item_reference", "id": "m"}] * 2, {"m": ANSWER}.get)


def test_what_belongs_together_is_joined_at_the_end() -> None:
    """Texts at the beginning of a content become one; what comes after parts is a part."""
    part = {"type": "text", "text": "p"}
    system = [
        {"role": "system", "content": each} for each in ("a", "b", [{"type": "input_text", "text": "p"}] * 2, "c")
    ]
    thoughts = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": each}]} for each in "xyz"]
    said = [{"role": "assistant", "content": each} for each in "de"]
    first, user, answer = messages_of([*system, MESSAGE, *thoughts, CALLED, *said, *said])
    text = [{"type": "text", "text": "a\n\nb"}]
    assert first == {"role": "system", "content": [*text, part, part, {"type": "text", "text": "c"}]}
    assert (answer["reasoning"], answer["content"], len(answer["tool_calls"])) == ("x\ny\nz", "dede", 1)
    assert user == {"role": "user", "content": "a"}


def test_instructions_come_first_and_earlier_items_before_new_ones() -> None:
    assert messages_of([{"role": "developer", "content": "d"}, MESSAGE], "i")[0] == {
        "role": "system",
        "content": "i\n\nd",
    }
    roles = [each["role"] for each in messages_of([MESSAGE], "i", [MESSAGE, ANSWER])]
    assert roles == ["system", "user", "assistant", "user"]


NO_INPUT: list[tuple[Any, str]] = [
    ([], "input must have at least one message"),
    ([{"type": "web_search_call", "id": "x"}], "input[0]: must be of type"),
    ([{"role": "tool", "content": "a"}], "input[0]: must have a role"),
    ([{"role": "user", "content": 1}], "input[0].content: must be a text"),
    ([{"role": "user"}], "input[0].content: must be a text"),
    ([{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}], "input[0].content[0]: parts of type"),
    ([{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}], "input[0].content[0]: 'file_id' is not"),
    (
        [{"role": "user", "content": [{"type": "image", "image": "/a"}]}],
        "input[0].content[0]: parts of type 'image' are",
    ),
    ([{"role": "user", "content": [{"type": "video_url", "video_url": "http://x"}]}], "input[0].content[0]: parts of"),
    ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0]: needs 'image_url'"),
    ([{"type": "reasoning", "content": [IMAGE], "summary": []}], "input[0].content[0]: images are not supported here"),
    ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0]: needs 'text'"),
    ([{**CALLED, "name": None}], "input[0]: needs 'name'"),
    ([{**RESULT, "call_id": 3}], "input[0]: needs 'call_id'"),
    ([{**RESULT, "output": {}}], "input[0].output: must be a text"),
    ([{"type": "reasoning", "content": "x", "summary": [1]}, {"type": []}], "input[1]: must be of type"),
]


@pytest.mark.parametrize(("request_input", "message"), NO_INPUT)
def test_what_is_no_input_is_refused_by_its_place(request_input: Any, message: str) -> None:
    with pytest.raises(VLLMValidationError) as caught:
        messages_of(read_input(request_input, {}.get))
    assert caught.value.parameter == "input"
    assert str(caught.value).startswith(message)
