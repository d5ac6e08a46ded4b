"""Prompts with images become the token ids that transformers' processors of whole models make, and the right spans."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.expand import Expander, Span
from jaxllm.media.processors import ImageProcessor
from jaxllm.media.rules import find_rule
from jaxllm.media.shapes import ItemShape
from jaxllm.media.video_processor import VideoProcessor
from tests.media.support import every_third, golden, tokenizer

CASES = golden("prompts.json")
QWEN = {"model_type": "qwen2_vl", "vision_config": {"spatial_merge_size": 2}}
GEMMA3 = {"model_type": "gemma3", "mm_tokens_per_image": 3, "vision_config": {"patch_size": 14}}
PIXTRAL = {"model_type": "mistral3", "spatial_merge_size": 2, "vision_config": {"model_type": "pixtral"}}
SQUARE = ItemShape("image", ((1, 4, 4),), (56, 56))


def shapes_of(case: dict[str, Any]) -> list[ItemShape]:
    if "video" in case:
        num_frames, height, width = case["video"]
        times = replace(every_third(num_frames), fps=case["fps"], duration=case["duration"])
        shape = VideoProcessor(case["settings"], case["config"]).shape((height, width), times)
        assert shape.grids == (tuple(case["grid"]),)
        return [shape]
    images = ImageProcessor(case["settings"], case["config"])
    return [images.shape(tuple(size), case["options"]) for size in case["sizes"]]


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{number}-{case['config']['model_type']}" for number, case in enumerate(CASES)]
)
def test_ids_are_those_of_the_models_processors(case: dict[str, Any]):
    expander = Expander(case["config"], tokenizer())
    shapes = shapes_of(case)
    expanded = expander.expand_text(case["text"], shapes)
    assert expanded.ids == case["ids"]
    check_spans(expander, expanded.ids, expanded.spans, shapes)
    (ids,) = tokenizer().encode([case["text"]])
    assert expander.expand_ids(ids, shapes) == expanded


def check_spans(expander: Expander, ids: list[int], spans: tuple[Span, ...], shapes: list[ItemShape]) -> None:
    """Spans cover each token of a row once, in order, and each item's rows from the first."""
    rows = {tokenizer().id(token) for token in expander.rule.rows.values()}
    covered = [position for span in spans for position in range(span.offset, span.offset + span.num_rows)]
    assert covered == [position for position, token_id in enumerate(ids) if token_id in rows]
    for item in range(len(shapes)):
        parts = [span for span in spans if span.item == item]
        assert parts
        assert parts[0].first_row == 0
        assert all(after.first_row == before.first_row + before.num_rows for before, after in pairwise(parts))


def test_pixtrals_lines_are_spans():
    shape = ItemShape("image", ((1, 4, 6),), (56, 84))
    expanded = Expander(PIXTRAL, tokenizer()).expand_text("a[IMG]", [shape])
    assert expanded.spans == (Span(1, 3, 0, 0), Span(5, 3, 0, 3))


def test_items_follow_the_placeholders_of_their_modality():
    video = ItemShape("video", ((2, 2, 2),), (28, 28))
    expanded = Expander(QWEN, tokenizer()).expand_text(
        "<|image_pad|>.<|video_pad|>.<|image_pad|>", [video, SQUARE, ItemShape("image", ((1, 2, 2),), (28, 28))]
    )
    assert expanded.spans == (Span(0, 4, 1, 0), Span(5, 2, 0, 0), Span(8, 1, 2, 0))


def test_the_numbers_of_placeholders_and_items_must_agree():
    expander = Expander(QWEN, tokenizer())
    for text in ("none", "<|image_pad|><|image_pad|>"):
        number = text.count("pad")
        with pytest.raises(VLLMValidationError, match=rf"{number} placeholders .*<\|image_pad\|>.* has 1"):
            expander.expand_text(text, [SQUARE])
        with pytest.raises(VLLMValidationError, match=f"{number} placeholders"):
            expander.expand_ids(tokenizer().encode([text])[0], [SQUARE])
    with pytest.raises(VLLMValidationError, match="takes no videos"):
        Expander(GEMMA3, tokenizer()).expand_text("text", [ItemShape("video", ((1, 2, 2),), (28, 28))])


def test_tokens_of_rows_elsewhere_in_a_prompt_are_refused():
    expander = Expander(GEMMA3, tokenizer())
    text = "<start_of_image> and <image_soft_token>"
    with pytest.raises(VLLMValidationError, match="image_soft_token"):
        expander.expand_text(text, [SQUARE])
    with pytest.raises(VLLMValidationError, match="image_soft_token"):
        expander.expand_ids(tokenizer().encode([text])[0], [SQUARE])


def test_special_tokens_are_added_only_if_asked_for():
    expander = Expander(QWEN, tokenizer())
    calls: list[bool] = []

    class Recorder:
        def encode(self, texts, *, add_special_tokens=True):
            calls.append(add_special_tokens)
            return tokenizer().encode(texts, add_special_tokens=add_special_tokens)

    expander = Expander(QWEN, Recorder())
    expander.expand_text("<|image_pad|>", [SQUARE])
    expander.expand_text("<|image_pad|>", [SQUARE], add_special_tokens=False)
    assert calls.count(True) == 1


def test_a_tokenizer_without_the_token_is_refused():
    class Letters:
        def encode(self, texts, *, add_special_tokens=True):
            return [list(map(ord, text)) for text in texts]

    with pytest.raises(VLLMValidationError, match="has no token"):
        Expander(QWEN, Letters()).expand_text("<|image_pad|>", [SQUARE])


def test_a_tokenizer_without_the_token_of_videos_takes_images():
    class Refuses:
        def encode(self, texts, *, add_special_tokens=True):
            encoded = tokenizer().encode(texts, add_special_tokens=add_special_tokens)
            return [[0, 0] if text == "<|video|>" else ids for text, ids in zip(texts, encoded, strict=True)]

    config = {"model_type": "gemma4", "vision_config": {"pooling_kernel_size": 2}}
    expander = Expander(config, Refuses())
    assert expander.expand_text("<|image|>", [SQUARE]).spans == (Span(1, 4, 0, 0),)
    with pytest.raises(VLLMValidationError, match=r"no token '<\|video\|>', which the model's videos need"):
        expander.expand_text("<|video|>", [ItemShape("video", ((1, 4, 4),), (56, 56), timestamps=(0.0,))])


@pytest.mark.parametrize(
    ("count", "words"),
    [(1, "one"), (13, "thirteen"), (20, "twenty"), (45, "forty-five"), (100, "one hundred"), (768, None)],
)
def test_smolvlm_counts_frames_in_words(count: int, words: str | None):
    config = {"model_type": "smolvlm", "vision_config": {"patch_size": 14, "image_size": 56}}
    times = tuple(60.0 * number for number in range(count))
    shape = ItemShape("video", ((count, 4, 4),), (56, 56), timestamps=times, duration=100_000.0)
    pieces = find_rule(config).pieces(shape)
    words = words or "seven hundred and sixty-eight"
    assert str(pieces[0]).startswith(f"You are provided the following series of {words} frames from a 1 day, 3:46:40 ")
    assert str(pieces[-3]).endswith(f"\nFrame from {count - 1:02d}:00:<fake_token_around_image><global-img>")


def test_models_without_images_are_refused():
    with pytest.raises(VLLMValidationError, match="'llama' take text alone"):
        find_rule({"model_type": "llama"})


def test_pixtral_in_llavas_form_has_pixtrals_rule():
    assert (
        find_rule({"model_type": "llava", "vision_config": {"model_type": "pixtral"}}).placeholders["image"] == "[IMG]"
    )
