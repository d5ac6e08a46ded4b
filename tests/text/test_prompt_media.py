"""Prompts bring images and videos in vLLM's fields, which are checked and become records."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.items import MediaPart, MediaSettings, video_sampling
from jaxllm.text.prompts import ParsedPrompt, parse_prompt, with_processor_options

SEES = MediaSettings(image_placeholder="<image>", video_placeholder="<video>", limits={"image": 3})
PICTURE = Image.new("RGB", (4, 2))
PIXELS_HWC = np.zeros((2, 4, 3), np.uint8)
FRAMES_FHWC = np.zeros((5, 2, 4, 3), np.uint8)


def parse(**fields: Any) -> ParsedPrompt:
    return parse_prompt({"prompt": "<image>", **fields}, "prompts[1]", SEES)


def media(data: Any, uuids: Any = None) -> tuple[MediaPart, ...]:
    return parse(multi_modal_data=data, multi_modal_uuids=uuids).media


def test_images() -> None:
    [one] = media({"image": PICTURE})
    assert (one.modality, one.source, one.label) == ("image", PICTURE, "prompts[1]['multi_modal_data']['image'][0]")
    first, second = media({"image": [PICTURE, PIXELS_HWC]})
    assert (first.source, second.label) == (PICTURE, "prompts[1]['multi_modal_data']['image'][1]")
    assert second.source is PIXELS_HWC
    assert [part.source.shape for part in media({"image": PIXELS_HWC})] == [(2, 4, 3)]  # type: ignore[union-attr]
    assert [part.source.shape for part in media({"image": FRAMES_FHWC[:3]})] == [(2, 4, 3)] * 3  # type: ignore[union-attr]
    assert [part.source for part in media({"image": [b"GIF"]})] == [b"GIF"]
    assert media({"image": []}) == media({"image": None}) == media({}) == media(None) == ()


def test_videos() -> None:
    pair = (FRAMES_FHWC, {"fps": 2.0})
    [plain], [told] = media({"video": FRAMES_FHWC}), media({"video": pair})
    assert (plain.modality, plain.metadata, told.metadata) == ("video", None, {"fps": 2.0})
    assert plain.source is told.source is FRAMES_FHWC
    [frames] = media({"video": [PICTURE, PICTURE]})
    assert frames.source == (PICTURE, PICTURE)
    several = media({"video": [pair, FRAMES_FHWC, [PICTURE]], "image": PICTURE})
    assert [(part.modality, part.metadata) for part in several] == [
        ("video", {"fps": 2.0}),
        ("video", None),
        ("video", None),
        ("image", None),
    ]
    assert len(media({"video": np.stack([FRAMES_FHWC] * 2)})) == 2


def test_uuids() -> None:
    parts = media({"image": [PICTURE, None, PICTURE], "video": FRAMES_FHWC}, {"image": ["a", "b", None], "video": "v"})
    assert [(part.source is None, part.uuid) for part in parts] == [
        (False, "a"),
        (True, "b"),
        (False, None),
        (False, "v"),
    ]


def test_forms_of_sounds() -> None:
    """An array of several sounds is one item for each, as in vLLM; a pair of an array and its rate is one."""
    hears = msgspec.structs.replace(SEES, audio_placeholder="<audio>")
    one, two, pair, data = np.zeros(3), np.zeros((2, 3)), (np.zeros((2, 3)), 8000), b"RIFF"
    for value, sources in (
        (one, [one]),
        (two, [two[0], two[1]]),
        (pair, [pair]),
        (data, [data]),
        ([one, pair, data], [one, pair, data]),
        (None, []),
    ):
        parsed = parse_prompt({"prompt": "a", "multi_modal_data": {"audio": value}}, "prompt", hears)
        assert [part.modality for part in parsed.media] == ["audio"] * len(sources)
        for part, source in zip(parsed.media, sources, strict=True):
            assert type(part.source) is type(source)
            np.testing.assert_equal(part.source, source)
    for wrong in ([two], [[0.5]], (one, "8000"), ([0.5], 8000), {"audio_embeds": two}, np.zeros((1, 2, 3, 4))):
        with pytest.raises(VLLMValidationError, match=r"\['audio'\]\[\d\]: must be an array of floats \[n\], a pair"):
            parse_prompt({"prompt": "a", "multi_modal_data": {"audio": wrong}}, "prompt", hears)


def test_options_go_with_the_prompt() -> None:
    fields = {"prompt_token_ids": [1], "mm_processor_kwargs": {"a": 1}}
    parsed = parse_prompt({**fields, "multi_modal_data": {"image": PICTURE}}, "prompt", SEES)
    assert (parsed.token_ids, parsed.processor_options, len(parsed.media)) == ([1], {"a": 1}, 1)
    with pytest.raises(VLLMValidationError, match="prompt: 'mm_processor_kwargs' needs 'multi_modal_data'") as caught:
        parse_prompt(fields, "prompt", SEES)
    assert caught.value.parameter == "mm_processor_kwargs"
    assert parse(mm_processor_kwargs={}).processor_options is None
    with pytest.raises(VLLMValidationError, match="mm_processor_kwargs must be a dict"):
        parse(mm_processor_kwargs=[1])


WITH_PICTURE = {"multi_modal_data": {"image": PICTURE}}


@pytest.mark.parametrize(
    "prompt", [{"prompt": "a", **WITH_PICTURE}, {"prompt_token_ids": [1], **WITH_PICTURE}, ParsedPrompt("a")]
)
def test_options_of_a_call_go_with_every_prompt(prompt: Any) -> None:
    """A prompt's own come first, and a model that takes text alone refuses them by name."""
    with_options = with_processor_options({"a": 1, "b": 2}, prompt)
    assert parse_prompt(with_options, "prompt", SEES).processor_options == {"a": 1, "b": 2}
    again = with_processor_options({"a": 3, "c": 4}, with_options)
    assert parse_prompt(again, "prompt", SEES).processor_options == {"a": 1, "b": 2, "c": 4}
    assert with_processor_options({}, prompt) is prompt


@pytest.mark.parametrize("prompt", ["a", [1], {"prompt": "a"}, {"prompt_token_ids": [1]}, ParsedPrompt("a")])
def test_a_model_that_takes_text_alone_refuses_options_of_a_call(prompt: Any) -> None:
    with_options = with_processor_options({"a": 1}, prompt)
    with pytest.raises(VLLMValidationError, match="prompt: 'mm_processor_kwargs' is not supported: the model takes"):
        parse_prompt(with_options, "prompt")


def test_options_of_videos_are_by_modality() -> None:
    assert video_sampling(None) == video_sampling({"video": {}, "image": {}}) == {}
    assert video_sampling({"video": {"fps": 2}}) == {"fps": 2}
    for options, match in [
        ([1], "must be a dict"),
        ({"image": {"a": 1}}, "has no 'image': only videos have options"),
        ({"video": 3}, r"\['video'\] must be a dict, got 3"),
    ]:
        with pytest.raises(VLLMValidationError, match=f"media_io_kwargs.*{match}") as error:
            video_sampling(options)
        assert error.value.parameter == "media_io_kwargs"


def test_none_stands_for_all_items_that_have_names() -> None:
    for data, uuids, names in (
        ({"image": None}, {"image": "a"}, ["a"]),
        ({"image": None}, {"image": ["a", "b"]}, ["a", "b"]),
        ({"image": None, "video": None}, {"video": "a"}, ["a"]),
        ({"image": None}, None, []),
    ):
        assert [(part.source, part.uuid) for part in media(data, uuids)] == [(None, name) for name in names]


@pytest.mark.parametrize(
    ("data", "uuids", "match", "parameter"),
    [
        ([PICTURE], None, "'multi_modal_data' must be a dict with the keys image, video, audio", "multi_modal_data"),
        ({"audio": 1}, None, r"\['audio'\]\[0\]: must be an array of floats \[n\], a pair .*, got 1 \(int\)", "data"),
        ({"audio": np.zeros(3)}, None, r"\['audio'\]\[0\]: At most 0 audio\(s\) may be provided", "data"),
        ({"smell": 1}, None, "'smell' is not supported: the keys are image, video, audio", "data"),
        ({"image": 3}, None, r"\['image'\]\[0\]: must be a PIL image, an array .*, got 3 \(int\)", "data"),
        ({"image": [PICTURE, "http://x"]}, None, r"\['image'\]\[1\]: must be a PIL image", "data"),
        (
            {"image": {"image_embeds": 1}},
            None,
            r"\['image'\]\[0\]: computed embeddings.* need enable_mm_embeds",
            "data",
        ),
        ({"image": {"rows": 1}}, None, r"\['image'\]\[0\]: must be a PIL image", "data"),
        ({"image": np.zeros(3)}, None, r"got an array of shape \(3,\)", "data"),
        ({"image": [b""]}, None, r"\['image'\]\[0\]: must be a PIL image", "data"),
        ({"image": [None]}, None, "None needs its uuid in 'multi_modal_uuids'", "data"),
        ({"video": PICTURE}, None, r"\['video'\]\[0\]: must be an array \[frames", "data"),
        ({"video": [PIXELS_HWC]}, None, r"got an array of shape \(2, 4, 3\)", "data"),
        ({"image": [PICTURE] * 4}, None, r"\['image'\]\[3\]: At most 3 image\(s\) may be provided", "data"),
        ({"image": PICTURE}, ["a"], "'multi_modal_uuids' must be a dict", "uuids"),
        ({"image": PICTURE}, {"image": []}, "must have one entry, a text or None, for each of the 1 items", "uuids"),
        ({"image": PICTURE}, {"image": ["a", "b"]}, "for each of the 1 items", "uuids"),
        ({"image": PICTURE}, {"image": [""]}, r"\['image'\]\[0\] cannot contain an empty string", "uuids"),
        ({"image": PICTURE}, {"image": [{}]}, r"\['image'\]\[0\] must be a string", "uuids"),
        ({"image": PICTURE}, {"video": "a"}, r"\['video'\]: must have one entry.* each of the 0 items", "uuids"),
    ],
)
def test_refused_data(data: Any, uuids: Any, match: str, parameter: str) -> None:
    with pytest.raises(VLLMValidationError, match=match) as error:
        media(data, uuids)
    assert str(error.value).startswith("prompts[1]")
    assert error.value.parameter == f"multi_modal_{parameter.removeprefix('multi_modal_')}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("multi_modal_data", {"image": PICTURE}),
        ("multi_modal_uuids", {"image": "a"}),
        ("mm_processor_kwargs", {"a": 1}),
    ],
)
def test_a_model_that_does_not_see_refuses_each_field_by_name(name: str, value: Any) -> None:
    with pytest.raises(VLLMValidationError, match=f"prompt: '{name}' is not supported: the model takes text only"):
        parse_prompt({"prompt": "a", name: value}, "prompt")
    assert parse_prompt({"prompt": "a", name: {}}, "prompt") == ParsedPrompt("a")


def test_pairs_of_texts_have_no_media() -> None:
    with pytest.raises(VLLMValidationError, match="'text_pair' and 'multi_modal_data' exclude each other"):
        parse(text_pair="b", multi_modal_data={"image": PICTURE})
    assert parse(text_pair="b").pair == "b"
