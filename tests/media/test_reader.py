"""A prompt's items are read within bounds that are checked before any pixel exists, and shared between requests."""

from __future__ import annotations

import io
import threading
import time
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import pytest
from PIL import Image

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.budget import ByteBudget
from jaxllm.media.errors import MediaError, MediaFetchError
from jaxllm.media.fetching.connector import MediaConnector
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
    assert asked == [56 * 112 * 12]


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
