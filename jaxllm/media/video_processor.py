"""Turn the frames of a video into the patches that Qwen's and GLM's towers take: two frames make a step in time.

Which frames of a file are taken is decided before. Patches lie in the order of the Qwen kin's images, one step in time
after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.geometry import Size, merged_clip, merged_grid
from jaxllm.media.processors import ImageProcessor, ProcessedImage
from jaxllm.media.shapes import ItemShape

MAX_VIDEO_PIXELS = 2**26
"""The most pixels that the frames of a video may have together after resizing, unless the caller sets a limit."""


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """Where a video's frames were taken from."""

    fps: float
    """Frames per second of the whole video."""
    indices: tuple[int, ...]
    """The number of each frame in the whole video."""
    num_frames: int
    """The number of frames of the whole video."""

    @property
    def taken_per_second(self) -> float:
        """Return how many frames of each second were taken."""
        return len(self.indices) / self.num_frames * self.fps


@dataclass(frozen=True, slots=True)
class _Kind:
    """What differs between families: an image processor and its settings for videos, and the seconds of steps."""

    image_processor: str
    sizes_clip: bool
    """The bounds are on the pixels of all frames together, not of one."""
    settings: Mapping[str, Any]
    """What holds unless the checkpoint says otherwise."""
    seconds: Callable[[Sequence[float]], list[float]]
    """The second of each step in time, from those of an even number of frames."""


def _means(seconds: Sequence[float]) -> list[float]:
    return [(first + second) / 2 for first, second in zip(seconds[::2], seconds[1::2], strict=True)]


def _firsts(seconds: Sequence[float]) -> list[float]:
    return list(seconds[::2])


def _bounds(fewest: int, most: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": fewest, "longest_edge": most}}


_HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_QWEN2 = _Kind("Qwen2VLImageProcessor", False, _bounds(128 * 28**2, 768 * 28**2), _firsts)
_QWEN3 = _Kind(
    "Qwen2VLImageProcessor", True, {**_bounds(128 * 32**2, 768 * 32**2), "patch_size": 16, **_HALVES}, _means
)
_GLM = _bounds(112**2, 60_000 * 28**2)
_KINDS = {
    "glm46v": _Kind("Glm46VImageProcessor", True, _GLM, _firsts),
    "glm4v": _Kind("Glm4vImageProcessor", True, _GLM, _firsts),
    "glm4v_moe": _Kind("Glm4vImageProcessor", True, _GLM, _firsts),
    "qwen2_5_vl": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
}


class VideoProcessor:
    """The video processor of one checkpoint. It keeps no state between calls, so that threads may share it."""

    def __init__(
        self, settings: Mapping[str, Any], config: Mapping[str, Any], *, max_pixels: int = MAX_VIDEO_PIXELS
    ) -> None:
        """Make the processor for a model with a config.json; `settings` are its video_preprocessor_config.json.

        `max_pixels` bounds the pixels of all frames after resizing. Raises VLLMValidationError for a type of model that
        takes no videos here.
        """
        model_type = config.get("model_type", "")
        if model_type not in _KINDS:
            raise VLLMValidationError(
                f"models of type {model_type!r} take no videos; these do: {', '.join(_KINDS)}",
                parameter="model",
                value=model_type,
            )
        self._kind, self._max_pixels = _KINDS[model_type], max_pixels
        named = {**self._kind.settings, **settings, "image_processor_type": self._kind.image_processor}
        self._images = ImageProcessor(named, config, max_pixels=max_pixels)

    def check_request(self, options: Mapping[str, Any], request: Mapping[str, Any]) -> None:
        """Raise VLLMValidationError as `ImageProcessor.check_request` does."""
        self._images.check_request(options, request)

    def shape(self, size: Size, times: FrameTimes, options: Mapping[str, Any] | None = None) -> ItemShape:
        """Return the shape of a video of frames of a (height, width) in pixels, without making any pixels.

        `options` are mm_processor_kwargs. Raises VLLMValidationError for an option that the processor does not have,
        for a wrong value, and for a video that the processor cannot take or that would exceed the limit.
        """
        height, width = self._frame_size(size, len(times.indices), options or {})
        processor = self._images.hf
        per_step, side = processor.temporal_patch_size, processor.patch_size
        seconds = [index / times.fps for index in times.indices]
        seconds += seconds[-1:] * (-len(seconds) % per_step)
        return ItemShape(
            "video",
            ((len(seconds) // per_step, height // side, width // side),),
            size,
            timestamps=tuple(self._kind.seconds(seconds)),
            seconds_per_step=per_step / times.taken_per_second,
        )

    def process(
        self, frames: np.ndarray, times: FrameTimes, options: Mapping[str, Any] | None = None
    ) -> ProcessedImage:
        """Return the patches of a video of frames, uint8 [frames, height, width, 3]; options and errors as in `shape`.

        The last frame is repeated if their number is odd.
        """
        from PIL.Image import fromarray

        if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or len(frames) != len(times.indices):
            raise VLLMValidationError(
                f"a video is {len(times.indices)} frames, uint8 [frames, height, width, 3]: "
                f"got {frames.dtype} {list(frames.shape)}",
                parameter="multi_modal_data",
            )
        shape = self.shape((frames.shape[1], frames.shape[2]), times, options)
        processor = self._images.hf
        (steps, rows, columns), side = shape.grids[0], processor.patch_size
        per_step = processor.temporal_patch_size
        patches = np.empty((steps, per_step, rows * columns, 3, side * side), np.float32)
        for number in range(steps * per_step):
            frame = fromarray(frames[min(number, len(frames) - 1)])
            frame = frame.resize((columns * side, rows * side), processor.resample)
            still = processor(frame, do_resize=False)["pixel_values"]  # the frame twice
            patches[divmod(number, per_step)] = still.reshape(rows * columns, 3, per_step, -1)[:, :, 0]
        return ProcessedImage.of(patches.transpose(0, 2, 3, 1, 4).reshape(steps * rows * columns, -1), shape)

    def _frame_size(self, size: Size, num_frames: int, options: Mapping[str, Any]) -> Size:
        """Return the size of a frame after resizing. Raises VLLMValidationError as `shape` does."""
        checked = self._images.check(options)
        try:
            if self._kind.sizes_clip:
                height, width = merged_clip(self._images.hf, num_frames, size, checked)
            else:
                ((height, width),) = merged_grid(self._images.hf, size, checked).sizes
        except ValueError as error:
            raise VLLMValidationError(
                f"the model cannot take a video of {num_frames} frames of {size[1]} x {size[0]} pixels: {error}",
                parameter="multi_modal_data",
            ) from error
        if num_frames * height * width > self._max_pixels:
            raise VLLMValidationError(
                f"a video of {num_frames} frames of {size[1]} x {size[0]} pixels becomes "
                f"{num_frames * height * width} pixels, more than {self._max_pixels}: send fewer or smaller frames, "
                "or lower max_pixels in mm_processor_kwargs",
                parameter="multi_modal_data",
            )
        return height, width
