"""Turn a decoded image into the patches that a model's tower takes, with transformers' image processors.

Those that need no torch do the steps, with the arithmetic of those that do. Which one a model has, and how, its
preprocessor_config.json says.

The order of patches: of an image with several tiles, the tiles follow one another; within a tile, the patches lie in
raster order, row by row from the top left. The Qwen kin (Qwen2-VL to Qwen3.5, GLM-4.5V) keep transformers' order
instead: the 2 x 2 patches that are merged to one row of the model stand together (top left, top right, bottom left,
bottom right), and these squares lie in raster order. The values of a patch are in the order of the convolution's
weight: channel, [time,] row, column; for Gemma 4, whose weight is a matrix, row, column, channel. A patch of Gemma 4
12B is a square that becomes one row of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from jaxllm.exceptions import VLLMValidationError, unknown_parameter
from jaxllm.media import geometry
from jaxllm.media.arithmetic import with_merged_patches, with_torchs_arithmetic
from jaxllm.media.geometry import Size, Tiles
from jaxllm.media.llama4 import Llama4Images, canvas_tiles
from jaxllm.media.resize import FILTERS
from jaxllm.media.shapes import Grid, ItemShape
from jaxllm.params.checks import shown

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 2**25
"""The most pixels that an image may have after resizing, all its tiles together, unless the caller sets a limit."""


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """One image or video as a tower takes it, or as it would give it."""

    data: bytes
    """The float32 numbers of patches, or of rows. All requests with the item share them."""
    shape: ItemShape
    is_encoded: bool = False
    """True if the data are rows: the item comes encoded."""

    @classmethod
    def of(cls, patches: np.ndarray, shape: ItemShape) -> Self:
        """Return an item of this shape with these patches."""
        return cls(patches.astype(np.float32, copy=False).tobytes(), shape)

    @property
    def patches(self) -> np.ndarray:
        """Return the patches, float32 [p, patch_dim] and read-only, in the order that this module's docstring names."""
        return np.frombuffer(self.data, np.float32).reshape(self.shape.num_patches, -1)

    @property
    def grids(self) -> tuple[Grid, ...]:
        """Return (time, height, width) in patches of each tile."""
        return self.shape.grids

    @property
    def size(self) -> Size:
        """Return the (height, width) of the original in pixels."""
        return self.shape.size

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the patches take."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What differs between image processors: their tiles, and what a user may set."""

    module: str
    """The family that has it in transformers; "" for one of our own."""
    tiles: Callable[[Any, Size, Mapping[str, Any]], Tiles]
    options: tuple[str, ...] = ()
    makes_patches: bool = False
    """The processor's outputs are patches; other outputs are pixels."""
    counts_tiles: str = ""
    """The option that bounds the number of tiles."""
    splits_alone: bool = False
    """Only an image that is the one of its prompt has several tiles; each of several is padded to a square."""


_PAN_AND_SCAN = {
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
_UPPER_BOUNDS = ("max_patches", "max_soft_tokens", "pan_and_scan_max_num_crops")
_ALIASES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
"""The options that set a side of a size, for processors that have them."""
_MAX_NUMBER = 2**31
"""What every number of an option is below."""
_MERGED = ("size", "min_pixels", "max_pixels")
_KINDS = {
    "CLIPImageProcessor": _Kind("clip", geometry.fixed),
    "Gemma3ImageProcessor": _Kind(
        "gemma3",
        geometry.pan_and_scan,
        ("do_pan_and_scan", *_PAN_AND_SCAN),
        counts_tiles="pan_and_scan_max_num_crops",
    ),
    "Gemma4ImageProcessor": _Kind("gemma4", geometry.patch_budget, ("max_soft_tokens",), makes_patches=True),
    "Gemma4UnifiedImageProcessor": _Kind("gemma4", geometry.patch_budget, ("max_soft_tokens",), makes_patches=True),
    "Glm46VImageProcessor": _Kind("glm46v", geometry.merged_grid, ("size",), makes_patches=True),
    "Glm4vImageProcessor": _Kind("glm4v", geometry.merged_grid, ("size",), makes_patches=True),
    "GotOcr2ImageProcessor": _Kind(
        "got_ocr2", geometry.best_canvas, ("crop_to_patches", "min_patches", "max_patches"), counts_tiles="max_patches"
    ),
    "Idefics3ImageProcessor": _Kind("idefics3", geometry.split_rows, ("do_image_splitting", "size")),
    "Llama4ImageProcessor": _Kind(
        "", canvas_tiles, ("max_patches", "resize_to_max_canvas"), counts_tiles="max_patches"
    ),
    "LlavaImageProcessor": _Kind("llava", geometry.fixed),
    "LlavaNextImageProcessor": _Kind("llava_next", geometry.any_resolution),
    "LlavaOnevisionImageProcessor": _Kind("llava_onevision", geometry.any_resolution, splits_alone=True),
    "PixtralImageProcessor": _Kind("pixtral", geometry.whole_patches, ("size",)),
    "Qwen2VLImageProcessor": _Kind("qwen2_vl", geometry.merged_grid, _MERGED, makes_patches=True),
    "SiglipImageProcessor": _Kind("siglip", geometry.fixed),
    "SmolVLMImageProcessor": _Kind("smolvlm", geometry.split_rows, ("do_image_splitting", "size")),
}
_DEFAULTS: dict[str, dict[str, Any]] = {"gemma3": _PAN_AND_SCAN, "internvl": {"crop_to_patches": True}}
"""The options that the processor of the whole model sets, by model type, and not the image processor."""


def check_kind(settings: Mapping[str, Any]) -> str:
    """Return the name of the image processor that a preprocessor_config.json names.

    Raises VLLMValidationError for an unknown one.
    """
    name = str(settings.get("image_processor_type", "")).removesuffix("Pil").removesuffix("Fast")
    if name not in _KINDS:
        raise VLLMValidationError(
            f"the checkpoint's image_processor_type {name!r} is not supported; supported: {', '.join(_KINDS)}. "
            "Or set language_model_only=True: the model then reads text alone.",
            parameter="model",
            value=name,
        )
    return name


class ImageProcessor:
    """The image processor of one checkpoint. It keeps no state between calls, so that threads may share it."""

    def __init__(self, settings: Mapping[str, Any], config: Mapping[str, Any], *, max_pixels: int = MAX_PIXELS) -> None:
        """Make the processor that `settings`, a preprocessor_config.json, names, for a model with a config.json.

        `max_pixels` bounds the pixels after resizing. Raises VLLMValidationError for an unknown image processor.
        """
        name = check_kind(settings)
        self._name, self._kind, self._max_pixels = name, _KINDS[name], max_pixels
        self.hf: Any = _processor_class(name).from_dict(dict(settings))
        """The processor of transformers, or one of ours that is called like it."""
        _check_filter(getattr(self.hf, "resample", None))
        self._patch_size = _side(config.get("vision_config", {}).get("patch_size") or getattr(self.hf, "patch_size", 0))
        self._defaults = self._make_defaults(config)

    @property
    def splits_alone(self) -> bool:
        """Return whether an image has another shape beside others in its prompt."""
        return self._kind.splits_alone

    def shape(
        self, size: Size, options: Mapping[str, Any] | None = None, *, is_beside_others: bool = False
    ) -> ItemShape:
        """Return the shape of an image of a (height, width) in pixels, without making any pixels.

        `options` are mm_processor_kwargs; `is_beside_others` for one of several images of a prompt. Raises
        VLLMValidationError for an option that the processor does not have, for a wrong value, and for an image that
        the processor cannot take or that would exceed the limit.
        """
        return self.measure(size, options, is_beside_others=is_beside_others)[0]

    def measure(
        self, size: Size, options: Mapping[str, Any] | None = None, *, is_beside_others: bool = False
    ) -> tuple[ItemShape, int]:
        """Return what `shape` returns, and about how many bytes it takes to process the image, beside its pixels."""
        tiles = self._tiles(size, self.check(options or {}), is_beside_others)
        shape = self._shape(size, tiles)
        # What is larger than the tiles is held several times: as it is made, resized and cropped.
        return shape, max(self.work_bytes(shape), 4 * 3 * math.prod(tiles.largest))

    def work_bytes(self, shape: ItemShape) -> int:
        """Return about how many bytes it takes to make the patches of this shape, beside the pixels that become them.

        They are those of the patches twice, and twice those of one frame that has its new width alone.
        """
        width = max(grid[2] for grid in shape.grids) * max(1, shape.layout[1])
        frames = getattr(self.hf, "temporal_patch_size", 1)
        num_values = 3 * frames * shape.num_patches * self.patch_size**2
        return 2 * (4 * num_values + 3 * shape.size[0] * width * self.patch_size)

    def process(
        self, image: Image, options: Mapping[str, Any] | None = None, *, is_beside_others: bool = False
    ) -> ProcessedImage:
        """Return the patches of an image in mode RGB; arguments and errors as in `shape`."""
        checked = self.check(options or {})
        size = image.height, image.width
        shape = self._shape(size, self._tiles(size, checked, is_beside_others))
        # Images of one prompt are in one list.
        images = [[image, image]] if is_beside_others and self._kind.splits_alone else image
        outputs = self.hf(images, **checked)["pixel_values"]
        return ProcessedImage.of(self._to_patches(outputs)[: shape.num_patches], shape)

    @property
    def patch_size(self) -> int:
        """Return the side of a patch in pixels."""
        return self.hf.patch_size if self._kind.makes_patches else self._patch_size

    def process_resized(self, image: Image, options: Mapping[str, Any]) -> np.ndarray:
        """Return the patches [p, patch_dim] of an RGB image that has its size already, and padding after them.

        `options` are those that `check` returns.
        """
        return self._to_patches(self.hf(image, **options, do_resize=False)["pixel_values"])

    def check_request(self, options: Mapping[str, Any], request: Mapping[str, Any]) -> None:
        """Raise VLLMValidationError if a request's options raise a bound over that of the engine's `options`."""
        engine, asked = (self._bounds(self.check(named)) for named in (options, {**options, **request}))
        for name, value in asked.items():
            if value > engine.get(name, value):
                raise VLLMValidationError(
                    f"mm_processor_kwargs: a request may not raise {name} to {value}; the engine has {engine[name]}: "
                    "start it with larger mm_processor_kwargs",
                    parameter="mm_processor_kwargs",
                    value=value,
                )

    def check(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a call: the defaults and the mm_processor_kwargs of a user.

        Raises VLLMValidationError for an option that the processor does not have, and for a wrong value.
        """
        known = self._kind.options
        options = {name: value for name, value in options.items() if name in known or not self._has(name, value)}
        for name, value in options.items():
            if name in known:
                continue
            if name in self.hf.valid_kwargs.__annotations__:
                raise VLLMValidationError(
                    f"mm_processor_kwargs: {name} of {self._name} is fixed by the checkpoint; "
                    f"to be set: {', '.join(known) or 'nothing'}",
                    parameter=name,
                    value=value,
                )
            raise unknown_parameter(f"mm_processor_kwargs of {self._name}", name, value, known, {})
        checked = {name: _plain(value) for name, value in options.items()}
        for name, value in checked.items():
            _check_numbers(name, value)
        _check_types(self.hf.valid_kwargs, options)
        size = {**self._defaults.get("size", {}), **checked.pop("size", {})}
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if name in checked:
                size[edge] = checked.pop(name)
        if "size" not in self._kind.options or set(size) == set(self._defaults["size"]):
            merged = {**self._defaults, **checked, **({"size": size} if size else {})}
            if "shortest_edge" in options.get("size", {}) or options.keys() & {"min_pixels", "min_patches"}:
                self._check_ranges(merged)
            return merged
        raise VLLMValidationError(
            f"mm_processor_kwargs: size of {self._name} has the keys {sorted(self._defaults['size'])}, "
            f"got {sorted(options['size'])}",
            parameter="size",
            value=options["size"],
        )

    def _has(self, name: str, value: Any) -> bool:
        """Return whether an option says what the checkpoint says too."""
        if name not in self.hf.valid_kwargs.__annotations__:
            return False
        ours, theirs = (
            list(each) if isinstance(each, tuple) else _plain(each) for each in (getattr(self.hf, name, None), value)
        )
        return ours == theirs

    def _bounds(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checked options that bound what an item costs, by the names that users know."""
        others = {name: options[name] for name in _UPPER_BOUNDS if name in options}
        return {self._side_name(side): value for side, value in options.get("size", {}).items()} | others

    def _side_name(self, side: str) -> str:
        alias = _ALIASES.get(side)
        return alias if alias is not None and alias in self._kind.options else f"size[{side!r}]"

    def _check_ranges(self, options: Mapping[str, Any]) -> None:
        """Raise VLLMValidationError if a lower bound exceeds its upper bound."""
        size = options.get("size", {})
        sides = (self._side_name(side) for side in _ALIASES)
        ranges = (
            (*sides, size.get("shortest_edge"), size.get("longest_edge")),
            ("min_patches", "max_patches", options.get("min_patches"), options.get("max_patches")),
        )
        for lower, upper, least, most in ranges:
            if least is not None and most is not None and least > most:
                message = f"mm_processor_kwargs: {lower} is {least}, more than {upper}, {most}: set both"
                raise VLLMValidationError(message, parameter=lower, value=least)

    def _make_defaults(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that a call has unless a user sets others, with sizes as plain dictionaries."""
        names = [*self._kind.options, "size", "crop_size", "max_image_size"]
        defaults = {name: getattr(self.hf, name, None) for name in names}
        for name, value in _DEFAULTS.get(config.get("model_type", ""), {}).items():
            if not defaults.get(name):
                defaults[name] = value
        if self._kind.module == "pixtral":
            side = self._patch_size * config.get("spatial_merge_size", 1)
            defaults["patch_size"] = {"height": side, "width": side}
        return {name: _plain(value) for name, value in defaults.items() if value is not None}

    def _shape(self, size: Size, tiles: Tiles) -> ItemShape:
        side = self.patch_size
        grids = tuple((1, height // side, width // side) for height, width in tiles.sizes)
        return ItemShape("image", grids, size, tiles.layout)

    def _tiles(self, size: Size, options: Mapping[str, Any], is_beside_others: bool) -> Tiles:
        """Return the tiles of an image with checked options; refuse a size over the limit."""
        make_tiles = geometry.padded if is_beside_others and self._kind.splits_alone else self._kind.tiles
        if self._kind.counts_tiles and self._kind.counts_tiles in options:
            pixels = options[self._kind.counts_tiles] * options["size"]["height"] * options["size"]["width"]
            self._refuse_over_limit(pixels, size, self._kind.counts_tiles)
        try:
            tiles = make_tiles(self.hf, size, options)
            if any(0 in tile for tile in tiles.sizes):
                raise ValueError("its shorter side would vanish when it is resized")
        except ValueError as error:
            raise VLLMValidationError(
                f"{self._name} cannot take an image of {size[1]} x {size[0]} pixels: {error}",
                parameter="multi_modal_data",
            ) from error
        self._refuse_over_limit(tiles.num_pixels, size, "multi_modal_data")
        return tiles

    def _refuse_over_limit(self, pixels: int, size: Size, parameter: str) -> None:
        """Raise VLLMValidationError if an image would have too many pixels after resizing."""
        if pixels > self._max_pixels:
            raise VLLMValidationError(
                f"an image of {size[1]} x {size[0]} pixels may become {pixels} pixels, more than {self._max_pixels}: "
                "send a smaller image, or one less long, or lower the sizes in mm_processor_kwargs",
                parameter=parameter,
            )

    def _to_patches(self, outputs: Any) -> np.ndarray:
        """Return the processor's outputs for one image as patches [p, patch_dim], and padding after them."""
        values = np.asarray(outputs, np.float32)
        if self._kind.makes_patches:
            return values.reshape(-1, values.shape[-1])
        return cut_patches(values.reshape(-1, *values.shape[-3:]), self._patch_size)


def _processor_class(name: str) -> Any:
    """Return the class of an image processor."""
    if not _KINDS[name].module:
        return Llama4Images
    from jaxllm.loading.hf import image_processor_class

    if name == "Gemma4UnifiedImageProcessor":
        return with_merged_patches(_processor_class("Gemma4ImageProcessor"))
    return with_torchs_arithmetic(image_processor_class(_KINDS[name].module, f"{name}Pil"))


def _check_filter(resample: int | None) -> None:
    """Raise VLLMValidationError if a checkpoint asks for a filter that images are not resized with."""
    if resample is not None and resample not in FILTERS:
        raise VLLMValidationError(
            f"the checkpoint's resample is {int(resample)}; images are resized with {', '.join(map(str, FILTERS))} "
            "(Pillow's numbers of filters). Or set language_model_only=True: the model then reads text alone.",
            parameter="model",
            value=int(resample),
        )


def cut_patches(pixels_nchw: np.ndarray, side: int) -> np.ndarray:
    """Return tiles cut into patches, [tiles * rows * columns, channels * side * side].

    What is left over at the right and below is dropped, as a convolution without padding drops it.
    """
    number, channels, height, width = pixels_nchw.shape
    rows, columns = height // side, width // side
    whole = pixels_nchw[:, :, : rows * side, : columns * side]
    cut = whole.reshape(number, channels, rows, side, columns, side).transpose(0, 2, 4, 1, 3, 5)
    return cut.reshape(number * rows * columns, channels * side * side)


def _side(value: Any) -> int:
    """Return the side of a square patch that a config names as a number, a pair or a dictionary."""
    if isinstance(value, Mapping):
        return value["height"]
    return value[0] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    """Return a size of transformers as a plain dictionary without the sides that it leaves open."""
    if isinstance(value, Mapping) or hasattr(value, "shortest_edge"):
        return {name: side for name, side in dict(value).items() if side is not None}
    return value


def _check_types(known: type, options: Mapping[str, Any]) -> None:
    """Raise VLLMValidationError if an option's type is not the one that the processor declares."""
    from huggingface_hub.dataclasses import validate_typed_dict
    from huggingface_hub.errors import StrictDataclassError

    try:
        validate_typed_dict(known, dict(options))
    except StrictDataclassError as error:
        raise VLLMValidationError(f"mm_processor_kwargs: {error}", parameter="mm_processor_kwargs") from error


def _check_numbers(name: str, value: Any) -> None:
    """Raise VLLMValidationError for a number that is not positive or too large, and for a size that names no sides."""
    if name == "size" and not isinstance(value, Mapping):
        raise VLLMValidationError("mm_processor_kwargs: size must name its sides", parameter=name, value=value)
    for number in value.values() if isinstance(value, Mapping) else [value]:
        if type(number) in (int, float) and not 0 < number < _MAX_NUMBER:
            message = f"mm_processor_kwargs: {name} must be positive and below {_MAX_NUMBER}"
            raise VLLMValidationError(message, parameter=name, value=shown(number))
