"""Computed embeddings come in the place of items, and are checked before anything of them reaches the core."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from functools import cache
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.errors import MediaError
from jaxllm.media.items import Embeds, MediaPart, MediaSettings
from jaxllm.media.prompt_data import read_prompt_data
from jaxllm.media.reader import MediaReader
from jaxllm.media.rules import find_rule
from tests.media.support import golden, tokenizer

WIDTH = 6
MOST_ROWS = 40
GRID = (1, 4, 6)
"""Six rows of 2 x 2 patches."""
ROWS_RW = np.linspace(-1, 1, 6 * WIDTH, dtype=np.float32).reshape(6, WIDTH)
MERGED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")


@cache
def reader(family: str, *, has_videos: bool = False) -> MediaReader:
    image_processor, config, _ = golden("families.json")[family.replace("2_5", "2")]
    if family == "qwen2_5_vl":
        config = {**config, "vision_config": {**config["vision_config"], "tokens_per_second": 2}}
    rule = find_rule({"model_type": family, **config})
    settings = MediaSettings(
        image_placeholder=rule.placeholders["image"],
        video_placeholder=rule.placeholders.get("video") if has_videos else None,
        image_processor=image_processor,
        config={"model_type": family, **config},
        enable_mm_embeds=True,
        row_size=WIDTH,
        most_rows=MOST_ROWS,
        rope_merge=2 if family in MERGED else None,
    )
    return MediaReader(settings, tokenizer())


def embeds(rows: Any = ROWS_RW, **details: Any) -> Embeds:
    return Embeds(rows, details)


def part(source: Embeds | None, uuid: str | None = None, modality: Any = "image") -> MediaPart:
    return MediaPart(modality, source, uuid, "messages[0]['content'][1]")


def read(family: str, source: Embeds | None, uuid: str | None = None) -> Any:
    """Return the item that embeddings become, and the tokens of the prompt."""
    made = reader(family)
    ids, media = made.read(made._expander.rule.placeholders["image"], [part(source, uuid)])
    [item] = media.items
    return item, ids


def text_of(array: Any) -> str:
    stream = io.BytesIO()
    np.save(stream, array)
    return base64.b64encode(stream.getvalue()).decode()


@pytest.mark.parametrize(
    "source",
    [
        embeds(image_grid_thw=GRID),
        embeds(image_grid_thw=np.array([GRID])),
        embeds(ROWS_RW[None], image_grid_thw=GRID),
        embeds(ROWS_RW.astype(np.float64), image_grid_thw=GRID),
        embeds(text_of(ROWS_RW), image_grid_thw=text_of(np.array(GRID))),
        embeds(text_of(ROWS_RW), image_grid_thw=list(GRID), image_sizes=None),
    ],
)
def test_each_form_is_the_same_item(source: Embeds) -> None:
    item, ids = read("qwen2_vl", source)
    expected, _ = read("qwen2_vl", embeds(image_grid_thw=GRID))
    assert (item.is_encoded, item.patches, item.grids) == (True, ROWS_RW.tobytes(), [GRID])
    assert (item.key, sum(span.num_rows for span in item.spans), len(ids)) == (expected.key, 6, 6)


def test_bfloat16_and_float16_become_float32() -> None:
    for dtype in (ml_dtypes.bfloat16, np.float16):
        item, _ = read("qwen2_vl", embeds(ROWS_RW.astype(dtype), image_grid_thw=GRID))
        assert item.patches == ROWS_RW.astype(dtype).astype(np.float32).tobytes()


def test_the_key_is_of_the_rows_and_the_grid() -> None:
    other = ROWS_RW.copy()
    other[5, 5] += 1
    sources = [embeds(image_grid_thw=GRID), embeds(other, image_grid_thw=GRID), embeds(image_grid_thw=(1, 6, 4))]
    assert len({read("qwen2_vl", source)[0].key for source in sources}) == 3


@pytest.mark.parametrize("family", ["llava", "llava_next", "llava_onevision", "internvl", "gemma4"])
def test_the_number_of_rows_suffices(family: str) -> None:
    item, ids = read(family, embeds())
    assert sum(span.num_rows for span in item.spans) == 6
    assert len(ids) >= 6


def test_rows_of_a_picture_that_is_a_number_of_tokens() -> None:
    """Gemma 3's images have one number of rows; with crops, they have sizes."""
    made = reader("gemma3")
    rows = next(piece for piece in made._expander.rule.pieces(_rows_alone(1)) if isinstance(piece, int))
    with pytest.raises(MediaError, match=rf"have 6 rows, and what they stand for takes {rows}"):
        read("gemma3", embeds())


def _rows_alone(number: int) -> Any:
    from jaxllm.media.shapes import ItemShape

    return ItemShape("image", (), (0, 0), num_rows=number)


NAN, INFINITE = ROWS_RW.copy(), ROWS_RW.astype(np.float64)
NAN[2, 3], INFINITE[0, 0] = np.nan, 1e300


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (embeds(ROWS_RW[:, :5], image_grid_thw=GRID), r"must have the shape \[rows, 6\], got \[6, 5\]"),
        (embeds(ROWS_RW.ravel(), image_grid_thw=GRID), "must have the shape"),
        (embeds(ROWS_RW[:0], image_grid_thw=GRID), "must have the shape"),
        (embeds(np.stack([ROWS_RW] * 2), image_grid_thw=GRID), "must have the shape"),
        (embeds(ROWS_RW[:5], image_grid_thw=GRID), "have 5 rows, and what they stand for takes 6"),
        (embeds(np.tile(ROWS_RW, (7, 1)), image_grid_thw=(1, 12, 14)), "have 42 rows, and there may be 40 at most"),
        (embeds(NAN, image_grid_thw=GRID), "no finite numbers"),
        (embeds(INFINITE, image_grid_thw=GRID), "no finite numbers"),
        (embeds(ROWS_RW.astype(np.int32), image_grid_thw=GRID), "must be floats, not int32"),
        (embeds(ROWS_RW.astype(np.complex64), image_grid_thw=GRID), "must be floats"),
        (embeds(ROWS_RW.tolist(), image_grid_thw=GRID), "must be an array, or one in base64, not list"),
        (embeds("***", image_grid_thw=GRID), "not base64"),
        (embeds("aaaa", image_grid_thw=GRID), "damaged or of another format"),
        (embeds(golden("tensors.json")["refused"]["coo_outside"], image_grid_thw=GRID), "no dense tensor"),
        (embeds(), "need image_grid_thw"),
        (embeds(image_sizes=(30, 40)), "need image_grid_thw"),
        (embeds(image_grid_thw=(1, 3, 8)), "2 must divide the sides"),
        (embeds(image_grid_thw=(2, 4, 3)), "2 must divide the sides"),
        (embeds(image_grid_thw=(2, 2, 6)), "an image has t = 1"),
        (embeds(image_grid_thw=(1, -4, -6)), "must have 3 integers"),
        (embeds(image_grid_thw=(1, 4, 2**31)), "must have 3 integers"),
        (embeds(image_grid_thw=(1, 4.5, 6)), "must have 3 integers"),
        (embeds(image_grid_thw=(1, np.nan, 6)), "must have 3 integers"),
        (embeds(image_grid_thw=[GRID, GRID]), "must have 3 integers"),
        (embeds(image_grid_thw="a"), "not base64"),
        (embeds(image_grid_thw={}), "must have 3 integers"),
        (embeds(image_grid_thw=GRID, deepstack=1), "'deepstack' is not known beside image_embeds"),
    ],
)
def test_wrong_embeddings_are_refused(source: Embeds, match: str) -> None:
    with pytest.raises(MediaError, match=match) as caught:
        read("qwen2_vl", source)
    assert str(caught.value).startswith("messages[0]['content'][1]: ")
    assert caught.value.parameter == "messages"


def test_details_of_other_models_are_refused() -> None:
    with pytest.raises(MediaError, match="image_grid_thw is of no use to this model"):
        read("llava", embeds(image_grid_thw=GRID))
    with pytest.raises(MediaError, match="need image_sizes"):
        read("smolvlm", embeds())
    with pytest.raises(MediaError, match="have 6 rows, and what they stand for takes"):
        read("smolvlm", embeds(image_sizes=(30, 40)))


def test_a_name_stands_for_embeddings() -> None:
    first, _ = read("qwen2_vl", embeds(image_grid_thw=GRID), "mine")
    again, _ = read("qwen2_vl", None, "mine")
    assert (again.key, again.is_encoded) == (first.key, True)
    assert again.patches is first.patches
    with pytest.raises(MediaError, match="no item is cached under the uuid 'other'"):
        read("qwen2_vl", None, "other")


def test_embeddings_without_a_name_are_not_kept() -> None:
    made = reader("qwen2_vl")
    before = len(made._cache)
    read("qwen2_vl", embeds(ROWS_RW + 3, image_grid_thw=GRID))
    assert len(made._cache) == before


def test_tokens_are_counted_with_those_of_other_items() -> None:
    made = reader("qwen2_vl")
    short = MediaReader(msgspec.structs.replace(made._settings, max_model_len=11), tokenizer())
    mark = made._expander.rule.placeholders["image"]
    assert len(short.read(mark, [part(embeds(image_grid_thw=GRID))])[0]) == 6
    with pytest.raises(MediaError, match="take 12 tokens or more"):
        short.read(mark * 2, [part(embeds(image_grid_thw=GRID))] * 2)


def video(family: str, **details: Any) -> list[int]:
    made = reader(family, has_videos=True)
    rows = np.concatenate([ROWS_RW] * 2)
    source = embeds(rows, video_grid_thw=(2, 4, 6), **details)
    ids, media = made.read(made._expander.rule.placeholders["video"], [part(source, modality="video")])
    assert (media.items[0].modality, media.items[0].is_encoded) == ("video", True)
    return ids


def test_videos() -> None:
    assert len(video("qwen2_vl")) == 12
    assert len(video("qwen2_5_vl", second_per_grid_ts=0.5)) == len(video("qwen2_5_vl")) == 12
    assert len(video("qwen3_vl", timestamps=[0.2, 1.3])) == len(video("qwen3_vl", timestamps=[1.3, 1.3])) > 12
    with pytest.raises(MediaError, match="need timestamps: the second of each of the 2 steps"):
        video("qwen3_vl")
    for wrong in ([1.0], [], [0.0, np.inf], [0, -1], ["a", "b"], [1.3, 0.2]):
        with pytest.raises(MediaError, match="timestamps"):
            video("qwen3_vl", timestamps=wrong)
    with pytest.raises(MediaError, match="takes no computed embeddings of videos"):
        video("internvl")
    with pytest.raises(MediaError, match="second_per_grid_ts must have seconds from 0 to 3,600"):
        video("qwen2_5_vl", second_per_grid_ts=[3601])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "glm4v"])
def test_intervals_of_other_models_are_refused(family: str) -> None:
    details = {} if family == "qwen2_vl" else {"timestamps": [0.2, 1.3]}
    with pytest.raises(MediaError, match="second_per_grid_ts is of no use to this model: leave it out"):
        video(family, second_per_grid_ts=1.0, **details)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_timestamps_of_other_models_are_refused(family: str) -> None:
    for seconds in ([0.2, 1.3], []):
        with pytest.raises(MediaError, match="timestamps are of no use to this model: leave them out"):
            video(family, timestamps=seconds)


def parts(data: Any, uuids: Any = None) -> tuple[MediaPart, ...]:
    return read_prompt_data(data, uuids, "prompts[0]")


def rows_of(several: tuple[MediaPart, ...]) -> list[tuple[int, Mapping[str, Any]]]:
    return [(len(one.source.rows), one.source.details) for one in several if isinstance(one.source, Embeds)]


def test_the_items_of_a_prompt() -> None:
    two = np.stack([ROWS_RW, ROWS_RW])
    assert rows_of(parts({"image": ROWS_RW})) == [(6, {})]
    assert rows_of(parts({"image": two})) == rows_of(parts({"image": [ROWS_RW, ROWS_RW]})) == [(6, {})] * 2
    joined = np.concatenate([ROWS_RW, ROWS_RW[:2]])
    grids = [(1, 4, 6), (1, 2, 4)]
    divided = parts({"image": {"image_embeds": joined, "image_grid_thw": np.array(grids)}}, {"image": ["a", "b"]})
    assert [(number, tuple(details["image_grid_thw"])) for number, details in rows_of(divided)] == list(
        zip((6, 2), grids, strict=True)
    )
    assert [one.uuid for one in divided] == ["a", "b"]
    assert divided[1].label == "prompts[0]['multi_modal_data']['image'][1]"
    single = {"image_embeds": ROWS_RW, "image_grid_thw": GRID}
    assert rows_of(parts({"image": single})) == rows_of(parts({"image": [single]})) == [(6, {"image_grid_thw": GRID})]
    sizes = parts({"image": {"image_embeds": [ROWS_RW, ROWS_RW[:2]], "image_sizes": [(3, 4), (5, 6)]}})
    assert rows_of(sizes) == [(6, {"image_sizes": (3, 4)}), (2, {"image_sizes": (5, 6)})]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (
            {"image_embeds": ROWS_RW, "image_grid_thw": [GRID, (1, 4, 4)]},
            "6 rows of embeddings cannot be divided among 2",
        ),
        ({"image_embeds": ROWS_RW, "image_grid_thw": [GRID, (1, -4, 6)]}, "must be integers from 1"),
        (
            {"image_embeds": [ROWS_RW] * 2, "image_grid_thw": [GRID] * 3},
            "must have an entry for each of the 2 items",
        ),
        ({"image_embeds": [ROWS_RW] * 2, "image_grid_thw": 3}, "'image_grid_thw'"),
    ],
)
def test_data_that_cannot_be_divided(data: Any, match: str) -> None:
    with pytest.raises(VLLMValidationError, match=match) as caught:
        parts({"image": data})
    assert str(caught.value).startswith("prompts[0]['multi_modal_data']['image']: ")


def test_embeddings_need_an_argument_of_the_engine() -> None:
    settings = MediaSettings(image_placeholder="<image>")
    for data in (ROWS_RW, {"image_embeds": ROWS_RW}, np.zeros((4, 4, 3))):
        with pytest.raises(VLLMValidationError, match=r"\['image'\]\[0\]: computed embeddings.* need enable_mm_embeds"):
            settings.check_counts(parts({"image": data}), "multi_modal_data")
