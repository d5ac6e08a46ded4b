"""The inputs of a vision tower, made on the host from the patches of images and frames."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from .settings import Grid, SoundSettings, Tiling, TowerSettings
from .sounds import check_clip, count_clip_rows
from .tiling import NEWLINE, Arrangement, arrange, arrange_frames, arrange_whole

if TYPE_CHECKING:
    from jax import Array


class PatchBatch(NamedTuple):
    """The patches of one item, or of several, in a fixed number of slots p; class tokens have slots too.

    Slots from `num_slots` on, and rows from `num_rows` on, are padding. A slot attends to the slots from its start up
    to its end, which are 0 in padding.
    """

    patches_pc: np.ndarray | Array
    """Flattened patches, of any float dtype."""
    coordinates_p2: np.ndarray | Array
    """Each patch's row and column in its grid, int32; of a frame of sound 0 and its number, or in a conformer the
    number of its columns that are heard, and its own. Those of class tokens are -1."""
    places_pk: np.ndarray | Array
    """The learned positions of each slot, int32; k is 0, 1, 2 if rows and columns have some, or 4 or
    16 if they are interpolated."""
    weights_pk: np.ndarray | Array
    """The factors on these positions, float32."""
    starts_ap: np.ndarray | Array
    """The start of each slot's attention, int32: in layers with global attention, and then in those with windows if
    the tower has windows."""
    ends_ap: np.ndarray | Array
    rows_rg: np.ndarray | Array
    """The slots of the g patches of each row, int32, r = p // g. p stands for zeros in the place of a patch."""
    places_qk: np.ndarray | Array
    """The rows, r being the learned one, that are summed to each final row of an image in tiles, int32. k is 4; in
    other towers it is 0, and the rows are final."""
    row_weights_qk: np.ndarray | Array
    """The factors on these rows, float32."""
    num_slots: np.int32 | Array
    num_rows: np.int32 | Array


def count_rows(settings: TowerSettings, grids: Sequence[Grid]) -> int:
    """Return the number of rows of an item's grids; ValueError for a grid that does not hold whole squares."""
    for grid in grids:
        _check(settings, grid)
    return sum(t * h * w for t, h, w in grids) // settings.group


def count_final_rows(
    settings: TowerSettings, grids: Sequence[Grid], size: tuple[int, int], *, is_video: bool = False
) -> int:
    """Return the number of rows that tokens take of an item; the arguments and errors are those of `make_batch`."""
    if settings.sound is not None:
        return count_clip_rows(settings.sound, grids, size)
    num_rows = count_rows(settings, grids)
    if settings.tiling is None:
        return num_rows
    return len(_arrangement(settings, settings.tiling, grids, size, is_video=is_video).places_qk)


def count_outputs(settings: TowerSettings, num_slots: int) -> int:
    """Return the number of final rows, with those of padding, that a batch of `num_slots` gives."""
    # Each line of an image in tiles has one more row, and takes `side` patches at least before its padding goes.
    num_rows = _most_rows(settings, num_slots)
    return num_rows if settings.tiling is None else num_rows + num_slots // settings.side


def _most_rows(settings: TowerSettings, num_slots: int) -> int:
    """Return the most rows that the projector gives."""
    fills = settings.sound is not None and settings.sound.ends_in_zeros
    return math.ceil(num_slots / settings.group) if fills else num_slots // settings.group


def count_slots(settings: TowerSettings, grids: Sequence[Grid]) -> int:
    """Return the number of slots that an item's grids take: those of patches and of class tokens."""
    return sum(t * (h * w + settings.has_class_token) for t, h, w in grids)


def empty_batch(settings: TowerSettings, num_slots: int, dtype: DTypeLike = np.float32) -> PatchBatch:
    """Return a batch of padding alone; its arrays have the shapes and dtypes of all batches of `num_slots`."""
    num_places = {None: 0, "bilinear": 4, "bicubic": 16, "axial": 2}.get(settings.positions, 1)
    num_kinds = 1 if settings.window is None else 2
    num_outputs, num_terms = count_outputs(settings, num_slots), 0 if settings.tiling is None else 4
    return PatchBatch(
        patches_pc=np.zeros((num_slots, settings.patch_dim), dtype),
        coordinates_p2=np.zeros((num_slots, 2), np.int32),
        places_pk=np.zeros((num_slots, num_places), np.int32),
        weights_pk=np.zeros((num_slots, num_places), np.float32),
        starts_ap=np.zeros((num_kinds, num_slots), np.int32),
        ends_ap=np.zeros((num_kinds, num_slots), np.int32),
        rows_rg=np.zeros((_most_rows(settings, num_slots), settings.group), np.int32),
        places_qk=np.zeros((num_outputs, num_terms), np.int32),
        row_weights_qk=np.zeros((num_outputs, num_terms), np.float32),
        num_slots=np.int32(0),
        num_rows=np.int32(0),
    )


def make_batch(
    settings: TowerSettings,
    grids: Sequence[Grid],
    patches_nc: np.ndarray,
    num_slots: int | None = None,
    *,
    size: tuple[int, int] = (0, 0),
    is_video: bool = False,
) -> PatchBatch:
    """Return the inputs for an item's grids in `num_slots` slots, by default as few as they need.

    `patches_nc` are the flattened patches of all grids, in the image processor's order. A row depends on the patches
    of its own grid alone. In a tower with tiling, the grids are those of one image, of a `size` in pixels, or of one
    video. In a tower that hears there is one grid, that of a clip, and `size` is 1 and the number of its samples.
    ValueError for grids that do not fit the patches, the slots or the tower.
    """
    num_rows, needed = count_rows(settings, grids), count_slots(settings, grids)
    num_slots = needed if num_slots is None else num_slots
    num_patches = sum(t * h * w for t, h, w in grids)
    if patches_nc.shape != (num_patches, settings.patch_dim) or needed > num_slots:
        raise ValueError(f"patches {patches_nc.shape} do not fit grids {grids} and {num_slots} slots")
    batch = empty_batch(settings, num_slots, patches_nc.dtype)
    if settings.sound is not None:
        return _write_clip(settings.sound, batch, patches_nc, size)
    slot = patch = row = 0
    for grid in grids:
        frame = _Frame(settings, grid)
        for _ in range(grid.t):
            frame.write(batch, slot, row, patches_nc[patch : patch + frame.num_patches])
            slot, patch, row = slot + frame.num_slots, patch + frame.num_patches, row + frame.num_rows
    if settings.tiling is not None:
        _write_arrangement(batch, _arrangement(settings, settings.tiling, grids, size, is_video=is_video))
    return batch._replace(num_slots=np.int32(needed), num_rows=np.int32(num_rows))


def _write_clip(settings: SoundSettings, batch: PatchBatch, frames_nc: np.ndarray, size: tuple[int, int]) -> PatchBatch:
    """Return a batch of padding with the frames of a clip in it; ValueError if these are too few or too many."""
    number, num_rows = len(frames_nc), settings.count_rows(size[1])
    check_clip(settings, Grid(1, 1, number), size[1])
    heard = number if settings.hears_silence else settings.count_heard(size[1])
    batch.patches_pc[:number] = frames_nc
    batch.coordinates_p2[:number, 1] = np.arange(number)
    if settings.hears_whole:
        columns_f = settings.count_columns(size[1]) - settings.columns * np.arange(number)
        batch.coordinates_p2[:number, 0] = np.clip(columns_f, 0, settings.columns)
    if batch.places_pk.shape[1]:
        batch.places_pk[:number, 0], batch.weights_pk[:number] = np.arange(number), 1
    # What follows is of use to the convolutions alone.
    assert isinstance(batch.starts_ap, np.ndarray)
    starts_h = np.arange(heard) // (settings.window or settings.num_frames) * (settings.window or 0)
    batch.starts_ap[:, :heard] = starts_h
    batch.ends_ap[:, :heard] = np.minimum(starts_h + (settings.window or heard), heard)
    frames_f = np.arange(num_rows * settings.group)
    if settings.ends_in_zeros:
        frames_f[heard:] = len(batch.patches_pc)
    batch.rows_rg[:num_rows] = frames_f.reshape(num_rows, -1)
    return batch._replace(num_slots=np.int32(number), num_rows=np.int32(num_rows))


def _arrangement(
    settings: TowerSettings, tiling: Tiling, grids: Sequence[Grid], size: tuple[int, int], *, is_video: bool
) -> Arrangement:
    """Return the final rows of an item in a tower with tiling; ValueError for grids that it does not have."""
    if tiling.splits_alone and len(grids) == 1:
        return arrange_frames(settings.side, grids[0].t) if is_video else arrange_whole(settings.side)
    lines, columns = tiling.layout(size)
    if is_video or len(grids) != 1 + lines * columns:
        raise ValueError(f"an image of {size} pixels has {1 + lines * columns} tiles, not {len(grids)}")
    return arrange(tiling, settings.side, size)


def _write_arrangement(batch: PatchBatch, arrangement: Arrangement) -> None:
    """Write the final rows of an image in tiles."""
    places_qk, weights_qk = arrangement
    batch.places_qk[: len(places_qk)] = np.where(places_qk == NEWLINE, len(batch.rows_rg), places_qk)
    batch.row_weights_qk[: len(weights_qk)] = weights_qk


class _Frame:
    """The arrays of one frame of a grid, with slots and rows counted from 0."""

    def __init__(self, settings: TowerSettings, grid: Grid) -> None:
        _, h, w = grid
        m, self.class_position = settings.merge, settings.class_position
        self.num_patches, self.num_rows = h * w, h * w // settings.group
        self.num_slots = self.num_patches + settings.has_class_token
        raster_hw = np.arange(h * w).reshape(h, w)
        blocks_rg = raster_hw.reshape(h // m, m, w // m, m).swapaxes(1, 2).reshape(-1, settings.group)
        raster_n = (blocks_rg if settings.is_blocked else raster_hw).ravel()
        windows_n, side = np.zeros(h * w, np.int32), settings.window
        if side is not None:
            rows_n, columns_n = np.divmod(raster_n, w)
            windows_n = rows_n // side * -(-w // side) + columns_n // side
        self.order_n = np.argsort(windows_n, kind="stable")
        raster_n, windows_n = raster_n[self.order_n], windows_n[self.order_n]
        slot_of = np.empty(h * w, np.int32)
        slot_of[raster_n] = np.arange(h * w)
        self.rows_rg = slot_of[blocks_rg]
        self.coordinates_n2 = np.stack(np.divmod(raster_n, w), axis=1)
        self.places_nk, self.weights_nk = _places(settings, h, w, self.coordinates_n2)
        bounds = [(np.zeros(self.num_slots, np.intp), np.full(self.num_slots, self.num_slots))]
        if side is not None:
            bounds.append(
                (np.searchsorted(windows_n, windows_n, "left"), np.searchsorted(windows_n, windows_n, "right"))
            )
        self.starts_as, self.ends_as = (np.stack(arrays) for arrays in zip(*bounds, strict=True))

    def write(self, batch: PatchBatch, slot: int, row: int, patches_nc: np.ndarray) -> None:
        """Write the frame with these patches into a batch, from a slot and a row on."""
        slots, patches = slice(slot, slot + self.num_slots), slice(slot, slot + self.num_patches)
        for array, values in (
            (batch.patches_pc, patches_nc[self.order_n]),
            (batch.coordinates_p2, self.coordinates_n2),
            (batch.places_pk, self.places_nk),
            (batch.weights_pk, self.weights_nk),
        ):
            array[patches] = values
        assert isinstance(batch.starts_ap, np.ndarray)
        if self.class_position is not None:
            class_slot = slot + self.num_patches
            batch.coordinates_p2[class_slot] = -1
            batch.places_pk[class_slot], batch.weights_pk[class_slot] = self.class_position, 1
        batch.starts_ap[:, slots] = slot + self.starts_as
        batch.ends_ap[:, slots] = slot + self.ends_as
        batch.rows_rg[row : row + self.num_rows] = slot + self.rows_rg


def _check(settings: TowerSettings, grid: Grid) -> None:
    merge, exact = settings.merge, settings.positions == "exact"
    if min(grid) < 1 or grid.h % merge or grid.w % merge:
        raise ValueError(f"{grid} does not hold whole squares of {merge} x {merge} patches")
    if exact and (grid.h, grid.w) != (settings.side, settings.side):
        raise ValueError(f"{grid} is not a square of {settings.side} patches, the only size that this model takes")
    if settings.positions == "axial" and max(grid.h, grid.w) > settings.side:
        raise ValueError(f"{grid} has more than {settings.side} rows or columns, for which there are learned positions")


def _places(settings: TowerSettings, h: int, w: int, coordinates_n2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the learned positions of patches and their factors, [n, k] each."""
    rows_n, columns_n = coordinates_n2.T
    side = settings.side
    if settings.positions is None:
        return np.zeros((len(rows_n), 0), np.int32), np.zeros((len(rows_n), 0), np.float32)
    if settings.positions in ("bilinear", "bicubic"):
        taps = _taps if settings.positions == "bilinear" else _cubic_taps
        (row_places, row_weights), (column_places, column_weights) = taps(h, side), taps(w, side)
        places = row_places[rows_n][:, :, None] * side + column_places[columns_n][:, None, :]
        weights = row_weights[rows_n][:, :, None] * column_weights[columns_n][:, None, :]
        return places.reshape(len(rows_n), -1), weights.reshape(len(rows_n), -1)
    if settings.positions == "axial":
        places_n2 = np.stack((columns_n, side + rows_n), axis=1)
        return places_n2, np.ones(places_n2.shape, np.float32)
    if settings.positions == "nearest":
        rows_n, columns_n = _nearest(h, side)[rows_n], _nearest(w, side)[columns_n]
    places_n1 = (rows_n * side + columns_n)[:, None] + (settings.class_position == 0)
    return places_n1, np.ones(places_n1.shape, np.float32)


def _taps(size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the two learned positions around each of `size` places along an axis, and their factors, [size, 2].

    The first and the last place take the first and the last position. Computed in float32, as in HF.
    """
    exact_n = np.arange(size, dtype=np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    below_n1 = np.floor(exact_n)[:, None]
    taps_n2 = below_n1 + np.arange(2, dtype=np.float32)
    weights_n2 = np.maximum(1 - np.abs(exact_n[:, None] - taps_n2), 0)
    return np.clip(taps_n2, 0, side - 1).astype(np.int32), weights_n2


def _cubic_taps(size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the four learned positions around each of `size` places along an axis, and their factors, [size, 4].

    Places and positions are the middles of equal parts of the axis. Computed in float32, as in HF.
    """
    middles_n = (np.arange(size, dtype=np.float32) + np.float32(0.5)) / np.float32(size) * 2 - 1
    exact_n1 = (((middles_n + 1) * side - 1) / 2)[:, None]
    taps_n4 = np.floor(exact_n1) + np.arange(-1, 3, dtype=np.float32)
    far_n4 = np.abs(exact_n1 - taps_n4)
    near = (1.25 * far_n4 - 2.25) * far_n4 * far_n4 + 1
    weights_n4 = np.where(far_n4 <= 1, near, ((-0.75 * far_n4 + 3.75) * far_n4 - 6) * far_n4 + 3)
    return np.clip(taps_n4, 0, side - 1).astype(np.int32), weights_n4.astype(np.float32)


def _nearest(size: int, side: int) -> np.ndarray:
    """Return the learned position of each of `size` places along an axis, [size].

    The places are fractions of the axis, rounded as in HF, which decides where a fraction equals a bound.
    """
    step = 1 / side
    bounds = (step + step * np.arange(math.ceil((1 - step) / step))).astype(np.float32)
    fractions_n = np.arange(size, dtype=np.float32) * (np.float32(1) / np.float32(size))
    return np.searchsorted(bounds, np.minimum(fractions_n, np.float32(1 - 1e-6)), side="right")
