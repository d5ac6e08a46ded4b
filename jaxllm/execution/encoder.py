"""Encode images and videos: the program of a vision tower, and its inputs for an item.

Each item is encoded alone, padded to a bucket of slots, so that its rows do not depend on what else is encoded.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jaxllm.core_messages import MediaItem
from jaxllm.exceptions import VLLMValidationError
from jaxllm.models.towers.layout import PatchBatch, count_outputs, count_rows, count_slots, empty_batch, make_batch
from jaxllm.models.towers.settings import Grid, TowerSettings
from jaxllm.models.towers.tower import Tower
from jaxllm.scheduling.media import Encode

_LEAST_SLOTS = 256


class EncoderShape(NamedTuple):
    """The shape that a tower's program is compiled for: slots of patches and class tokens."""

    num_slots: int


def encoder_shapes(settings: TowerSettings, num_media_rows: int) -> list[EncoderShape]:
    """Return the shapes of a tower's programs, smallest first: doubled up to one that holds `num_media_rows` rows."""
    is_fixed = settings.positions == "exact"
    least = count_slots(settings, [Grid(1, settings.side, settings.side)]) if is_fixed else _LEAST_SLOTS
    shapes = [EncoderShape(least)]
    # The rows of an image in tiles are fewer than its patches, where lines are shrunk.
    of_tiles = 0 if settings.tiling is None else least * settings.tiling.most_tiles
    while shapes[-1].num_slots < max(num_media_rows * settings.group, of_tiles):
        shapes.append(EncoderShape(2 * shapes[-1].num_slots))
    return shapes


def batch_spec(tower: Tower, shape: EncoderShape) -> PatchBatch:
    """Return shape and dtype of a tower's inputs."""
    batch = empty_batch(tower.settings, shape.num_slots)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), batch)


def run_encoder(params: Any, features_rw: Array, batch: PatchBatch, slots_r: Array, *, tower: Tower) -> Array:
    """Return the feature cache with an item's rows at `slots_r`; padding's slots lie beyond it and are dropped."""
    return features_rw.at[slots_r].set(tower.encode(params, batch).astype(features_rw.dtype), mode="drop")


def check_item(settings: TowerSettings, item: MediaItem, shapes: list[EncoderShape]) -> None:
    """Raise VLLMValidationError for an item that the tower cannot take: its checkpoint's files contradict each other.

    In a step such an item would end all requests.
    """
    try:
        grids = [Grid(*grid) for grid in item.grids]
        num_patches, num_rows = sum(prod(grid) for grid in grids), count_rows(settings, grids)
        if settings.tiling is not None:
            num_rows = sum(span.num_rows for span in item.spans)
            if len(grids) != 1 + prod(settings.tiling.layout(item.size)):
                raise ValueError(f"{len(grids)} tiles are not those of image_grid_pinpoints")
        if len(item.patches) != 4 * num_patches * settings.patch_dim:
            raise ValueError(f"{num_patches} patches do not have {settings.patch_dim} numbers each")
        if num_rows != sum(span.num_rows for span in item.spans):
            raise ValueError(f"{num_patches} patches give {num_rows} rows, and the prompt takes another number")
        if count_slots(settings, grids) > shapes[-1].num_slots:
            raise ValueError(f"the largest program takes {shapes[-1].num_slots} patches")
    except ValueError as error:
        message = f"the settings of the model's image processor do not fit its vision_config: {error}."
        raise VLLMValidationError(message, parameter="multi_modal_data") from error


def encoder_inputs(
    settings: TowerSettings, encode: Encode, shapes: list[EncoderShape], num_media_rows: int
) -> tuple[EncoderShape, PatchBatch, np.ndarray]:
    """Return the shape for an item, its padded patches, and the slot of each row in a cache of `num_media_rows`."""
    grids = [Grid(*grid) for grid in encode.item.grids]
    needed = count_slots(settings, grids)
    shape = next(shape for shape in shapes if needed <= shape.num_slots)
    patches_nc = np.frombuffer(encode.item.patches, np.float32).reshape(-1, settings.patch_dim)
    batch = make_batch(settings, grids, patches_nc, shape.num_slots, size=encode.item.size)
    slots_r = np.full(count_outputs(settings, shape.num_slots), num_media_rows, np.int32)
    slots_r[: len(encode.rows)] = encode.rows
    return shape, batch, slots_r
