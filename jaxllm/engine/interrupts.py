"""Ctrl-C between steps, not within one: a step cut in half would leave the engine in no usable state."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt if Ctrl-C was pressed; pressing twice interrupts at once.

    Off the main thread, or where the program handles SIGINT itself, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield _nothing
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield _nothing
        return
    pressed: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        if len(pressed) > 1:
            signal.default_int_handler(number, frame)

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, remember)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()


def _nothing() -> None:
    """Check nothing."""
