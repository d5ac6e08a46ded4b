"""Read prompts that come as the embeddings of their tokens: arrays, or files with one array in base64.

Nothing in a file is run, and nothing is allocated by a size that a header claims: pickles, torch's among them, are
refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any

import numpy as np
from numpy.lib import format as npy

from jaxllm.core_messages import EMBEDS_PART, PROMPT_EMBEDS, MediaItem, MediaSpan, PromptMedia
from jaxllm.loading.safetensors import read_one
from jaxllm.media.embeds.checked import check_rows, to_array
from jaxllm.media.embeds.tensors import read_npy
from jaxllm.media.errors import MediaError
from jaxllm.media.sources import is_array
from jaxllm.params.checks import shown

_FORMS = "send a safetensors file with one tensor, or a .npy file, in base64"
_PICKLES = (b"PK\x03\x04", b"\x80")
"""How the files of torch.save and pickle.dumps begin. Safetensors files may too, but have a brace as their 9th byte."""


def read_prompt_embeds(value: Any, row_size: int, most_rows: int) -> PromptMedia:
    """Return a prompt of embeddings in parts of EMBEDS_PART rows, each known by a hash of its numbers.

    `value` is an array [n, `row_size`] of floats, of any library, with 1 to `most_rows` rows, or a safetensors file
    with one such tensor, or a .npy file, in base64. Raises MediaError for anything else, and for numbers that are not
    finite.
    """
    if isinstance(value, str):
        array = _read_file(value)
    elif is_array(value):
        array = to_array(value, "the embeddings")
    else:
        raise MediaError(f"must be an array, or a file of one in base64, got {shown(value)}.")
    rows_rw = check_rows(array, row_size, most_rows)
    starts = range(0, len(rows_rw), EMBEDS_PART)
    return PromptMedia(items=[_part(rows_rw[start : start + EMBEDS_PART], start) for start in starts])


def _part(rows_rw: np.ndarray, offset: int) -> MediaItem:
    numbers = rows_rw.tobytes()
    return MediaItem(
        key=hashlib.sha256(numbers).digest(),
        modality=PROMPT_EMBEDS,
        grids=[],
        size=(0, 0),
        patches=numbers,
        spans=[MediaSpan(offset, len(rows_rw), 0)],
        is_encoded=True,
    )


def _read_file(text: str) -> np.ndarray:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"the embeddings are not base64: {_FORMS}.") from error
    if data.startswith(_PICKLES) and data[8:9] != b"{":
        raise MediaError(f"pickles, as torch.save writes them, are not read: {_FORMS}.")
    try:
        return read_npy(data) if data.startswith(npy.MAGIC_PREFIX) else read_one(data)
    except MediaError:
        raise
    except Exception as error:  # the reader of numpy raises errors of many kinds
        raise MediaError(f"the embeddings are damaged or of another format: {_FORMS}.") from error
