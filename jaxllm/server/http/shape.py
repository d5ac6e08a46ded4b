"""Check a body before it is decoded: the number of its values, and how deep they are nested."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    import numpy as np

MAX_DEPTH = 200
"""The maximum depth of nested lists and objects. Recursive code has its limit beyond."""
MAX_LISTS = 2**17
"""The maximum number of lists and objects. Each takes 60 bytes or more, though written in two."""
MAX_NAMES = 2**17
"""The maximum number of field names in all objects."""
MAX_VALUES = 2**22
"""The maximum number of values. A token id takes 24 bytes, though written in two."""
PIECE = 1 << 18
"""Bytes checked at a time. Other threads run between two pieces of a long body."""
_QUOTE, _BACKSLASH, _COLON, _COMMA = b'"\\:,'
_OPEN, _CLOSE = b"[{", b"]}"


def check_shape(body: bytes) -> None:
    """Raise VLLMValidationError for a body of too deep or too many values, in time linear in its length."""
    num_open = body.count(b"[") + body.count(b"{")
    if num_open <= MAX_DEPTH and body.count(b":") <= MAX_NAMES and body.count(b",") <= MAX_VALUES:
        return  # even if none of them is part of a text
    import numpy as np  # few bodies come here

    counts = np.zeros(3, np.int64)
    depth, is_inside, is_escaped = 0, False, False
    for start in range(0, len(body), PIECE):
        piece = np.frombuffer(body, np.uint8, min(PIECE, len(body) - start), start)
        quotes, is_escaped = _quotes(piece, is_escaped)
        is_inside_c = (np.cumsum(quotes, dtype=np.int32) + is_inside) % 2 == 1
        is_inside = bool(is_inside_c[-1])
        outside = piece[~is_inside_c]
        opens = np.isin(outside, np.frombuffer(_OPEN, np.uint8))
        counts += [opens.sum(), (outside == _COLON).sum(), (outside == _COMMA).sum()]
        depths = depth + np.cumsum(opens.astype(np.int32) - np.isin(outside, np.frombuffer(_CLOSE, np.uint8)))
        if depths.size:
            depth = int(depths[-1])
            if depths.max() > MAX_DEPTH:
                message = f"The body's lists and objects lie more than {MAX_DEPTH} levels deep in each other."
                raise VLLMValidationError(message)
        for count, most, what in zip(counts, _MOST, _WHAT, strict=True):
            if count > most:
                raise VLLMValidationError(f"The body has more than {most} {what}: split the request.")


_MOST = (MAX_LISTS, MAX_NAMES, MAX_VALUES)
_WHAT = ("lists and objects", "names of fields", "values")


def _quotes(piece: np.ndarray, is_escaped: bool) -> tuple[np.ndarray, bool]:
    """Return where quotes begin or end a string, and whether the byte after the piece is escaped. `is_escaped` tells it
    of the piece's first byte.
    """
    import numpy as np

    quotes = piece == _QUOTE
    backslashes = piece == _BACKSLASH
    if not backslashes.any():
        quotes[0] &= not is_escaped
        return quotes, False
    places = np.arange(piece.size, dtype=np.int32)
    other = np.where(backslashes, np.int32(-1), places)
    if is_escaped and backslashes[0]:
        other[0] = 0  # the backslash before it escapes it
    last_other = np.maximum.accumulate(other)
    run_before = np.empty_like(places)
    run_before[0] = is_escaped
    run_before[1:] = places[:-1] - last_other[:-1]
    quotes &= run_before % 2 == 0
    return quotes, bool((places[-1] - last_other[-1]) % 2)
