"""Ctrl-C ends a call between steps, not within one: a step cut in half would leave the engine in no usable state.

While an engine is made it must not get lost: JAX runs code in the garbage collector, which drops what that raises.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_SECONDS = 0.01


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


@contextmanager
def lasting_interrupts() -> Iterator[None]:
    """Raise a KeyboardInterrupt that Python drops once more, and until it arrives; only the main thread gets any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = sys.unraisablehook

    def again(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            before(dropped)
            return
        # From a thread, or it would be raised within this function and dropped again.
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        threading.Timer(AGAIN_SECONDS, signal.pthread_kill, (main_thread, signal.SIGINT)).start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before


def _nothing() -> None:
    """Check nothing."""
