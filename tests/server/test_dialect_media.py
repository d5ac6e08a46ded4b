"""The pictures of every API's messages become the same records, with their positions in the API's own request."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.items import MediaSettings
from jaxllm.server.anthropic.input import as_chat
from jaxllm.server.anthropic.protocol import MessagesRequest
from jaxllm.server.ollama.serving import messages_in_chat
from jaxllm.server.responses.input import messages_of, read_input
from jaxllm.text.chat import ChatRenderer
from jaxllm.text.prompts import ParsedPrompt
from tests.engine.support import byte_level

URL = "https://example.com/a.png"
DATA = "data:image/png;base64,aa"
SEES = MediaSettings(image_placeholder="<image>")
TEMPLATE = (
    "{# tools #}{% for m in messages %}{{ m.role }}="
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}<{{ p.type }}>{% endif %}{% endfor %}{% endif %};{% endfor %}"
)
ANTHROPIC_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
ANTHROPIC_URL = {"type": "image", "source": {"type": "url", "url": URL}}
RESPONSES_IMAGE = {"type": "input_image", "image_url": URL, "detail": "auto"}


def render(messages: list[dict[str, Any]], media: MediaSettings | None = SEES) -> ParsedPrompt:
    return ChatRenderer(byte_level(), TEMPLATE, media).render(messages, "messages")


def sources(prompt: ParsedPrompt) -> list[tuple[Any, str]]:
    return [(part.source, part.label) for part in prompt.media]


def anthropic(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return as_chat(MessagesRequest(max_tokens=5, messages=list(messages)), has_thinking_tokens=False).messages


def test_anthropics_images_are_beside_their_texts() -> None:
    content = [{"type": "text", "text": "a"}, ANTHROPIC_IMAGE, {"type": "text", "text": "b"}, ANTHROPIC_URL]
    prompt = render(anthropic({"role": "user", "content": "hi"}, {"role": "user", "content": content}))
    assert prompt.text == "user=hia<image>b<image>;"
    assert sources(prompt) == [(DATA, "messages[1].content[1]"), (URL, "messages[1].content[3]")]


def test_anthropics_images_in_results_come_before_what_the_user_says() -> None:
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    seen = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "r"}, ANTHROPIC_URL]}
    failed = {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": [ANTHROPIC_IMAGE]}
    messages = anthropic(
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [call, call]},
        {"role": "user", "content": [seen, failed, {"type": "text", "text": "and?"}]},
    )
    prompt = render(messages)
    assert prompt.text == "user=x;assistant=;tool=r;tool=Error: ;user=<image><image>and?;"
    places = [label for _, label in sources(prompt)]
    assert places == ["messages[2].content[0].content[1]", "messages[2].content[1].content[0]"]
    assert render(anthropic(*[{"role": "user", "content": [seen]}])).text == "tool=r;user=<image>;"


@pytest.mark.parametrize(
    ("role", "block", "match"),
    [
        ("user", {"type": "image"}, r"messages\[0\]\.content\[0\]\.source: must be of type 'base64' or 'url'"),
        ("user", {"type": "image", "source": {"type": "file", "file_id": "f"}}, "must be of type 'base64' or 'url'"),
        ("user", {"type": "image", "source": {"type": "base64", "data": "aa"}}, "needs 'media_type' as a text"),
        ("user", {"type": "image", "source": {"type": "url", "url": ""}}, "needs 'image_url'"),
        ("assistant", ANTHROPIC_IMAGE, r"messages\[0\]\.content\[0\]: blocks of type 'image' are not supported"),
        ("user", {"type": "document", "source": {"type": "content", "content": [ANTHROPIC_IMAGE]}}, "type 'image' are"),
    ],
)
def test_anthropics_unusable_images(role: str, block: dict[str, Any], match: str) -> None:
    with pytest.raises(VLLMValidationError, match=match) as error:
        anthropic({"role": role, "content": [block]})
    assert error.value.parameter == "messages"


def test_responses_have_images_in_messages_and_results() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, RESPONSES_IMAGE]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_text", "text": "r"}, RESPONSES_IMAGE],
        },
    ]
    prompt = render(messages_of(read_input(items, {}.get), "s"))
    assert prompt.text == "system=s;user=a<image>;assistant=;tool=r<image>;"
    assert sources(prompt) == [(URL, "input[0].content[1]"), (URL, "input[2].output[1]")]


def test_ollamas_images_come_before_the_text() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a", "images": ["aa", "bb"]},
        {"role": "user", "images": ["cc"]},
    ]
    prompt = render(messages_in_chat(messages))
    assert prompt.text == "user=<image><image>a;user=<image>;"
    assert [label for _, label in sources(prompt)] == [
        "messages[0].images[0]",
        "messages[0].images[1]",
        "messages[1].images[0]",
    ]
    assert all(source.startswith("data:") and source[-10:-2] == ";base64," for source, _ in sources(prompt))
    for images in ("aa", [3], {"a": "b"}):
        with pytest.raises(VLLMValidationError, match=r"messages\[0\]\.images: must be a list of images in base64"):
            messages_in_chat([{"role": "user", "content": "a", "images": images}])


def test_each_api_tells_where_a_picture_is_that_the_model_does_not_take() -> None:
    messages = {
        "messages[0].content[0]": anthropic({"role": "user", "content": [ANTHROPIC_URL]}),
        "input[0].content[0]": messages_of([{"role": "user", "content": [RESPONSES_IMAGE]}]),
        "messages[0].images[0]": messages_in_chat([{"role": "user", "content": "a", "images": ["aa"]}]),
    }
    for label, conversation in messages.items():
        with pytest.raises(VLLMValidationError) as error:
            render(conversation, None)
        assert str(error.value) == f"{label}: images are not supported: the model takes text only."
        assert error.value.parameter == label.partition("[")[0]
