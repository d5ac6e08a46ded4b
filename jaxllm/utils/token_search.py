"""Search token ids, in C: prompts have up to a million of them, and searches run between steps."""

from __future__ import annotations

from array import array

WIDTH = array("i").itemsize


def find_last(text: bytes, wanted: bytes, end: int | None = None) -> int | None:
    """Return where the last occurrence of some token ids begins, or None; both are bytes of int32 arrays.

    The occurrence lies in the first `end` tokens, if that is given.
    """
    stop = len(text) if end is None else end * WIDTH
    while (found := text.rfind(wanted, 0, stop)) >= 0:
        if found % WIDTH == 0:
            return found // WIDTH
        stop = found + len(wanted) - 1
    return None
