"""Write to tests/data/media what torch, and transformers' processors with it, make of images of all kinds.

    python scripts/make.py pixel_goldens        # in the environment of scripts/peers.sh hf

- resize.json: torch's antialiased interpolation of 8-bit images. A line has the seed of the image's noise, its (height,
  width) before and after, Pillow's number of the filter, and the SHA-256 of the resized pixels [channels, height,
  width].
- files.npz: the bytes of image files, and values of the patches that each family's processor makes of them, at random
  places. The files are read by Pillow and turned upright; the processors lay transparent parts over white.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from make.media_goldens import FAMILIES, patches_of, picture

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "data" / "media"
NUM_VALUES = 64
FILTERS = {2: "bilinear", 3: "bicubic", 1: "lanczos"}
"""Torch's names of the filters by Pillow's numbers."""
SIZES = (
    *(((30, 47), (56, 84)), ((56, 84), (30, 47)), ((30, 47), (30, 20)), ((30, 47), (90, 47))),
    *(((1, 1), (28, 28)), ((1, 300), (14, 336)), ((300, 1), (40, 3)), ((2, 3), (1, 2)), ((7, 5), (7, 1))),
    *(((517, 389), (56, 56)), ((40, 4000), (14, 448)), ((3000, 10), (12, 12)), ((64, 48), (63, 49))),
)
"""Heights and widths before and after. Torch fails where an image of three channels becomes a single pixel."""


def noise(seed: int, height: int, width: int) -> np.ndarray:
    """Return noise, uint8 [height, width, 3]: of all values, or of black and white alone. Tests make the same."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, (height, width, 3), np.uint8)
    return values if seed % 2 else np.where(values < 128, np.uint8(0), np.uint8(255))


def files() -> dict[str, bytes]:
    """Return image files of the kinds that are not plain RGB, by names."""
    colours = picture(45, 67)
    alpha = Image.fromarray(np.add.outer(np.arange(45) * 3, np.arange(67)).astype(np.uint8))
    grey = colours.convert("L")
    clear = [*colours.split(), alpha]
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    palette = colours.quantize(16)
    return {
        "rgba": _file(Image.merge("RGBA", clear)),
        "grey_alpha": _file(Image.merge("LA", [grey, alpha])),
        "palette": _file(palette),
        "palette_transparent": _file(palette, transparency=3),
        "colour_key": _file(colours, transparency=colours.getpixel((5, 5))),
        "grey": _file(grey),
        "black_white": _file(grey.convert("1")),
        "turned": _file(colours, exif=exif),
        "turned_transparent": _file(Image.merge("RGBA", clear), exif=exif),
        "grey_16_bits": _file(Image.fromarray(np.asarray(grey).astype(np.uint16) * 256 + 77)),
    }


def _file(image: Image.Image, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG", **options)
    return stream.getvalue()


def write_files() -> None:
    """Write the files, and values of their patches. Of 16 bits the processors get the upper 8, as of colours."""
    arrays: dict[str, np.ndarray] = {}
    for kind, data in files().items():
        arrays[f"file-{kind}"] = np.frombuffer(data, np.uint8)
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        if image.mode == "I;16":
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        for family in FAMILIES:
            patches = patches_of(family, image)
            rng = np.random.default_rng(len(data))
            rows, columns = (rng.integers(0, most, NUM_VALUES) for most in patches.shape)
            arrays[f"{family}-{kind}"] = patches[rows, columns]
    np.savez_compressed(FOLDER / "files.npz", **arrays)


def write_resize() -> None:
    """Write digests of resized noise."""
    lines = []
    for seed, (resample, (before, after)) in enumerate((resample, size) for resample in FILTERS for size in SIZES):
        image = torch.from_numpy(noise(seed, *before)).permute(2, 0, 1).contiguous()[None]
        resized = torch.nn.functional.interpolate(
            image, size=after, mode=FILTERS[resample], align_corners=False, antialias=True
        )
        lines.append([seed, before, after, resample, hashlib.sha256(resized.numpy().tobytes()).hexdigest()])
    (FOLDER / "resize.json").write_text(json.dumps(lines, separators=(",", ":")).replace("],[", "],\n[") + "\n")


def main(arguments: list[str] | None = None) -> None:
    argparse.ArgumentParser(prog="make.py pixel_goldens", description=__doc__).parse_args(arguments)
    write_resize()
    write_files()


if __name__ == "__main__":
    main()
