"""Images and videos in conversations become records, and what the template shows stands for them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.items import MediaPart, MediaSettings
from jaxllm.text.chat import ChatRenderer
from jaxllm.text.prompts import ParsedPrompt
from tests.engine.support import byte_level

URL = "https://example.com/a.png"
IMAGE = {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}
VIDEO = {"type": "video_url", "video_url": {"url": "https://example.com/v.mp4"}}
STRINGS = "{# tools #}{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
PARTS = (
    "{# tools #}{% for m in messages %}{{ m.role }}="
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}<{{ p.type }}>{% endif %}{% endfor %}{% endif %};{% endfor %}"
)
SEES = MediaSettings(image_placeholder="<image>", video_placeholder="<video>", reserved=("<row>",))


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def render(*messages: Any, template: str = PARTS, media: MediaSettings | None = SEES, **options: Any) -> ParsedPrompt:
    return ChatRenderer(byte_level(), template, media).render(list(messages), "messages", **options)


def only(part: Any) -> MediaPart:
    [media] = render(user(part)).media
    return media


@pytest.mark.parametrize(
    "part",
    [
        IMAGE,
        {"type": "image_url", "image_url": URL},
        {"image_url": URL},
        {"image_url": {"url": URL}},
        {"type": "input_image", "image_url": URL, "detail": "low", "file_id": None},
        {"type": "image", "image": URL},
        {"type": "image", "url": URL},
    ],
)
def test_each_form_of_an_image_is_the_same_record(part: dict[str, Any]) -> None:
    media = only(part)
    assert (media.modality, media.source, media.uuid) == ("image", URL, None)
    assert media.label == "messages[0]['content'][0]"


def test_other_sources_of_parts() -> None:
    picture, pixels = Image.new("RGB", (2, 3)), np.zeros((3, 2, 3), np.uint8)
    assert only({"type": "image", "image": picture}).source is picture
    assert only({"type": "image_pil", "image_pil": picture}).source is picture
    assert only({"image_pil": picture}).source is picture
    assert only({"type": "image", "image": pixels}).source is pixels
    assert only({"type": "image", "path": "/a b/c.png"}).source == "file:///a%20b/c.png"
    assert only({"type": "image", "image": "data:image/png;base64,aa"}).source == "data:image/png;base64,aa"
    assert only({"type": "video", "video": [picture, picture]}).source == (picture, picture)
    video = only({"video_url": "file:///v.mp4", "uuid": "v"})
    assert (video.modality, video.source, video.uuid) == ("video", "file:///v.mp4", "v")
    assert (only({"type": "image_url", "image_url": None, "uuid": 7}).source) is None
    assert only({**IMAGE, "uuid": 7}).uuid == "7"


def test_a_template_of_parts_gets_parts() -> None:
    prompt = render(user(text("a"), IMAGE, text("b"), VIDEO), {"role": "tool", "content": [text("c"), IMAGE]})
    assert prompt.text == "user=a<image>b<video>;tool=c<image>;"
    assert [(part.modality, part.label) for part in prompt.media] == [
        ("image", "messages[0]['content'][1]"),
        ("video", "messages[0]['content'][3]"),
        ("image", "messages[1]['content'][1]"),
    ]
    assert render(user(IMAGE), content_format="openai").text == "user=<image>;"


def test_a_template_of_texts_gets_placeholders_before_each_text() -> None:
    messages = user(text("a"), IMAGE, VIDEO, text("b"), IMAGE), user(IMAGE), user(text("c"))
    prompt = render(*messages, template=STRINGS)
    assert prompt.text == "user=<image>\n<image>\n<video>\na\nb;user=<image>;user=c;"
    assert len(prompt.media) == 4
    among = msgspec.structs.replace(SEES, interleave_mm_strings=True)
    assert render(*messages, template=STRINGS, media=among).text == (
        "user=a\n<image>\n<video>\nb\n<image>;user=<image>;user=c;"
    )
    assert render(messages[0], media=among).text == "user=a<image><video>b<image>;"  # only where texts are read


def test_media_stay_where_messages_are_rewritten() -> None:
    """Templates without tools or developers get other messages."""
    call = {"type": "function", "id": "1", "function": {"name": "look", "arguments": "{}"}}
    prompt = render(
        user(text("a"), IMAGE),
        {"role": "assistant", "content": [IMAGE], "tool_calls": [call]},
        {"role": "tool", "content": [text("c"), VIDEO]},
        {"role": "developer", "content": [text("d"), IMAGE]},
        template=PARTS.replace("{# tools #}", ""),
    )
    assert prompt.text == (
        "system=d<image>;user=a<image>;"
        'assistant=<image><tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>;'
        "user=<video><tool_response>\nc\n</tool_response>;"
    )
    assert [part.label[9] for part in prompt.media] == ["3", "0", "1", "2"]
    both = {"role": "system", "content": "s"}, {"role": "developer", "content": [text("d"), IMAGE]}
    assert render(*both, user(text("a"))).text == "system=<image>s\n\nd;user=a;"


HEARS = msgspec.structs.replace(SEES, audio_placeholder="<audio>")


@pytest.mark.parametrize(
    ("part", "source"),
    [
        (
            {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
            "data:audio;base64,UklG",
        ),
        ({"input_audio": {"data": "UklG"}}, "data:audio;base64,UklG"),
        ({"type": "audio_url", "audio_url": {"url": "https://example.com/a.mp3"}}, "https://example.com/a.mp3"),
        ({"audio_url": "data:audio/wav;base64,UklG"}, "data:audio/wav;base64,UklG"),
        ({"type": "audio", "url": "https://example.com/a.mp3"}, "https://example.com/a.mp3"),
        ({"type": "audio", "path": "/a b.wav"}, "file:///a%20b.wav"),
        ({"type": "audio", "audio": b"RIFF"}, b"RIFF"),
    ],
)
def test_sounds(part: dict[str, Any], source: Any) -> None:
    parsed = render(user(text("a"), {**part, "uuid": "bee"}, text("b")), media=HEARS)
    [media] = parsed.media
    assert (media.modality, media.source, media.uuid) == ("audio", source, "bee")
    assert parsed.text == "user=a<audio>b;"
    parsed = render(user(text("a"), part), media=HEARS, template=STRINGS)
    assert parsed.text == "user=<audio>\na;"
    with pytest.raises(VLLMValidationError, match="must not have '<audio>' in a text"):
        render(user(text("<audio>"), part), media=HEARS)


def test_a_sound_and_its_rate() -> None:
    samples = np.zeros((2, 5), np.float32)
    [media] = render(user({"type": "audio", "audio": (samples, 8000)}), media=HEARS).media
    assert isinstance(media.source, tuple)
    assert media.source[0] is samples
    assert media.source[1] == 8000


def test_counts_are_limited_before_anything_is_fetched() -> None:
    few = msgspec.structs.replace(SEES, video_placeholder=None, limits={"image": 2})
    assert len(render(user(IMAGE), user(IMAGE), media=few).media) == 2
    with pytest.raises(VLLMValidationError) as error:
        render(user(IMAGE), user(IMAGE, text("x"), IMAGE), media=few)
    assert str(error.value) == (
        "messages[1]['content'][2]: At most 2 image(s) may be provided in one prompt. "
        "Set `--limit-mm-per-prompt` to increase this limit."
    )
    with pytest.raises(VLLMValidationError, match=r"At most 0 video\(s\) may be provided in one prompt\.$"):
        render(user(VIDEO), media=few)
    assert len(render(user(*[IMAGE] * 999)).media) == 999
    with pytest.raises(VLLMValidationError, match=r"At most 999 image\(s\)"):
        render(user(*[IMAGE] * 1000))


def test_a_model_takes_images_if_it_sees_and_its_limit_leaves_some() -> None:
    assert SEES.takes_images
    assert msgspec.structs.replace(SEES, limits={"video": 0, "image": 1}).takes_images
    assert not msgspec.structs.replace(SEES, limits={"image": 0}).takes_images
    assert not msgspec.structs.replace(SEES, image_placeholder=None).takes_images


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ({"type": "image_url", "image_url": {}}, r"\[1\]: needs 'image_url': a URL"),
        ({"type": "image_url", "image_url": ""}, "needs 'image_url'"),
        ({"type": "image_url", "image_url": {"url": 3}, "uuid": "a"}, "needs 'image_url'"),
        ({"type": "image_url", "image_url": "\ud800"}, "needs 'image_url'"),
        ({"type": "image"}, "needs 'image': a URL, a path, a PIL image"),
        ({"type": "image", "image": [1]}, "needs 'image'"),
        ({"type": "image", "image": np.zeros(3)}, "needs 'image'"),
        ({"type": "image_pil", "image_pil": "/etc/passwd"}, "needs 'image_pil': a PIL image"),
        ({"type": "input_image", "file_id": "file-1"}, "'file_id' is not supported"),
        ({**IMAGE, "uuid": ""}, "'uuid' cannot contain an empty string"),
        ({**IMAGE, "uuid": "a" * 1025}, "'uuid' must have at most 1024 characters"),
        ({"type": "image_embeds", "image_embeds": "aa"}, "computed embeddings.* need enable_mm_embeds=True"),
        ({"type": "image_embeds", "image_embeds": [[1.0]]}, "needs 'image_embeds': an array in base64"),
        ({"type": "image_embeds", "image_embeds": ""}, "needs 'image_embeds': an array in base64"),
        ({"type": "image_embeds", "image_embeds": {"rows": "aa"}}, "needs 'image_embeds': an array in base64"),
        ({"type": "prompt_embeds", "prompt_embeds": "aa"}, "'prompt_embeds' are not supported: embeddings of text"),
        ({"type": "input_audio", "input_audio": {}}, "needs 'input_audio': a dict with the sound's file as 'data'"),
        ({"type": "input_audio", "input_audio": "http://x"}, "needs 'input_audio': a dict with the sound's file"),
        ({"type": "input_audio", "input_audio": {"data": 3, "format": "wav"}}, "needs 'input_audio'"),
        ({"type": "audio", "audio": np.zeros((2, 2, 2))}, "needs 'audio': a URL, a path, an array of floats"),
        ({"type": "audio_embeds", "audio_embeds": "aa"}, "'audio_embeds' are not supported: embeddings of sounds"),
        ({"audio_url": "http://x"}, r"At most 0 audio\(s\) may be provided in one prompt\.$"),
        ({"type": "input_file"}, "'input_file' are not supported: files are not read"),
        ({"type": "image", "image": "a/" * 2049}, "'image' must have at most 4096 characters as a path, got 4098"),
        ({"type": "video", "path": "a" * 4097}, "'path' must have at most 4096 characters as a path, got 4097"),
        ({"type": "smell"}, "'smell' are not supported: a part is a text, or one of image_url"),
        ({"type": 3}, "a part is a dict with 'type'"),
        ("see <image>", "must not have '<image>' in a text"),
        (text("<row>"), "must not have '<row>' in a text"),
    ],
)
def test_refused_parts(part: Any, match: str) -> None:
    with pytest.raises(VLLMValidationError, match=match) as error:
        render(user(text("a"), part))
    assert str(error.value).startswith("messages[0]['content'][1]: ")
    assert error.value.parameter == "messages"


SHOWS_ALL = (
    "{% for m in messages %}{{ m.role }}={% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}<{{ p.type }}>{% endif %}{% endfor %}{% endif %}"
    "{{ m.reasoning_content }}{{ m.name }}{{ m.tool_calls }};{% endfor %}{{ tools }}{{ variable }}"
)


def answer(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "b", **fields}


def calling(name: str, arguments: str) -> dict[str, Any]:
    return answer(tool_calls=[{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}])


HIDDEN: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "two texts": ([user(text("a <ima"), text("ge> b"))], {}),
    "two texts of a row": ([user(text("<r"), text("ow>"))], {}),
    "a role": ([{"role": "user<image>", "content": "a"}], {}),
    "a name": ([{"role": "user", "name": "<image>", "content": "a"}], {}),
    "reasoning": ([answer(reasoning_content="<video>")], {}),
    "the name of a call": ([calling("f<image>", "{}")], {}),
    "the arguments of a call": ([calling("f", '{"a": "\\u003cimage>"}')], {}),
    "a tool": ([user(text("a"))], {"tools": [{"type": "function", "function": {"description": "<row>"}}]}),
    "a variable": ([user(text("a"))], {"chat_template_kwargs": {"variable": "<image>"}}),
}


@pytest.mark.parametrize("picture", [None, IMAGE])
@pytest.mark.parametrize("case", HIDDEN)
def test_placeholders_are_refused_wherever_the_template_shows_them(case: str, picture: dict[str, Any] | None) -> None:
    conversation, options = HIDDEN[case]
    before = [] if picture is None else [user(picture)]
    with pytest.raises(
        VLLMValidationError, match=r"^messages: the rendered chat has \d of '<\w+>' for \d items"
    ) as error:
        render(*before, *conversation, template=SHOWS_ALL, **options)
    assert error.value.parameter == "messages"
    assert render(*conversation, template=SHOWS_ALL, media=None, **options).text, "other models read them as text"


def test_a_template_shows_each_item_once() -> None:
    assert (render(user(IMAGE, VIDEO, text("a")), template=SHOWS_ALL).text or "").startswith("user=<image><video>a")
    for template in (PARTS.replace("<{{ p.type }}>", ""), PARTS.replace("<{{ p.type }}>", "<image><image>")):
        with pytest.raises(VLLMValidationError, match=r"has [02] of '<image>' for 1 items"):
            render(user(IMAGE), template=template)


def test_a_video_is_a_text_for_a_template_that_does_not_know_videos() -> None:
    template = PARTS.replace("{% else %}<{{ p.type }}>", "{% elif p.type == 'image' %}<image>")
    assert render(user(IMAGE, VIDEO, text("a")), template=template).text == "user=<image><video>a;"
    knows = template.replace("{% elif", "{% elif p.type == 'video' %}a video: <video>{% elif", 1)
    assert render(user(VIDEO, IMAGE), template=knows).text == "user=a video: <video><image>;"


def test_a_long_placeholder_holds_a_rows_token() -> None:
    media = MediaSettings(image_placeholder="<image>", reserved=("<image>", "image"))
    assert render(user(IMAGE), media=media).text == "user=<image>;"
    with pytest.raises(VLLMValidationError, match="has 1 of 'image' for 0 items"):
        render(user(IMAGE, text("im"), text("age")), media=media)


def test_typed_placeholders_are_refused_in_plain_contents() -> None:
    with pytest.raises(VLLMValidationError, match=r"messages\[0\]\['content'\]: must not have '<video>'"):
        render({"role": "user", "content": "<video>"})
    assert render({"role": "user", "content": "<video>"}, media=None).text == "user=<video>;"


@pytest.mark.parametrize("part", [IMAGE, VIDEO, {"image_url": URL}, {"type": "image_url", "image_url": {}}])
def test_a_model_that_does_not_see_refuses_media(part: dict[str, Any]) -> None:
    kind = part.get("type", "image_url")
    match = rf"messages\[0\]\['content'\]\[0\]: parts of type '{kind}' are not supported: the model takes text only"
    with pytest.raises(VLLMValidationError, match=match):
        render(user(part), media=None)


def test_records_of_other_apis_name_their_own_position() -> None:
    part = MediaPart("image", URL, None, "input[3].content[1]")
    assert render(user(text("a"), part)).media == (part,)
    with pytest.raises(VLLMValidationError, match=r"^input\[3\]\.content\[1\]: images are not supported") as error:
        render(user(part), media=None)
    assert error.value.parameter == "input"
