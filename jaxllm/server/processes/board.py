"""Share counts between front-end processes: a row of numbers for each, in memory of all, under one lock."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator
from enum import IntEnum

from jaxllm.engine.online.admission import NUM_LENGTHS, Admission, PromptSpeed
from jaxllm.server.http.state import ServerLoad


class Column(IntEnum):
    """What the numbers of a row count."""

    QUEUED_REQS = 0
    """Sequences that wait or run, as admission counts them."""
    QUEUED_TOKENS = 1
    """Prompt tokens of requests without an output yet."""
    LOAD = 2
    """HTTP requests that run the model."""
    CONNECTIONS = 3
    IS_ACCEPTING = 4
    """1 while the process takes connections."""


_ITEM_BYTES = 8
_NUM_COUNTERS, _NUM_FLOATS = 2, len(PromptSpeed().state)
_FIRST_ROW = _NUM_COUNTERS + _NUM_FLOATS
_ROW_ITEMS = len(Column) + NUM_LENGTHS


def _num_bytes(num_rows: int) -> int:
    return _ITEM_BYTES * (_FIRST_ROW + num_rows * _ROW_ITEMS)


class Board:
    """Numbers in memory that the front ends and their parent map: counters of requests and adapters, the speed of
    prompts, then the rows, which end in the prompt tokens that wait by the classes of `Admission`.

    The system releases the lock of a process that ends, and the parent clears its row.
    """

    def __init__(self, fd: int, num_rows: int) -> None:
        """Map the memory behind a file descriptor that `make` has made, in this process or its parent."""
        self.fd, self._num_rows = fd, num_rows
        self._memory = mmap.mmap(fd, _num_bytes(num_rows))
        self._items = memoryview(self._memory).cast("q")
        self._floats = memoryview(self._memory)[_ITEM_BYTES * _NUM_COUNTERS : _ITEM_BYTES * _FIRST_ROW].cast("d")
        lengths = [self._index(row, 0) + len(Column) for row in range(num_rows)]
        self.lengths = [self._items[start : start + NUM_LENGTHS] for start in lengths]
        """The prompt tokens that wait at each process, by the classes of their prompts' lengths."""

    @classmethod
    def make(cls, num_rows: int) -> Board:
        """Make a board of zeros."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("jaxllm-board")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _num_bytes(num_rows))
        return cls(fd, num_rows)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from the board while a block runs; it must not wait for anything."""
        fcntl.lockf(self.fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def arrivals(self) -> Iterator[int]:
        """Yield numbers, without an end, that no other process gets: each is the count of those before it."""
        while True:
            yield self._next(0)

    def next_adapter(self) -> int:
        """Return a number, from 1, that no other process gets."""
        return 1 + self._next(1)

    @property
    def speed(self) -> tuple[float, ...]:
        """Return the state of a `PromptSpeed`; to be read and set in the block of one lock."""
        return tuple(self._floats)

    @speed.setter
    def speed(self, state: tuple[float, ...]) -> None:
        for index, value in enumerate(state):
            self._floats[index] = value

    def get(self, row: int, column: Column) -> int:
        """Return a number."""
        return self._items[self._index(row, column)]

    def put(self, row: int, column: Column, value: int) -> None:
        """Set a number, which only the row's process may do, or the parent after its end."""
        self._items[self._index(row, column)] = value

    def total(self, column: Column) -> int:
        """Return the sum of a column."""
        return sum(self.get(row, column) for row in range(self._num_rows))

    def least_connections(self) -> int:
        """Return the number of connections of the process that has the fewest; 0 without any."""
        rows = [row for row in range(self._num_rows) if self.get(row, Column.IS_ACCEPTING)]
        return min((self.get(row, Column.CONNECTIONS) for row in rows), default=0)

    def clear(self, row: int) -> None:
        """Forget a process that has ended."""
        for index in range(self._index(row, 0), self._index(row + 1, 0)):
            self._items[index] = 0

    def close(self) -> None:
        """Release the memory of this process's view."""
        for view in (*self.lengths, self._floats, self._items):
            view.release()
        self._memory.close()
        os.close(self.fd)

    def _next(self, counter: int) -> int:
        with self.locked():
            number = self._items[counter]
            self._items[counter] = number + 1
        return number

    @staticmethod
    def _index(row: int, column: int) -> int:
        return _FIRST_ROW + row * _ROW_ITEMS + column


class SharedAdmission(Admission):
    """The bounds on the requests of all front ends together. `num_reqs` and `num_tokens` are those of all, too."""

    def __init__(
        self,
        max_num_reqs: int | None,
        max_num_tokens: int | None,
        max_ttft_ms: float | None = None,
        speed: PromptSpeed | None = None,
        *,
        short_prompts_pass: bool = False,
        board: Board,
        row: int,
    ) -> None:
        """Count this process's part in its row of the board."""
        super().__init__(max_num_reqs, max_num_tokens, max_ttft_ms, speed, short_prompts_pass=short_prompts_pass)
        self._board, self._row = board, row
        self._waiting = board.lengths[row]

    def reserve_reqs(self, count: int) -> None:
        """Reserve room for `count` sequences, all or none. Raises QueueOverflowError."""
        with self._board.locked():
            self.num_reqs = self._board.total(Column.QUEUED_REQS)
            super().reserve_reqs(count)
            self._add(Column.QUEUED_REQS, count)

    def num_unfinished(self) -> int:
        """Return the number of sequences of all front ends that have not ended."""
        with self._board.locked():
            return int(self._board.total(Column.QUEUED_REQS))

    def reserve_tokens(self, count: int) -> None:
        """Take room for a prompt of `count` tokens. Raises MaxQueuedTokensError or LateFirstTokenError."""
        with self._prompts_of_all():
            super().reserve_tokens(count)
            self._add(Column.QUEUED_TOKENS, count)

    def release_reqs(self, count: int) -> None:
        """Give back the room of `count` sequences."""
        self._add(Column.QUEUED_REQS, -count)

    def release_tokens(self, count: int, *, has_output: bool) -> None:
        """Give back the room of a prompt, at its first output or because it was given up."""
        with self._prompts_of_all():
            super().release_tokens(count, has_output=has_output)
            self._add(Column.QUEUED_TOKENS, -count)

    def _num_waiting(self, num_classes: int) -> int:
        return sum(sum(lengths[:num_classes]) for lengths in self._board.lengths)

    @contextlib.contextmanager
    def _prompts_of_all(self) -> Iterator[None]:
        """Go on from what all front ends have counted and measured, and share what a block adds."""
        with self._board.locked():
            self.num_tokens, self._speed.state = self._board.total(Column.QUEUED_TOKENS), self._board.speed
            try:
                yield
            finally:
                self._board.speed = self._speed.state

    def _add(self, column: Column, count: int) -> None:
        self._board.put(self._row, column, self._board.get(self._row, column) + count)


class SharedLoad(ServerLoad):
    """Counts the requests of this process on the board, and shows those of all."""

    def __init__(self, board: Board, row: int) -> None:
        super().__init__()
        self._board, self._row = board, row

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request that runs the model while its answer is made."""
        with super().counted():
            self._board.put(self._row, Column.LOAD, self.num_requests)
            try:
                yield
            finally:
                self._board.put(self._row, Column.LOAD, self.num_requests - 1)

    def total(self) -> int:
        """Return the number of requests that all front ends are answering."""
        return self._board.total(Column.LOAD)
