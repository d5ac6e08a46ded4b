"""Read a checkpoint's bytes into the system's cache of files with several threads, ahead of the one that loads them.

The pages of a memory map are read one after the other when they are needed, which leaves most of a network disk's
bandwidth unused.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jaxllm.loading.mapped_file import FileSpan

MOST_BYTES_AHEAD = 4 << 30
"""The most bytes that are read and not yet loaded; the system may drop any of them."""


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """How to read ahead: vLLM's safetensors_prefetch_num_threads and safetensors_prefetch_block_size."""

    num_threads: int = 0
    block_bytes: int = 16 << 20

    @contextmanager
    def running(self, spans: Iterable[FileSpan]) -> Iterator[Callable[[int], object]]:
        """Read the spans, in order; yield the function to call with the number of bytes that were loaded.

        An error of reading ends it quietly: the thread that loads meets it too.
        """
        queue = _Blocks(spans, self.block_bytes)
        threads = [
            threading.Thread(target=_read, args=(queue, self.block_bytes), name="read-ahead", daemon=True)
            for _ in range(self.num_threads)
        ]
        for thread in threads:
            thread.start()
        try:
            yield queue.advance
        finally:
            queue.stop()
            for thread in threads:
                thread.join()


class _Blocks:
    """The blocks that are still to be read. All methods may be called by any thread."""

    def __init__(self, spans: Iterable[FileSpan], block_bytes: int) -> None:
        self._blocks = (
            FileSpan(span.path, start, min(block_bytes, span.start + span.num_bytes - start))
            for span in spans
            for start in range(span.start, span.start + span.num_bytes, block_bytes)
        )
        self._changed = threading.Condition()
        self._num_ahead = 0
        self._is_stopped = False

    def take(self) -> FileSpan | None:
        """Return the next block once few enough bytes are ahead; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._num_ahead < MOST_BYTES_AHEAD)
            block = None if self._is_stopped else next(self._blocks, None)
            self._num_ahead += 0 if block is None else block.num_bytes
            return block

    def advance(self, num_bytes: int) -> None:
        with self._changed:
            self._num_ahead -= num_bytes
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()


def _read(blocks: _Blocks, block_bytes: int) -> None:
    """Read blocks until none is left, and throw away what they hold."""
    buffer, files = memoryview(bytearray(block_bytes)), dict[Path, int]()
    with ExitStack() as opened:
        while (block := blocks.take()) is not None:
            try:
                if block.path not in files:
                    files[block.path] = os.open(block.path, os.O_RDONLY)
                    opened.callback(partial(os.close, files[block.path]))
                os.preadv(files[block.path], [buffer[: block.num_bytes]], block.start)
            except OSError:
                return
