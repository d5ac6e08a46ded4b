"""A prompt's items are read within bounds that are checked before any pixel exists, and shared between requests."""

from __future__ import annotations

import io
import threading
import time
import tracemalloc
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.budget import ByteBudget
from jaxllm.media.errors import MediaError, MediaFetchError
from jaxllm.media.fetching.connector import MediaConnector
from jaxllm.media.frames import Sampling
from jaxllm.media.items import MediaPart, MediaSettings
from jaxllm.media.processors import ImageProcessor
from jaxllm.media.reader import MediaReader
from tests.media.support import golden, tokenizer

PROMPT = "<|image_pad|>"


def settings(**others: Any) -> MediaSettings:
    image_processor, config, _ = golden("families.json")["qwen2_vl"]
    return MediaSettings(
        image_placeholder=PROMPT, image_processor=image_processor, config={"model_type": "qwen2_vl", **config}, **others
    )


@cache
def reader() -> MediaReader:
    return MediaReader(settings(), tokenizer())


def png(height: int, width: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height)).save(stream, "PNG")
    return stream.getvalue()


def part(number: int = 0, source: Any = None, uuid: str | None = None) -> MediaPart:
    return MediaPart("image", source or png(56, 84), uuid, f"multi_modal_data['image'][{number}]")


def test_requests_share_the_patches_of_an_item():
    (first,), (second,) = (reader().read(PROMPT, [part()])[1].items for _ in range(2))
    assert first.patches is second.patches


def test_an_image_beside_others_is_another_item_than_alone():
    image_processor, config, _ = golden("families.json")["llava_onevision"]
    made = MediaReader(MediaSettings(image_processor=image_processor, config=config), tokenizer())
    parts = [part(0, png(56, 84), "bee"), part(1, png(56, 84)), part(2, png(28, 28))]
    alone = [made.read("<image>", [one])[1].items[0] for one in parts[:2]]
    beside = made.read("<image>" * 3, parts)[1].items
    again = made.read("<image>" * 2, parts[1::-1])[1].items
    assert [len(item.grids) for item in (*alone, *beside)] == [3, 3, 1, 1, 1]
    assert [item.key for item in again] == [item.key for item in beside[1::-1]]
    assert len({item.key for item in (*alone, *beside)}) == 5
    assert again[0].patches is beside[1].patches


def test_a_request_holds_two_threads_at_most(monkeypatch: pytest.MonkeyPatch):
    lock, running, most = threading.Lock(), 0, 0

    def fetch(*_: Any) -> bytes:
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        time.sleep(0.02)
        with lock:
            running -= 1
        return png(28, 28)

    made = MediaReader(settings(), tokenizer())
    monkeypatch.setattr(MediaConnector, "fetch", fetch)
    _, media = made.read(PROMPT * 6, [part(number, f"http://a/{number}") for number in range(6)])
    assert (len(media.items), most) == (6, 2)


def test_the_first_item_that_fails_ends_a_request(monkeypatch: pytest.MonkeyPatch):
    fetched: list[str] = []

    def fetch(_: MediaConnector, url: str, modality: str) -> bytes:
        fetched.append(url)
        raise MediaFetchError("no")

    monkeypatch.setattr(MediaConnector, "fetch", fetch)
    with pytest.raises(MediaFetchError, match=r"image'\]\[0\]: no"):
        reader().read(PROMPT * 9, [part(number, f"http://a/{number}") for number in range(9)])
    assert len(fetched) < 9


def test_a_closed_reader_says_so():
    made = MediaReader(settings(), tokenizer())
    made.close()
    with pytest.raises(MediaFetchError, match=r"image'\]\[0\]: the engine is shutting down") as caught:
        made.read(PROMPT, [part()])
    assert caught.value.parameter == "multi_modal_data"


@pytest.mark.parametrize("prompt", ["a", [1, 2], PROMPT * 2])
def test_placeholders_are_counted_before_anything_is_fetched(prompt: Any, monkeypatch: pytest.MonkeyPatch):
    fetched: list[str] = []
    monkeypatch.setattr(MediaConnector, "fetch", lambda _, url, modality: fetched.append(url))
    with pytest.raises(VLLMValidationError, match=r"placeholders .* for images, but multi_modal_data has 1"):
        reader().read(prompt, [part(0, "http://a/")])
    assert not fetched


def test_tokens_are_counted_before_any_pixel_exists(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ImageProcessor, "process", None)
    short = MediaReader(settings(max_model_len=11), tokenizer())
    with pytest.raises(MediaError, match="take 12 tokens or more, and max_model_len is 11") as caught:
        short.read(PROMPT * 2, [part(number) for number in range(2)])
    assert caught.value.parameter == "multi_modal_data"


@pytest.mark.parametrize(
    "options", [{"max_pixels": 50_001}, {"min_pixels": 3137}, {"size": {"shortest_edge": 3136, "longest_edge": 50_001}}]
)
def test_a_request_may_not_raise_the_engines_bounds(options: dict[str, Any]):
    made = MediaReader(settings(options={"size": {"shortest_edge": 3136, "longest_edge": 50_000}}), tokenizer())
    lower = {"min_pixels": 3136, "max_pixels": 40_000}
    assert made.read(PROMPT, [part()], lower)[1].items
    with pytest.raises(VLLMValidationError, match=r"a request may not raise (min|max)_pixels") as caught:
        made.read(PROMPT, [part()], options)
    assert caught.value.parameter == "mm_processor_kwargs"


def test_threads_that_decode_share_bytes():
    budget, order = ByteBudget(100), list[int]()

    def take(number: int) -> None:
        with budget.hold(60):
            order.append(number)

    with budget.hold(1000):
        threads = [threading.Thread(target=take, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        assert not order
    for thread in threads:
        thread.join()
    assert sorted(order) == [0, 1, 2]


def test_items_that_are_decoded_hold_bytes(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    hold = ByteBudget.hold

    def recorded(budget: ByteBudget, num_bytes: int) -> AbstractContextManager[None]:
        asked.append(num_bytes)
        return hold(budget, num_bytes)

    monkeypatch.setattr(ByteBudget, "hold", recorded)
    reader().read(PROMPT, [part(0, png(56, 112))])
    patches, between = 2 * 4 * (3 * 2 * 56 * 112), 2 * 3 * 56 * 112  # two equal frames
    assert asked == [56 * 112 * 12 + patches + between]


def family(name: str, **others: Any) -> MediaReader:
    """Return a reader of another model."""
    image_processor, config, _ = golden("families.json")[name]
    named = {"model_type": name, **config}
    return MediaReader(MediaSettings(image_processor=image_processor, config=named, **others), tokenizer())


@pytest.mark.parametrize(
    ("name", "modality", "source"),
    [
        ("smolvlm", "video", np.zeros((8, 16, 16, 3), np.uint8)),
        ("idefics3", "image", np.zeros((4096, 2, 3), np.uint8)),
        ("qwen2_vl", "image", np.zeros((700, 900, 3), np.uint8)),
        ("llava_onevision", "image", np.zeros((700, 4, 3), np.uint8)),
    ],
)
def test_the_bytes_that_are_held_are_those_that_an_item_takes(
    name: str, modality: Any, source: Any, monkeypatch: pytest.MonkeyPatch
):
    made = family(name, video_placeholder="<video>" if modality == "video" else None)
    video_or_image = MediaPart(modality, source, None, f"multi_modal_data['{modality}']")
    mark = made._expander.rule.placeholders[modality]
    made.read(mark, [MediaPart(modality, source[..., ::-1] + 1, None, "multi_modal_data")])  # loads what stays
    asked: list[int] = []
    hold = ByteBudget.hold
    monkeypatch.setattr(ByteBudget, "hold", lambda budget, count: asked.append(count) or hold(budget, count))
    tracemalloc.start()
    made.read(mark, [video_or_image])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.2 * asked[0] + 2**16


@pytest.mark.parametrize(
    ("modality", "source", "way_out"),
    [
        ("image", np.zeros((56, 84, 3), np.uint8), "image takes 6 tokens, .* lower the sizes in mm_processor_kwargs"),
        ("video", np.zeros((8, 56, 84, 3), np.uint8), "video takes .* num_frames in media_io_kwargs"),
    ],
)
def test_items_that_cannot_be_encoded_are_refused_before_any_pixel_exists(
    modality: Any, source: Any, way_out: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(MediaReader, "_make", None)
    made = MediaReader(settings(video_placeholder="<|video_pad|>", most_rows=5), tokenizer())
    item = MediaPart(modality, source, None, f"multi_modal_data['{modality}']")
    with pytest.raises(MediaError, match=rf"\]: the {way_out}.* raise max_num_batched_tokens"):
        made.read(f"<|{modality}_pad|>", [item])


@pytest.mark.parametrize(("number", "fits"), [(2**30 + 8, False), (2**20, True)])
def test_videos_whose_positions_no_int32_holds_are_refused(number: int, fits: bool):
    made = MediaReader(
        settings(video_placeholder="<|video_pad|>", rope_merge=2, steps_per_second=2.0, max_model_len=1000), tokenizer()
    )
    metadata = {"fps": 1.0, "total_num_frames": number, "frames_indices": [0, 1, 2, 3]}
    video = np.zeros((4, 56, 84, 3), np.uint8)
    item = MediaPart("video", video, None, "multi_modal_data['video'][0]", metadata)
    if fits:
        _, media = made.read("<|video_pad|>", [item])
        assert np.frombuffer(media.rope_positions, np.int32).max() == number
    else:
        with pytest.raises(MediaError, match=r"'video'\]\[0\]: the video's .* seconds take positions of 2\^31"):
            made.read("<|video_pad|>", [item])


def test_a_name_known_alone_is_unknown_beside_another_image():
    made = family("llava_onevision")
    made.read("<image>", [part(0, png(56, 84), "bee")])
    with pytest.raises(MediaError, match="an image alone in a prompt and the same one beside others are two items"):
        made.read("<image>" * 2, [MediaPart("image", None, "bee", "multi_modal_data"), part(1)])


def test_the_files_of_a_prompt_have_a_limit_together(monkeypatch: pytest.MonkeyPatch):
    data = png(28, 28)
    monkeypatch.setattr("jaxllm.media.reader._FETCHED_BYTES", 2 * len(data))
    monkeypatch.setattr(MediaConnector, "fetch", lambda *_: data)
    for number in (2, 3):
        parts = [part(index, f"http://a/{index}") for index in range(number)]
        if number == 2:
            assert len(reader().read(PROMPT * number, parts)[1].items) == 2
        else:
            with pytest.raises(MediaError, match="files of one prompt have more than"):
                reader().read(PROMPT * number, parts)


@pytest.mark.parametrize("options", [{"max_pixelz": 1}, {"max_pixels": -1}])
def test_errors_of_options_name_their_field(options: dict[str, Any]):
    with pytest.raises(VLLMValidationError) as caught:
        reader().read(PROMPT, [part()], options)
    assert caught.value.parameter == "mm_processor_kwargs"


def test_options_of_frames_may_stand_with_those_of_the_processor(monkeypatch: pytest.MonkeyPatch):
    taken: list[Sampling] = []

    def count(_: MediaReader, part: MediaPart, how: Any, totals: Any) -> None:
        taken.append(how.sampling)
        assert how.options == {"max_pixels": 50_000}
        raise MediaError("enough", parameter="multi_modal_data")

    monkeypatch.setattr(MediaReader, "_fetch", count)
    made = MediaReader(
        settings(video_placeholder="<|video_pad|>", options={"max_pixels": 50_000}, sampling={"num_frames": 4}),
        tokenizer(),
    )
    video = MediaPart("video", b"", None, "multi_modal_data['video']")
    for options in ({}, {"num_frames": 2}, {"fps": 1.0}):
        with pytest.raises(MediaError, match="enough"):
            made.read("<|video_pad|>", [video], options)
    assert taken == [Sampling(num_frames=4), Sampling(num_frames=2), Sampling(num_frames=4, fps=1.0)]
    with pytest.raises(VLLMValidationError, match="media_io_kwargs says which frames are taken too") as caught:
        made.read("<|video_pad|>", [video], {"fps": 1}, {"num_frames": 2})
    assert caught.value.parameter == "mm_processor_kwargs"
