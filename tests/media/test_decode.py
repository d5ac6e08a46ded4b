"""Images become RGB, whatever their format and mode; what is damaged, too large or unclear is refused."""

from __future__ import annotations

import io
import random
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from jaxllm.media.decode import FORMATS, MAX_PIXELS, content_hash, decode_image, uuid_hash
from jaxllm.media.errors import MediaError

LOSSLESS = ("PNG", "WEBP", "BMP", "TIFF")


def picture(height: int = 5, width: int = 7, channels: int = 3) -> np.ndarray:
    """Return random pixels [h, w, c]."""
    return np.random.default_rng(height).integers(0, 256, (height, width, channels), np.uint8)


def encode(image: Image.Image | np.ndarray, form: str = "PNG", **options: Any) -> bytes:
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    stream = io.BytesIO()
    image.save(stream, form, **({"lossless": True} if form == "WEBP" else {}), **options)
    return stream.getvalue()


def pixels(value: Any) -> np.ndarray:
    """Return what an image decodes to, as [h, w, 3]."""
    image = decode_image(value)
    assert (image.mode, image.info, type(image)) == ("RGB", {}, Image.Image)
    return np.asarray(image)


def png(
    width: int, height: int, body: bytes = b"", *chunks: tuple[bytes, bytes], depth: int = 8, kind: int = 2
) -> bytes:
    """Return a PNG file; `body` is the compressed data."""
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", body), (b"IEND", b"")]
    written = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


@pytest.mark.parametrize("form", LOSSLESS)
def test_formats_that_keep_every_pixel(form: str):
    np.testing.assert_array_equal(pixels(encode(picture(), form)), picture())


@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg_is_decoded_as_by_pillow(progressive: bool):
    data = encode(picture(40, 50), "JPEG", quality=95, progressive=progressive)
    np.testing.assert_array_equal(pixels(data), np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "TIFF"])
def test_only_the_first_frame_of_an_animation_is_decoded(form: str):
    frames = [Image.new("RGB", (9, 4), colour) for colour in ((250, 0, 0), (0, 250, 0))]
    data = encode(frames[0], form, save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(pixels(data), np.asarray(frames[0]))


@pytest.mark.parametrize("form", ["JPEG2000", "PPM", "ICO", "TGA", "PCX"])
def test_other_formats_are_refused(form: str):
    with pytest.raises(MediaError, match="another format than PNG, JPEG"):
        decode_image(encode(picture(), form))


@pytest.mark.parametrize(
    "data", [b"", b"x", b"<svg></svg>", b"%PDF-1.4", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"]
)
def test_other_files_are_refused(data: bytes):
    with pytest.raises(MediaError, match="another format than") as caught:
        decode_image(data)
    assert "0x" not in str(caught.value)
    assert "BytesIO" not in str(caught.value)


@pytest.mark.parametrize("form", LOSSLESS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 10_000), (10_000, 1)])
def test_images_of_one_pixel_and_of_one_line(shape: tuple[int, int], form: str):
    """CVE-2026-22773."""
    image = picture(*shape)
    np.testing.assert_array_equal(pixels(encode(image, form)), image)
    np.testing.assert_array_equal(pixels(image if shape[1] > 4 else Image.fromarray(image)), image)


# Limits before pixels exist


@pytest.mark.parametrize(
    "size", [(13_378, 13_377), (13_377, 13_378), (65_535, 65_535), (65_536, 1), (1, 65_536), (0, 5)]
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_headers_pixel_count_is_checked_before_decoding(size: tuple[int, int]):
    """CVE-2026-100650. The body is no image: a decoder that looked at it would say so."""
    assert not 0 < size[0] * size[1] <= MAX_PIXELS or max(size) > 65_535
    with pytest.raises(MediaError) as caught:
        decode_image(png(*size, b"no pixels"))
    assert "damaged" not in str(caught.value) or 0 in size


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_the_largest_header_that_is_allowed_gets_to_the_decoder():
    with pytest.raises(MediaError, match="cannot be decoded"):
        decode_image(png(13_377, 13_377, b"no pixels"))


def test_the_limit_of_pixels_can_be_lower():
    assert decode_image(picture(10, 10), max_pixels=100).size == (10, 10)
    for value in (picture(10, 11), Image.fromarray(picture(10, 11)), encode(picture(10, 11))):
        with pytest.raises(MediaError, match="11 x 10 pixels, more than the limit of 100"):
            decode_image(value, max_pixels=100)


def test_a_decompression_bomb_in_the_pixels_is_not_followed():
    """A gigabyte of zeros behind a header of four pixels: the decoder stops at the fourth."""
    squeeze = zlib.compressobj(9)
    block = b"\0" * (1 << 20)
    body = b"".join([squeeze.compress(block) for _ in range(20)] + [squeeze.flush()])
    assert pixels(png(2, 2, body)).sum() == 0


@pytest.mark.parametrize("name", [b"zTXt", b"iCCP", b"iTXt"])
def test_a_decompression_bomb_in_a_png_chunk_is_refused_or_left_alone(name: bytes):
    bomb = zlib.compress(b"\0" * (20 << 20))
    start = {b"zTXt": b"a\0\0", b"iCCP": b"a\0\0", b"iTXt": b"a\0\1\0\0\0"}[name]
    with pytest.raises(MediaError, match="damaged"):
        decode_image(png(2, 2, zlib.compress(b"\0" * 14), (name, start + bomb)))


def tiff(*changes: tuple[int, int], form: dict[str, Any] | None = None) -> bytes:
    """Return a TIFF file of 64 x 64 pixels with other values of some tags."""
    data = bytearray(encode(np.zeros((64, 64), np.uint8), "TIFF", **(form or {})))
    start = int.from_bytes(data[4:8], "little")
    for index in range(int.from_bytes(data[start : start + 2], "little")):
        at = start + 2 + 12 * index
        for tag, value in changes:
            if int.from_bytes(data[at : at + 2], "little") == tag:
                data[at : at + 12] = struct.pack("<HHII", tag, 4, 1, value)
    return bytes(data)


@pytest.mark.parametrize("compression", [None, "tiff_deflate", "tiff_lzw"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tiff_with_giant_strips_is_refused_or_read_as_its_header_says(compression: str | None):
    rows_per_strip, strip_bytes, strip_offsets = 278, 279, 273
    form = {"compression": compression} if compression else {}
    assert pixels(tiff(form=form)).shape == (64, 64, 3)
    assert pixels(tiff((rows_per_strip, 0xFFFF_FFFF), form=form)).shape == (64, 64, 3)
    with pytest.raises(MediaError):
        decode_image(tiff((strip_offsets, 0x7FFF_FFFF), (strip_bytes, 0x7FFF_FFFF), form=form))


def tiled(width: int, length: int) -> bytes:
    """Return a TIFF file of 2 x 2 grey pixels in one tile; the file ends after 256 bytes of it."""
    tags = {256: 2, 257: 2, 258: 8, 259: 1, 262: 1, 322: width, 323: length, 324: 0, 325: width * length & 0xFFFF_FFFF}
    end = 8 + 2 + 12 * len(tags) + 4
    entries = (struct.pack("<HHII", tag, 4, 1, end if tag == 324 else value) for tag, value in tags.items())
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + b"".join(entries) + bytes(4) + bytes(range(256))


def test_a_tiff_with_a_giant_tile_is_refused():
    assert pixels(tiled(16, 16))[..., 0].tolist() == [[0, 1], [16, 17]]
    for width, length in ((1 << 20, 32), (16, 1 << 21), (1 << 30, 1 << 30), (4097, 4096)):
        with pytest.raises(MediaError, match="tiles that are too large"):
            decode_image(tiled(width, length))


def test_a_bmp_with_run_length_encoding_is_refused():
    header = struct.pack("<IiiHHIIiiII", 40, 2, 1, 1, 8, 1, 6, 0, 0, 1, 0)
    data = b"BM" + struct.pack("<IHHI", 0, 0, 0, 58) + header + bytes(4) + bytes((2, 0, 0, 0, 0, 1))
    with pytest.raises(MediaError, match="run-length"):
        decode_image(data)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_exif_tags_that_share_their_values_take_no_memory(form: str):
    """Each of a thousand tags names the same 100 kB: together they would be 100 MB."""
    tags = [(tag, 7, 100_000, 8) for tag in range(40_000, 41_000)] + [(0x0112, 3, 1, 6)]
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(100_000)
    data = encode(picture(), form, exif=b"Exif\0\0II*\0\x08\0\0\0" + directory)
    tracemalloc.start()
    assert pixels(data).shape == (7, 5, 3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000_000


def test_a_jpeg_with_very_many_scans_is_refused():
    """Each scan of a progressive image costs a pass over all pixels."""
    data = encode(np.zeros((4000, 4000, 3), np.uint8), "JPEG", progressive=True)
    assert decode_image(data).size == (4000, 4000)
    scan = data[data.rfind(b"\xff\xda") : -2]
    with pytest.raises(MediaError, match="too many scans"):
        decode_image(data[:-2] + scan * 300 + data[-2:])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_truncated_files_are_refused(form: str):
    data = encode(picture(60, 80), form)
    for size in (len(data) * share // 10 for share in range(1, 10)):
        with pytest.raises(MediaError):
            decode_image(data[:size])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMATS)
def test_damaged_files_raise_nothing_but_media_errors(form: str):
    """A few hundred files with random bytes in their headers."""
    chance = random.Random(form)
    good = encode(picture(12, 13), form)
    for _ in range(200):
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(min(len(data), 200))] = chance.randrange(256)
        is_image_or_refused(bytes(data))


def is_image_or_refused(data: bytes) -> None:
    try:
        image = decode_image(data, max_pixels=1_000_000)
    except MediaError as error:
        assert not {"0x", "<", "object"} & set(str(error).split())  # noqa: PT017
    else:
        assert image.mode == "RGB"


STARTS = (
    b"",
    b"\x89PNG\r\n\x1a\n",
    b"\xff\xd8\xff",
    b"GIF89a",
    b"BM",
    b"II*\0",
    b"MM\0*",
    b"RIFF\x20\0\0\0WEBPVP8X",
    b"II+\0",
)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=150)
@given(st.sampled_from(STARTS), st.binary(max_size=120))
def test_random_headers_raise_nothing_but_media_errors(start: bytes, data: bytes):
    is_image_or_refused(start + data)


# Modes and orientation


def test_transparent_parts_are_laid_over_white():
    rgba = picture(channels=4)
    alpha = rgba[..., 3:] / 255
    expected = rgba[..., :3] * alpha + 255 * (1 - alpha)
    for value in (rgba, Image.fromarray(rgba), encode(rgba), encode(rgba, "TIFF"), encode(rgba, "WEBP", exact=True)):
        np.testing.assert_allclose(pixels(value), expected, atol=1)
    assert (pixels(np.zeros((2, 2, 4), np.uint8)) == 255).all()
    assert (pixels(np.array([[[9, 8, 7, 255]]], np.uint8)) == [9, 8, 7]).all()


def test_grey_with_alpha():
    image = Image.merge("LA", [Image.new("L", (1, 1), 40), Image.new("L", (1, 1), 0)])
    assert pixels(image).ravel().tolist() == [255] * 3
    assert pixels(encode(image)).ravel().tolist() == [255] * 3


def test_one_transparent_colour():
    colours = np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8)
    assert pixels(encode(colours, transparency=(1, 2, 3))).tolist() == [[[255, 255, 255], [4, 5, 6]]]
    grey = np.array([[7, 8]], np.uint8)
    assert pixels(encode(grey, transparency=7))[0, :, 0].tolist() == [255, 8]
    assert pixels(encode(grey.astype(np.uint16) * 257, transparency=7 * 257))[0, :, 0].tolist() == [255, 8]


def test_palettes():
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8)).convert("P")
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    colours = [[[10, 20, 30], [40, 50, 60], [70, 80, 90]]]
    assert pixels(image).tolist() == colours
    for form in ("PNG", "GIF", "BMP", "TIFF"):
        assert pixels(encode(image, form)).tolist() == colours
    assert pixels(encode(image, transparency=1)).tolist() == [[colours[0][0], [255] * 3, colours[0][2]]]
    assert pixels(encode(image, "GIF", transparency=2)).tolist() == [[*colours[0][:2], [255] * 3]]


@pytest.mark.parametrize("form", ["PNG", "TIFF", "BMP"])
def test_one_bit(form: str):
    image = Image.fromarray(np.array([[0, 255, 255]], np.uint8)).convert("1")
    assert pixels(encode(image, form))[0, :, 1].tolist() == [0, 255, 255]


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_and_not_clipped(form: str):
    values = np.array([[0, 255, 256, 32_768, 65_535]], np.uint16)
    assert pixels(encode(values, form))[0, :, 2].tolist() == [0, 0, 1, 128, 255]


def test_16_bit_colours():
    body = zlib.compress(b"\0" + struct.pack(">6H", 0, 0x8000, 0xFFFF, 0x1234, 0x00FF, 0x0100))
    assert pixels(png(2, 1, body, depth=16)).tolist() == [[[0, 0x80, 255], [0x12, 0, 1]]]


@pytest.mark.parametrize("form", ["JPEG", "TIFF"])
def test_cmyk(form: str):
    image = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    assert np.abs(pixels(encode(image, form)).astype(int) - [0, 255, 255]).max() <= 3


@pytest.mark.parametrize("mode", ["YCbCr", "HSV", "RGBX", "RGBa", "La", "PA", "RGBA", "LA", "L", "P", "1", "CMYK"])
def test_pillow_images_of_every_mode(mode: str):
    assert pixels(Image.new(mode, (3, 2))).shape == (2, 3, 3)


@pytest.mark.parametrize("mode", ["I", "F", "LAB"])
def test_modes_without_a_range_are_refused(mode: str):
    with pytest.raises(MediaError, match=f"mode {mode} has no fixed range"):
        decode_image(Image.new(mode, (3, 2)))


UPRIGHT = np.kron(np.arange(0, 240, 40).astype(np.uint8).reshape(2, 3), np.ones((16, 16), np.uint8))
STORED = {
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.T,
    6: UPRIGHT.T[::-1],
    7: UPRIGHT.T[::-1, ::-1],
    8: UPRIGHT.T[:, ::-1],
    9: UPRIGHT,
}
"""How an upright image is stored under each EXIF orientation."""


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", STORED)
def test_exif_orientation_is_applied_once(form: str, orientation: int):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(np.ascontiguousarray(STORED[orientation]), form, exif=exif)
    for value in (data, Image.open(io.BytesIO(data))):
        got = pixels(value)
        assert got.shape == (32, 48, 3)
        assert np.abs(got[..., 0].astype(int) - UPRIGHT).max() <= 2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_exif_data_is_left_alone():
    for exif in (
        b"Exif\0\0nonsense",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\xff\xff\xff\xff",
    ):
        assert pixels(encode(picture(), "PNG", exif=exif)).shape == (5, 7, 3)


# Arrays and other values


def test_shapes_of_arrays():
    image = picture()
    np.testing.assert_array_equal(pixels(image), image)
    np.testing.assert_array_equal(pixels(np.ascontiguousarray(image.transpose(2, 0, 1))), image)
    np.testing.assert_array_equal(pixels(image[::-1, ::2]), image[::-1, ::2])
    np.testing.assert_array_equal(pixels(image[..., 0])[..., 1], image[..., 0])


@pytest.mark.parametrize("shape", [(3, 5, 3), (3, 5, 4), (3, 3, 3)])
def test_arrays_whose_channels_may_be_first_or_last_are_refused(shape: tuple[int, ...]):
    with pytest.raises(MediaError, match="its channels may be first or last"):
        decode_image(np.zeros(shape, np.uint8))


@pytest.mark.parametrize("shape", [(), (5,), (4, 5, 5), (5, 5, 2), (1, 5, 5), (1, 5, 5, 3), (2, 3, 5, 5)])
def test_arrays_of_other_shapes_are_refused(shape: tuple[int, ...]):
    with pytest.raises(MediaError, match="it has no channels"):
        decode_image(np.zeros(shape, np.uint8))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0, 3), (3, 0, 5)])
def test_empty_arrays_are_refused(shape: tuple[int, ...]):
    with pytest.raises(MediaError, match="is empty"):
        decode_image(np.zeros(shape, np.uint8))


@pytest.mark.parametrize("kind", [np.float32, np.int64, np.bool_, np.uint16])
def test_arrays_of_other_types_are_refused(kind: type):
    with pytest.raises(MediaError, match="must be uint8"):
        decode_image(np.zeros((5, 5, 3), kind))


@pytest.mark.parametrize("value", ["picture.png", None, [1, 2], object()])
def test_other_values_are_refused(value: object):
    with pytest.raises(MediaError, match=f"not {type(value).__name__}") as caught:
        decode_image(value)
    assert "0x" not in str(caught.value)


def test_a_users_image_stays_as_it_is():
    image = Image.fromarray(picture())
    image.info["comment"] = "mine"
    decoded = decode_image(image)
    decoded.putpixel((0, 0), (1, 1, 1))
    assert image.info == {"comment": "mine"}
    np.testing.assert_array_equal(np.asarray(image), picture())


def test_a_users_damaged_file_is_refused():
    image = Image.open(io.BytesIO(encode(picture(60, 80))[:-500]))
    with pytest.raises(MediaError, match="damaged"):
        decode_image(image)


# Hashes


def some_hashes() -> Iterator[str]:
    grey = np.arange(12, dtype=np.uint8)
    for shape in ((3, 4), (4, 3), (12, 1), (2, 6)):
        yield content_hash(Image.fromarray(grey.reshape(shape)))
        yield content_hash(grey.reshape(shape))
        yield content_hash(grey.reshape(shape).astype(np.int8))
    yield content_hash(Image.fromarray(grey.reshape(2, 2, 3)))
    yield content_hash(Image.fromarray(grey.reshape(2, 2, 3)[..., ::-1].copy()))
    yield uuid_hash("image", "a")
    yield uuid_hash("video", "a")
    yield uuid_hash("image", "b")
    yield uuid_hash("image", "\udcff")


def test_a_hash_depends_on_mode_size_and_pixels():
    """PYSEC-2025-43: images with the same bytes in another shape were taken for each other."""
    hashes = list(some_hashes())
    assert len(set(hashes)) == len(hashes)
    assert list(some_hashes()) == hashes
    assert all(len(value) == 64 for value in hashes)


def test_the_same_pixels_have_the_same_hash_whatever_file_they_came_in():
    hashes = {content_hash(decode_image(encode(picture(), form))) for form in LOSSLESS}
    described = PngImagePlugin.PngInfo()
    described.add_text("comment", "other")
    hashes.add(content_hash(decode_image(encode(picture(), pnginfo=described))))
    assert hashes == {content_hash(decode_image(picture()))}
    assert content_hash(picture()[:, ::2]) == content_hash(picture()[:, ::2].copy())
