"""Decode images: limits are checked on the header before any pixel exists, and the result is always RGB."""

from __future__ import annotations

import hashlib
import struct
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageFile, JpegImagePlugin, TiffImagePlugin, UnidentifiedImageError

from jaxllm.media.errors import MediaError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow's names of the formats that are decoded."""
MAX_PIXELS = 178_956_970
"""The most pixels of an image, twice Pillow's threshold for a warning. Pillow itself refuses more."""
_MAX_SIDE = 65_535
_MAX_SCANS = 16
"""How often a progressive JPEG image of MAX_PIXELS may be refined: each scan costs few bytes and a pass over them."""
_MAX_TILE = 4096 * 4096
"""The pixels of a TIFF tile that may be larger than its image."""
_ORIENTATION = 0x0112
_TILE_WIDTH, _TILE_LENGTH = 322, 323

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes an image upright, by its EXIF orientation."""


def decode_image(value: Any, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return an upright RGB image with its pixels loaded, and nothing else: no metadata, no open file.

    `value` is the bytes of a file (PNG, JPEG, WebP, GIF, BMP or TIFF; of an animation the first frame), a Pillow image,
    or a uint8 array [h, w], [h, w, 3], [h, w, 4] or [3, h, w]. EXIF orientation is applied, transparent parts are laid
    over white, and 16-bit values keep their high byte. Raises MediaError for anything else, for files that are damaged
    or end early, for more than `max_pixels` pixels and for sides of more than 65,535.
    """
    if isinstance(value, Image.Image):
        return _finish(value, max_pixels)
    if isinstance(value, np.ndarray):
        return _finish(_from_array(value), max_pixels)
    if isinstance(value, bytes | bytearray | memoryview):
        return _finish(_open(bytes(value), max_pixels), max_pixels)
    raise _no_image(value)


def image_size(value: Any) -> tuple[int, int]:
    """Return the (height, width) of what `decode_image` takes, by its header, before an EXIF orientation swaps them.

    Raises MediaError as `decode_image` does, but for damaged pixels.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        width, height = _open(bytes(value), MAX_PIXELS).size
    elif isinstance(value, np.ndarray):
        width, height = _from_array(value).size
    elif isinstance(value, Image.Image):
        width, height = value.size
    else:
        raise _no_image(value)
    check_size((width, height))
    return height, width


def content_hash(media: Image.Image | np.ndarray) -> str:
    """Return a hash of an image's mode, size and pixels, or of an array's type, shape and values: 64 hex digits."""
    if isinstance(media, Image.Image):
        return _hash("image", media.mode, media.size, media.tobytes())
    array = np.ascontiguousarray(media)
    return _hash("array", array.dtype.str, array.shape, array.data.cast("B") if array.size else b"")


def uuid_hash(modality: str, uuid: str) -> str:
    """Return the hash that stands for a user's id of an item. No content has the same hash."""
    return _hash("uuid", modality, (), uuid.encode("utf-8", "surrogatepass"))


def _no_image(value: Any) -> MediaError:
    return MediaError(f"an image must be bytes, a PIL image or a uint8 array, not {type(value).__name__}.")


def _hash(kind: str, form: str, shape: tuple[int, ...], data: bytes | memoryview) -> str:
    digest = hashlib.blake2b(f"{kind} {form} {shape}\n".encode(), digest_size=32)
    digest.update(data)
    return digest.hexdigest()


def _open(data: bytes, max_pixels: int) -> ImageFile.ImageFile:
    """Return an image after reading its header alone."""
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise MediaError(f"the image is damaged or of another format than {', '.join(FORMATS)}.") from error
    except Image.DecompressionBombError as error:
        raise MediaError(f"the image has more pixels than the limit of {max_pixels:,}.") from error
    except Exception as error:
        raise MediaError("the image's header cannot be read: the file is damaged.") from error
    check_size(image.size, max_pixels)
    pixels = image.width * image.height
    if isinstance(image, JpegImagePlugin.JpegImageFile) and data.count(b"\xff\xda") * pixels > _MAX_SCANS * MAX_PIXELS:
        raise MediaError("the JPEG image has too many scans for its size: save it again as a baseline JPEG.")
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        _check_tiles(image, pixels)
    if any(tile.codec_name == "bmp_rle" for tile in image.tile):  # a slow decoder, in Python
        raise MediaError("a BMP image with run-length encoding is not supported: save it without, or as PNG.")
    return image


def check_size(size: tuple[int, int], max_pixels: int = MAX_PIXELS) -> None:
    """Raise MediaError for an image's width and height if it has no pixels, or too many."""
    width, height = size
    if not (1 <= width <= _MAX_SIDE and 1 <= height <= _MAX_SIDE):
        raise MediaError(f"the image has {width} x {height} pixels: a side must have from 1 to {_MAX_SIDE:,}.")
    if width * height > max_pixels:
        raise MediaError(f"the image has {width} x {height} pixels, more than the limit of {max_pixels:,}.")


def _check_tiles(image: TiffImagePlugin.TiffImageFile, pixels: int) -> None:
    """Raise MediaError if a tile, which is decoded as a whole, is much larger than the image."""
    width, length = image.tag_v2.get(_TILE_WIDTH, 1), image.tag_v2.get(_TILE_LENGTH, 1)
    if not (isinstance(width, int) and isinstance(length, int) and width * length <= max(pixels, _MAX_TILE)):
        raise MediaError("the TIFF image has tiles that are too large.")


def _finish(image: Image.Image, max_pixels: int) -> Image.Image:
    """Load the pixels and return them upright and in RGB."""
    check_size(image.size, max_pixels)
    try:
        image.load()
        upright = image.transpose(turn) if (turn := _TURNS.get(_orientation(image))) is not None else image
        plain = _to_rgb(upright)
    except MediaError:
        raise
    except Exception as error:
        raise MediaError("the image's pixels cannot be decoded: the file is damaged or ends early.") from error
    plain.info = {}
    return plain


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation; 1, upright, if there is none or the EXIF data is damaged."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except (OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, struct.error):
        return 1
    return value if isinstance(value, int) else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = _to_8_bits(image)
    if image.mode in ("I", "F", "LAB"):
        message = f"an image of mode {image.mode} has no fixed range of colours: convert it to 8-bit RGB or grey."
        raise MediaError(message)
    if image.has_transparency_data:
        return _over_white(image.convert("LA") if image.mode == "La" else image)
    return image.convert("RGB")


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Return a grey image of the high bytes, as Pillow reads 16-bit colours. One value may stand for transparency."""
    values_hw = np.asarray(image)
    grey = Image.fromarray((values_hw >> 8).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray(np.where(values_hw == transparent, 0, 255).astype(np.uint8)))
    return grey


def _over_white(image: Image.Image) -> Image.Image:
    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image.getchannel("A"))
    return white


def _from_array(array: np.ndarray) -> Image.Image:
    """Return the image of an array. Raises MediaError for a shape that is unclear."""
    if array.dtype != np.uint8:
        message = f"an image array must be uint8 with values from 0 to 255, not {array.dtype}."
        raise MediaError(message)
    channels_first = array.ndim == 3 and array.shape[0] == 3
    channels_last = array.ndim == 3 and array.shape[2] in (3, 4)
    if array.ndim != 2 and channels_first == channels_last:
        reason = "its channels may be first or last" if channels_first else "it has no channels"
        form = "[h, w], [h, w, 3], [h, w, 4] or [3, h, w]"
        raise MediaError(f"an image array must be {form}; of the shape {list(array.shape)} {reason}: pass a PIL image.")
    if 0 in array.shape:
        raise MediaError(f"the image array of shape {list(array.shape)} is empty.")
    return Image.fromarray(np.ascontiguousarray(array.transpose(1, 2, 0) if channels_first else array))
