"""Turn the frames of a video into the patches that a model's tower takes.

Which frames of a file are taken is decided before. In the Qwen and GLM families two frames make a step in time, in the
others each is one. Patches lie in the order of the family's images, one step in time after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.media.geometry import Size, longest_edge, merged_clip, merged_grid, patch_budget
from jaxllm.media.processors import ImageProcessor, ProcessedImage
from jaxllm.media.resize import resize
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
    duration: float | None = None
    """The seconds of the whole video; None to take the second of the last frame."""

    @property
    def taken_per_second(self) -> float:
        """Return how many frames of each second were taken."""
        return len(self.indices) / self.num_frames * self.fps


_Sizes = Callable[[Any, int, Size, Mapping[str, Any]], tuple[Size, ...]]
"""Returns the sizes that frames are resized to, one after the other, from the image processor, the number of frames,
the size of one, and options."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What differs between families: an image processor and its settings for videos, and the seconds of steps."""

    image_processor: str
    sizes: _Sizes
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What holds unless the checkpoint says otherwise."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Options of images that have no effect on frames, which are not split."""
    takes_means: bool = False
    """The second of a step is the mean of its frames' seconds, not the first."""


def _merged(processor: Any, _: int, size: Size, options: Mapping[str, Any]) -> tuple[Size, ...]:
    return merged_grid(processor, size, options).sizes


def _merged_together(processor: Any, num_frames: int, size: Size, options: Mapping[str, Any]) -> tuple[Size, ...]:
    """Return a size within bounds on the pixels of all frames together, not of one."""
    return (merged_clip(processor, num_frames, size, options),)


def _square(_processor: Any, _: int, _size: Size, options: Mapping[str, Any]) -> tuple[Size, ...]:
    return ((options["size"]["height"], options["size"]["width"]),)


def _shrunk(_processor: Any, _: int, size: Size, options: Mapping[str, Any]) -> tuple[Size, ...]:
    return longest_edge(size, options)


def _budgeted(processor: Any, _: int, size: Size, options: Mapping[str, Any]) -> tuple[Size, ...]:
    return patch_budget(processor, size, options).sizes


def _bounds(fewest: int, most: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": fewest, "longest_edge": most}}


_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "size": {"height": 384, "width": 384},
}
_HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_QWEN2 = _Kind("Qwen2VLImageProcessor", _merged, _bounds(128 * 28**2, 768 * 28**2))
_QWEN3 = _Kind(
    "Qwen2VLImageProcessor",
    _merged_together,
    {**_bounds(128 * 32**2, 768 * 32**2), "patch_size": 16, **_HALVES},
    takes_means=True,
)
_GLM = _bounds(112**2, 60_000 * 28**2)
_KINDS = {
    "gemma4": _Kind("Gemma4ImageProcessor", _budgeted, {"max_soft_tokens": 70}),
    "gemma4_unified": _Kind("Gemma4UnifiedImageProcessor", _budgeted, {"max_soft_tokens": 70}),
    "glm46v": _Kind("Glm46VImageProcessor", _merged_together, _GLM),
    "glm4v": _Kind("Glm4vImageProcessor", _merged_together, _GLM),
    "glm4v_moe": _Kind("Glm4vImageProcessor", _merged_together, _GLM),
    "internvl": _Kind("GotOcr2ImageProcessor", _square, fixed={"crop_to_patches": False}),
    "llava_onevision": _Kind("SiglipImageProcessor", _square, _CLIP),
    "qwen2_5_vl": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "smolvlm": _Kind("SmolVLMImageProcessor", _shrunk, fixed={"do_image_splitting": False}),
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
        # SmolVLM's checkpoints may have the size of frames there.
        sampled = (settings.get("video_sampling") or {}).get("video_size")
        named = {**self._kind.settings, **({"size": sampled} if sampled else {}), **settings}
        named["image_processor_type"] = self._kind.image_processor
        self._images = ImageProcessor(named, config, max_pixels=max_pixels)

    def check_request(self, options: Mapping[str, Any], request: Mapping[str, Any]) -> None:
        """Raise VLLMValidationError as `ImageProcessor.check_request` does."""
        self._images.check_request(options, request)

    def shape(self, size: Size, times: FrameTimes, options: Mapping[str, Any] | None = None) -> ItemShape:
        """Return the shape of a video of frames of a (height, width) in pixels, without making any pixels.

        `options` are mm_processor_kwargs. Raises VLLMValidationError for an option that the processor does not have,
        for a wrong value, and for a video that the processor cannot take or that would exceed the limit.
        """
        height, width = self._frame_sizes(size, len(times.indices), self._images.check(options or {}))[-1]
        per_step, side = self._frames_per_step, self._images.patch_size
        seconds = [index / times.fps for index in times.indices]
        duration = seconds[-1] if times.duration is None else times.duration
        seconds += seconds[-1:] * (-len(seconds) % per_step)
        return ItemShape(
            "video",
            ((len(seconds) // per_step, height // side, width // side),),
            size,
            timestamps=tuple(_means(seconds) if self._kind.takes_means else seconds[::per_step]),
            seconds_per_step=per_step / times.taken_per_second,
            duration=duration,
        )

    def work_bytes(self, shape: ItemShape) -> int:
        """Return what `ImageProcessor.work_bytes` does."""
        return self._images.work_bytes(shape)

    def process(
        self, frames: np.ndarray, times: FrameTimes, options: Mapping[str, Any] | None = None
    ) -> ProcessedImage:
        """Return the patches of a video of frames, uint8 [frames, height, width, 3]; options and errors as in `shape`.

        The last frame is repeated if it lacks another one to make a step with.
        """
        from PIL.Image import fromarray

        if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or len(frames) != len(times.indices):
            raise VLLMValidationError(
                f"a video is {len(times.indices)} frames, uint8 [frames, height, width, 3]: "
                f"got {frames.dtype} {list(frames.shape)}",
                parameter="multi_modal_data",
            )
        size = frames.shape[1], frames.shape[2]
        shape, checked = self.shape(size, times, options), self._images.check(options or {})
        sizes = self._frame_sizes(size, len(frames), checked)
        (steps, rows, columns), per_step = shape.grids[0], self._frames_per_step
        patches = np.empty((steps, per_step, rows * columns, 3, self._images.patch_size**2), np.float32)
        for number in range(steps * per_step):
            pixels_chw = frames[min(number, len(frames) - 1)].transpose(2, 0, 1)
            for frame_size in sizes:
                pixels_chw = resize(pixels_chw, frame_size, self._images.hf.resample)
            frame = fromarray(np.ascontiguousarray(pixels_chw.transpose(1, 2, 0)))
            # A processor whose steps have several frames repeats a single one.
            still = self._images.process_resized(frame, {**checked, **self._kind.fixed})[: rows * columns]
            patches[divmod(number, per_step)] = still.reshape(rows * columns, 3, per_step, -1)[:, :, 0]
        return ProcessedImage.of(patches.transpose(0, 2, 3, 1, 4).reshape(steps * rows * columns, -1), shape)

    @property
    def _frames_per_step(self) -> int:
        return getattr(self._images.hf, "temporal_patch_size", 1)

    def _frame_sizes(self, size: Size, num_frames: int, options: Mapping[str, Any]) -> tuple[Size, ...]:
        """Return the sizes that frames are resized to. Raises VLLMValidationError as `shape` does."""
        try:
            sizes = self._kind.sizes(self._images.hf, num_frames, size, options)
        except ValueError as error:
            raise VLLMValidationError(
                f"the model cannot take a video of {num_frames} frames of {size[1]} x {size[0]} pixels: {error}",
                parameter="multi_modal_data",
            ) from error
        height, width = sizes[-1]
        if num_frames * height * width > self._max_pixels:
            raise VLLMValidationError(
                f"a video of {num_frames} frames of {size[1]} x {size[0]} pixels becomes "
                f"{num_frames * height * width} pixels, more than {self._max_pixels}: send fewer or smaller frames, "
                "or lower the sizes in mm_processor_kwargs",
                parameter="multi_modal_data",
            )
        return sizes


def _means(seconds: Sequence[float]) -> list[float]:
    """Return the means of pairs."""
    return [(first + second) / 2 for first, second in zip(seconds[::2], seconds[1::2], strict=True)]
