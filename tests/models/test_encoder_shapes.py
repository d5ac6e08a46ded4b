"""The shapes of towers' programs: doubled up to what the largest item needs, and no further."""

from __future__ import annotations

import pytest

from jaxllm.core_messages import MediaItem, MediaSpan
from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.encoders.patches import EncoderShape, check_item, encoder_shapes
from jaxllm.models.towers.settings import Projector, Tiling, TowerSettings

pytestmark = pytest.mark.models

NONE = Projector(dense=())
SMOLVLM = TowerSettings(patch_shape=(3, 16, 16), projector=NONE, merge=4, positions="nearest", side=32)
INTERNVL = TowerSettings(patch_shape=(3, 14, 14), projector=NONE, merge=2, positions="exact", side=32, class_position=0)
TILING = Tiling(tile=384, resolutions=((384, 384), (2304, 2304)), most=9, splits_alone=True)
ONEVISION = TowerSettings(patch_shape=(3, 14, 14), projector=NONE, positions="exact", side=27, tiling=TILING)
QWEN = TowerSettings(patch_shape=(3, 2, 14, 14), projector=NONE, merge=2)


@pytest.mark.parametrize(
    ("settings", "num_rows", "num_frames", "largest", "number"),
    [
        (SMOLVLM, 2048, 32, 32_768, 8),
        (SMOLVLM, 2049, 32, 33_024, 9),  # its rows take 32,784 slots
        (INTERNVL, 8192, 32, 32 * 1025, 6),  # with the class token of each frame
        (INTERNVL, 3328, 0, 13 * 1025, 5),
        (ONEVISION, 27_972, 32, 37 * 729, 7),  # the tiles of an image
        (ONEVISION, 65_536, 40, 40 * 729, 7),
        (QWEN, 16_384, 32, 65_536, 9),
        (QWEN, 1, 0, 256, 1),
    ],
)
def test_the_largest_program_is_no_larger_than_needed(
    settings: TowerSettings, num_rows: int, num_frames: int, largest: int, number: int
):
    shapes = [shape.num_slots for shape in encoder_shapes(settings, num_rows, num_frames)]
    assert (shapes[-1], len(shapes)) == (largest, number)
    assert shapes[:-1] == [shapes[0] << power for power in range(number - 1)]


def test_an_item_that_no_program_takes_is_refused_by_its_size():
    tower = TowerSettings(
        patch_shape=(3, 2, 2), projector=NONE, positions="exact", side=2,
        tiling=Tiling(tile=4, resolutions=((4, 4),), splits_alone=True),
    )  # fmt: skip
    frames = [MediaSpan(0, 4, 0)]
    item = MediaItem(
        key=b"", modality="video", grids=[(3, 2, 2)], size=(4, 4), patches=bytes(4 * 12 * 12), spans=frames
    )
    check_item(tower, item, [EncoderShape(12)])
    with pytest.raises(VLLMValidationError, match=r"video has 12 patches, .* 8 at most: .*media_io_kwargs"):
        check_item(tower, item, [EncoderShape(8)])
