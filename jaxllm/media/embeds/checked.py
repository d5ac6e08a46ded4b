"""Check computed embeddings of images and videos: the rows that a tower would make, which come in its place."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from jaxllm.media.embeds.tensors import read_tensor
from jaxllm.media.errors import MediaError
from jaxllm.media.items import Embeds, Modality, refusal
from jaxllm.media.rules import Rule
from jaxllm.media.shapes import Grid, ItemShape
from jaxllm.media.sources import is_array
from jaxllm.params.checks import has_length

_DETAILS: Mapping[Modality, tuple[str, ...]] = {
    "image": ("image_grid_thw", "image_sizes"),
    "video": ("video_grid_thw", "second_per_grid_ts", "timestamps"),
}
"""What a user may tell of an item."""
_MAX_SIDE = 2**16
"""The most patches on an axis of a grid, and pixels on a side of a picture."""
_MAX_SECONDS = 1e6
"""The last second of a video."""
_MAX_INTERVAL = 3600.0
"""The most seconds between two steps in time."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckedEmbeds:
    """The embeddings of one item, and what the user tells of it."""

    rows_rw: np.ndarray
    """float32, finite."""
    grid: Grid | None = None
    size: tuple[int, int] | None = None
    """The (height, width) of the picture in pixels."""
    timestamps: tuple[float, ...] | None = None
    """For a video: the second at which each step in time of its grid begins."""
    seconds_per_step: float | None = None
    """For a video: the seconds between two steps in time of its grid."""


def split_embeds(embeds: Embeds, modality: Modality, label: str) -> list[Embeds]:
    """Return the single items of embeddings that may be of several.

    Their rows are one array [r, w], an array [n, r, w], or a list of arrays; a grid, a size and times are those of all
    items, in lists or arrays. Raises VLLMValidationError, naming `label`, for rows that cannot be divided so.
    """
    try:
        parts = _split_rows(embeds.rows, embeds.details.get(f"{modality}_grid_thw"))
        details = {name: _split_detail(name, value, len(parts)) for name, value in embeds.details.items()}
    except MediaError as error:
        raise refusal(label, str(error).removesuffix("."), embeds.rows) from error
    return [Embeds(part, {name: values[i] for name, values in details.items()}) for i, part in enumerate(parts)]


def read_embeds(embeds: Embeds, modality: Modality, row_size: int, most_rows: int) -> CheckedEmbeds:
    """Return the embeddings of one item, at most `most_rows` rows of `row_size` numbers.

    Raises MediaError for rows of another shape, of another type than floats, or that are not finite, and for details
    that do not exist or have no sense.
    """
    for name in embeds.details:
        if name not in _DETAILS[modality]:
            known = ", ".join(_DETAILS[modality])
            raise MediaError(f"{name!r} is not known beside {modality}_embeds: there may be {known}.")
    details = {name: to_array(value, name) for name, value in embeds.details.items() if value is not None}
    grid, size = details.get(f"{modality}_grid_thw"), details.get("image_sizes")
    interval, seconds = details.get("second_per_grid_ts"), details.get("timestamps")
    t, h, w = (None, None, None) if grid is None else _integers(grid, f"{modality}_grid_thw", 3)
    height, width = (None, None) if size is None else _integers(size, "image_sizes", 2)
    return CheckedEmbeds(
        _read_rows(embeds.rows, row_size, most_rows),
        None if t is None or h is None or w is None else (t, h, w),
        None if height is None or width is None else (height, width),
        None if seconds is None else _seconds(seconds, "timestamps", _MAX_SECONDS),
        None if interval is None else _seconds(interval, "second_per_grid_ts", _MAX_INTERVAL, 1)[0],
    )


def embeds_shape(
    embeds: CheckedEmbeds,
    modality: Modality,
    rule: Rule,
    merge: int | None,
    shape_of: Callable[[tuple[int, int]], ItemShape],
) -> ItemShape:
    """Return the shape of an item of embeddings.

    Where positions lie in grids, whose squares of `merge` patches on a side are rows, it has a grid. In other models
    it is that of a picture, which `shape_of` returns for a size in pixels, or the number of rows suffices. Raises
    MediaError for details that are missing, or of another kind of model, and for another number of rows.
    """
    num_rows, grid_name = len(embeds.rows_rw), f"{modality}_grid_thw"
    if merge is not None:
        shape = _grid_shape(embeds, modality, rule, merge)
    elif modality == "video":
        raise MediaError("this model takes no computed embeddings of videos: send the video, or images.")
    elif embeds.grid is not None:
        raise MediaError(f"{grid_name} is of no use to this model: leave it out, or give image_sizes.")
    elif embeds.size is not None:
        shape = shape_of(embeds.size)
    elif rule.of_rows is not None:
        shape = ItemShape(modality, (), (0, 0), num_rows=num_rows)
    else:
        raise MediaError("the embeddings need image_sizes, the (height, width) of the picture in pixels.")
    if (expected := rule.count_rows(shape)) != num_rows:
        raise MediaError(f"the embeddings have {num_rows} rows, and what they stand for takes {expected}.")
    return shape


def _grid_shape(embeds: CheckedEmbeds, modality: Modality, rule: Rule, merge: int) -> ItemShape:
    if embeds.grid is None or embeds.size is not None:
        message = f"the embeddings need {modality}_grid_thw, the patches in time, height and width, and no sizes."
        raise MediaError(message)
    t, h, w = embeds.grid
    if h % merge or w % merge or (modality == "image" and t != 1):
        message = f"{modality}_grid_thw is {[t, h, w]}: {merge} must divide the sides, and an image has t = 1."
        raise MediaError(message)
    _check_times(embeds, rule, t if modality == "video" else 0)
    interval = 1.0 if embeds.seconds_per_step is None else embeds.seconds_per_step
    return ItemShape(modality, (embeds.grid,), (0, 0), timestamps=embeds.timestamps or (), seconds_per_step=interval)


def _check_times(embeds: CheckedEmbeds, rule: Rule, num_steps: int) -> None:
    """Raise MediaError unless a video of `num_steps` steps in time, or an image of none, has the times that count."""
    seconds = embeds.timestamps or ()
    if embeds.timestamps is not None and not rule.has_timestamps:
        raise MediaError("timestamps are of no use to this model: leave them out.")
    if embeds.seconds_per_step is not None and not rule.has_intervals:
        raise MediaError("second_per_grid_ts is of no use to this model: leave it out.")
    if rule.has_timestamps and len(seconds) != num_steps:
        raise MediaError(f"the embeddings need timestamps: the second of each of the {num_steps} steps in time.")
    if any(later < earlier for earlier, later in pairwise(seconds)):
        raise MediaError("the timestamps must ascend.")


def _split_rows(rows: Any, grids: Any) -> list[Any]:
    """Return the rows of each item, divided by the patches of its grid where they are one array."""
    if isinstance(rows, (list, tuple)) or getattr(rows, "ndim", 0) == 3:
        return list(rows)
    if not is_array(rows) or grids is None or (grids_n3 := to_array(grids, "the grids")).ndim != 2:
        return [rows]
    if grids_n3.dtype.kind not in "iu" or grids_n3.min(initial=1) < 1:
        raise MediaError("the grids of embeddings must be integers from 1.")
    ends = np.cumsum(grids_n3.prod(axis=1, dtype=np.float64))
    ends *= len(rows) / ends[-1:]
    if (ends != np.floor(ends)).any():
        raise MediaError(f"{len(rows)} rows of embeddings cannot be divided among {len(grids_n3)} grids.")
    places = ends.astype(int).tolist()
    return [rows[start:end] for start, end in pairwise([0, *places])]


def _split_detail(name: str, value: Any, count: int) -> list[Any]:
    """Return what is told of each of the items; what is told of one may lack the axis of items."""
    is_list = has_length(value) and not isinstance(value, str)
    if value is None or (count == 1 and not (is_list and len(value) == 1)):
        return [value] * count
    if not is_list or len(value) != count:
        raise MediaError(f"{name!r} must have an entry for each of the {count} items of embeddings.")
    return list(value)


def _read_rows(value: Any, row_size: int, most_rows: int) -> np.ndarray:
    if not isinstance(value, str) and not is_array(value):
        raise MediaError(f"the embeddings must be an array, or one in base64, not {type(value).__name__}.")
    return check_rows(to_array(value, "the embeddings"), row_size, most_rows)


def check_rows(array: np.ndarray, row_size: int, most_rows: int) -> np.ndarray:
    """Return rows as float32 [r, row_size]. Raises MediaError for other types and shapes than floats [r, row_size] or
    [1, r, row_size], for more than `most_rows`, and for numbers that are not finite.
    """
    if not (np.issubdtype(array.dtype, np.floating) or array.dtype.name == "bfloat16"):
        raise MediaError(f"the embeddings must be floats, not {array.dtype}.")
    if array.ndim == 3 and len(array) == 1:
        array = array[0]
    if array.ndim != 2 or array.shape[1] != row_size or not len(array):
        raise MediaError(f"the embeddings must have the shape [rows, {row_size}], got {list(array.shape)}.")
    if len(array) > most_rows:
        raise MediaError(f"the embeddings have {len(array)} rows, and there may be {most_rows} at most.")
    with np.errstate(over="ignore"):
        rows_rw = np.ascontiguousarray(array, np.float32)
    if not np.isfinite(rows_rw).all():
        raise MediaError("the embeddings have values that are no finite numbers.")
    return rows_rw


def to_array(value: Any, name: str) -> np.ndarray:
    """Return an array, a list of numbers, or an array in base64 as an array. Raises MediaError if that cannot be."""
    if isinstance(value, str):
        try:
            return read_tensor(base64.b64decode(value, validate=True))
        except (binascii.Error, ValueError) as error:
            if isinstance(error, MediaError):
                raise
            raise MediaError(f"{name}: not base64.") from error
    try:
        # NumPy has no bfloat16, in which torch's tensors may be.
        is_bfloat16 = str(getattr(value, "dtype", "")) == "torch.bfloat16"
        return np.asarray(value.float() if is_bfloat16 else value)
    except Exception as error:  # of whatever library the value is
        raise MediaError(f"{name}: no dense array in the host's memory.") from error


def _integers(array: np.ndarray, name: str, count: int) -> tuple[int, ...]:
    """Return whole numbers, those of one item."""
    numbers = array.ravel().tolist() if array.ndim in (1, 2) and array.dtype.kind in "iuf" else []
    if len(numbers) != count or not all(1 <= number <= _MAX_SIDE and number == int(number) for number in numbers):
        raise MediaError(f"{name} must have {count} integers from 1 to {_MAX_SIDE} for each item.")
    return tuple(int(number) for number in numbers)


def _seconds(array: np.ndarray, name: str, most: float, count: int | None = None) -> tuple[float, ...]:
    """Return seconds, those of one item."""
    numbers = array.ravel().tolist() if array.ndim <= 2 and array.dtype.kind in "iuf" else []
    if len(numbers) != (count or len(numbers)) or not all(0 <= number <= most for number in numbers):
        raise MediaError(f"{name} must have seconds from 0 to {most:,.0f}.")
    return tuple(float(number) for number in numbers)
