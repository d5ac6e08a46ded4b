"""Encode images, videos and sounds: the program of a tower, and its inputs for an item.

Each item, or clip of a sound, is encoded alone, padded to a bucket of slots, so that its rows do not depend on what
else is encoded. Rows of items that come encoded are written as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxllm.core_messages import MediaItem
from jaxllm.exceptions import VLLMValidationError
from jaxllm.models.towers.layout import (
    PatchBatch,
    count_final_rows,
    count_outputs,
    count_slots,
    empty_batch,
    make_batch,
)
from jaxllm.models.towers.settings import Grid, SoundSettings, TowerSettings
from jaxllm.models.towers.sounds import split_samples
from jaxllm.models.towers.tower import Tower
from jaxllm.scheduling.media import Encode

WRITTEN_ROWS = 256
"""The rows of encoded items that are written at once."""
_LEAST_SLOTS = 256
_FRAME_TILE = 128
"""The frames of a whole clip are padded to a multiple of this, which kernels take."""


class EncoderShape(NamedTuple):
    """The shape that a tower's program is compiled for: slots of patches and class tokens."""

    num_slots: int
    part: str = "encoder"
    """The part of the parameters that holds the tower's."""


def encoder_shapes(
    settings: TowerSettings, num_media_rows: int, num_frames: int, part: str = "encoder"
) -> list[EncoderShape]:
    """Return the shapes of a tower's programs, smallest first: doubled up to what the largest item needs.

    That is an item of `num_media_rows` rows, in a tower with tiling an image or a video of `num_frames`.
    """
    if settings.sound is not None:
        return [EncoderShape(size, part) for size in _clip_sizes(settings.sound)]
    is_fixed = settings.positions == "exact"
    least = count_slots(settings, [Grid(1, settings.side, settings.side)]) if is_fixed else _LEAST_SLOTS
    num_patches = num_media_rows * settings.group
    needed = num_patches + (math.ceil(num_patches / settings.side**2) if settings.has_class_token else 0)
    if settings.tiling is not None:  # whose rows are fewer than patches, where lines are shrunk
        needed = least * max(settings.tiling.most_tiles, num_frames if settings.tiling.splits_alone else 0)
    needed = math.ceil(needed / least) * least
    sizes = [least]
    while sizes[-1] < needed:
        sizes.append(min(2 * sizes[-1], needed))
    return [EncoderShape(size, part) for size in sizes]


def _clip_sizes(sound: SoundSettings) -> list[int]:
    """Return the slots of the programs that encode a clip, doubled up to a whole one."""
    most = math.ceil(sound.num_frames / _FRAME_TILE) * _FRAME_TILE
    if sound.hears_silence:
        return [most]
    return list(dict.fromkeys(min(_LEAST_SLOTS << number, most) for number in range(most.bit_length())))


def batch_spec(tower: Tower, shape: EncoderShape) -> PatchBatch:
    """Return shape and dtype of a tower's inputs."""
    batch = empty_batch(tower.settings, shape.num_slots)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), batch)


def run_encoder(
    params: Any, features_rw: Array, batch: PatchBatch, slots_r: Array, *, tower: Tower, mesh: Mesh | AbstractMesh
) -> Array:
    """Return the feature cache with an item's rows at `slots_r`; padding's slots lie beyond it and are dropped.

    Each device of the mesh has the whole tower and encodes the whole item, as XLA cannot share out kernels.
    """
    everywhere = PartitionSpec()
    # The kernels' outputs do not declare over which mesh axes they vary, which check_vma would need.
    encode = jax.shard_map(
        tower.encode, mesh=mesh, in_specs=(everywhere, everywhere), out_specs=everywhere, check_vma=False
    )
    return features_rw.at[slots_r].set(encode(params, batch).astype(features_rw.dtype), mode="drop")


def write_rows(features_rw: Array, rows_nw: Array, slots_n: Array) -> Array:
    """Return the feature cache with other rows at `slots_n`; those of padding lie beyond it and are dropped."""
    return features_rw.at[slots_n].set(rows_nw.astype(features_rw.dtype), mode="drop")


def check_rows(item: MediaItem, row_size: int, parameter: str) -> None:
    """Raise VLLMValidationError, naming `parameter`, unless an encoded item has rows of `row_size` numbers."""
    num_rows = sum(span.num_rows for span in item.spans)
    if len(item.patches) != 4 * num_rows * row_size:
        message = f"the embeddings are not {num_rows} rows of {row_size} numbers."
        raise VLLMValidationError(message, parameter=parameter)


def check_item(settings: TowerSettings, item: MediaItem, shapes: list[EncoderShape]) -> None:
    """Raise VLLMValidationError for an item that the tower cannot take.

    It is too large, or its checkpoint's files contradict each other. In a step such an item would end all requests.
    """
    if item.is_encoded:
        check_rows(item, settings.output_size, "multi_modal_data")
        return
    try:
        grids = [Grid(*grid) for grid in item.grids]
        num_patches = sum(prod(grid) for grid in grids)
        num_rows = count_final_rows(settings, grids, item.size, is_video=item.modality == "video")
        if len(item.patches) != 4 * num_patches * settings.patch_dim:
            raise ValueError(f"{num_patches} patches do not have {settings.patch_dim} numbers each")
        if num_rows != sum(span.num_rows for span in item.spans):
            raise ValueError(f"{num_patches} patches give {num_rows} rows, and the prompt takes another number")
    except ValueError as error:
        section = "vision_config" if settings.sound is None else "audio_config"
        message = f"the settings of the model's {item.modality} processor do not fit its {section}: {error}."
        raise VLLMValidationError(message, parameter="multi_modal_data") from error
    if settings.sound is not None:  # whose clips are encoded apart
        return
    if (needed := count_slots(settings, grids)) > shapes[-1].num_slots:
        message = f"the {item.modality} has {needed} patches, and the engine takes {shapes[-1].num_slots} at most: "
        message += "send a smaller image or fewer frames, or start it with the num_frames of media_io_kwargs."
        raise VLLMValidationError(message, parameter="multi_modal_data")


class EncoderInputs(NamedTuple):
    """What a tower encodes at once."""

    shape: EncoderShape
    batch: PatchBatch
    slots: np.ndarray
    """The slot of each row in the feature cache, int32; those of padding lie beyond it."""


def encoder_inputs(
    settings: TowerSettings, encode: Encode, shapes: list[EncoderShape], num_media_rows: int
) -> Iterator[EncoderInputs]:
    """Yield the inputs for an item, or for each clip of a sound, in a cache of `num_media_rows`."""
    item = encode.item
    patches_nc = np.frombuffer(item.patches, np.float32).reshape(-1, settings.patch_dim)
    patch = row = 0
    for grids, size in _apart(settings, [Grid(*grid) for grid in item.grids], item.size):
        needed, num_patches = count_slots(settings, grids), sum(map(prod, grids))
        shape = next(shape for shape in shapes if needed <= shape.num_slots)
        some_nc = patches_nc[patch : patch + num_patches]
        is_video = item.modality == "video"
        batch = make_batch(settings, grids, some_nc, shape.num_slots, size=size, is_video=is_video)
        rows = encode.rows[row : row + count_final_rows(settings, grids, size, is_video=is_video)]
        slots_r = np.full(count_outputs(settings, shape.num_slots), num_media_rows, np.int32)
        slots_r[: len(rows)] = rows
        yield EncoderInputs(shape, batch, slots_r)
        patch, row = patch + num_patches, row + len(rows)


def _apart(
    settings: TowerSettings, grids: list[Grid], size: tuple[int, int]
) -> Iterator[tuple[list[Grid], tuple[int, int]]]:
    """Yield the grids and the size of what is encoded at once: of an image or a video all, of a sound each clip."""
    if settings.sound is None:
        yield grids, size
        return
    for grid, num_samples in zip(grids, split_samples(settings.sound, size[1]), strict=True):
        yield [grid], (size[0], num_samples)


def written_inputs(
    encode: Encode, num_media_rows: int, row_size: int, scale: np.ndarray | None = None
) -> Iterator[list[np.ndarray]]:
    """Yield an encoded item's rows and their slots in a cache of `num_media_rows`, WRITTEN_ROWS at a time.

    The rows are multiplied by `scale`, a number in the model's dtype, in that dtype.
    """
    rows_rw = np.frombuffer(encode.item.patches, np.float32).reshape(-1, row_size)
    if scale is not None:
        rows_rw = (rows_rw.astype(scale.dtype) * scale).astype(np.float32)
    for start in range(0, len(rows_rw), WRITTEN_ROWS):
        some, slots = rows_rw[start : start + WRITTEN_ROWS], encode.rows[start : start + WRITTEN_ROWS]
        rows_nw = np.zeros((WRITTEN_ROWS, row_size), np.float32)
        slots_n = np.full(WRITTEN_ROWS, num_media_rows, np.int32)
        rows_nw[: len(some)], slots_n[: len(some)] = some, slots
        yield [rows_nw, slots_n]
