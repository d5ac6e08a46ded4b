"""Search token ids with `bytes.rfind`: prompts have up to a million ids, and searches run between steps."""

from __future__ import annotations

from array import array

WIDTH = array("i").itemsize


def find_last(text: bytes, wanted: bytes, end: int | None = None) -> int | None:
    """Return the start index of the last occurrence of some token ids, or None. Both are bytes of int32 arrays.

    With `end`, only the first `end` tokens are searched.
    """
    stop = len(text) if end is None else end * WIDTH
    while (start := text.rfind(wanted, 0, stop)) >= 0:
        if start % WIDTH == 0:
            return start // WIDTH
        stop = start + len(wanted) - 1
    return None
