"""Make Ctrl-C end a call between steps: interrupting a step would leave the engine unusable.

During start-up an interrupt must not get lost: JAX runs code in the garbage collector, which drops exceptions.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

_AGAIN_SECONDS = 0.01


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt if Ctrl-C was pressed. A second Ctrl-C interrupts at once.

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
    """Raise a KeyboardInterrupt again whenever Python drops it. Only the main thread receives interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = sys.unraisablehook

    def again(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            before(dropped)
            return
        threading.Thread(target=interrupt).start()

    def interrupt() -> None:
        """Interrupt the main thread after it has left the hook, where the interrupt would be dropped."""
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        time.sleep(_AGAIN_SECONDS)
        while _is_within(again.__code__, main_thread):
            time.sleep(_AGAIN_SECONDS)
        signal.pthread_kill(main_thread, signal.SIGINT)

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before


def _is_within(code: CodeType, thread_id: int) -> bool:
    """Return whether a thread is inside a function or one of its callees."""
    frame = sys._current_frames().get(thread_id)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _nothing() -> None:
    """Do nothing."""
