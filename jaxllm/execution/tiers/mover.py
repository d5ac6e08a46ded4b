"""Move blocks between the devices and the host in the background, in the order that the scheduler asks for.

A save is launched at once, before the step that overwrites its blocks; a thread waits for it and keeps the content. A
fetch is made ready by another thread: it copies slots side by side and sends them to the devices. Then the thread of
the steps launches the programs that fill the blocks, before the next step. So no step waits for a copy.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import batched
from typing import NamedTuple

import numpy as np
from jax import Array

from jaxllm.execution.launcher import Launcher
from jaxllm.execution.options import running
from jaxllm.execution.tiers.host_pool import HostPool
from jaxllm.execution.tiers.move_shape import MOVED_BLOCKS
from jaxllm.scheduling.cache.tiers import Load, Moves, Save, Tiers

logger = logging.getLogger(__name__)


class _Filling(NamedTuple):
    """Content on the devices, and the blocks that it is for."""

    holder: int
    block_ids: np.ndarray
    content: tuple[Array, ...]


class Mover:
    """Run the moves of one engine. All methods are for the thread of the steps."""

    def __init__(self, launcher: Launcher, hosts: Sequence[HostPool]) -> None:
        """Move blocks of a launcher's pools to the slots of each holder, and back."""
        self._launcher, self._hosts = launcher, hosts
        self._executors = ThreadPoolExecutor(1, "jaxllm-save"), ThreadPoolExecutor(1, "jaxllm-fetch")
        self._round = _Round()

    def begin(self, moves: Moves) -> None:
        """Launch saves, and begin to make fetches ready."""
        saving, fetching = self._executors
        by_holder: Mapping[int, list[Save]] = defaultdict(list)
        for save in moves.saves:
            by_holder[save.holder].append(save)
        for holder, saves in by_holder.items():
            for some in batched(saves, MOVED_BLOCKS):
                content = self._launcher.read_blocks(holder, _ids([save.block_id for save in some]))
                for array in content:
                    array.copy_to_host_async()
                saving.submit(self._save, self._round, some, content)
        for number in moves.given_up:
            self._round.fetching.discard(number)
        for number, loads in moves.fetches.items():
            self._round.fetching.add(number)
            fetching.submit(self._fetch, self._round, number, loads)

    def end(self, tiers: Tiers) -> None:
        """Tell the tiers of the moves that have ended; fill the blocks of fetches that are ready."""
        ended = self._round
        while ended.saves:
            save, is_right = ended.saves.popleft()
            tiers.end_save(save, is_right=is_right)
        while ended.fetches:
            number, fillings = ended.fetches.popleft()
            if number not in ended.fetching:
                continue
            ended.fetching.discard(number)
            for filling in fillings or ():
                self._launcher.fill_blocks(*filling)
            tiers.end_fetch(number, is_right=fillings is not None)

    def wait(self, seconds: float) -> None:
        """Wait until some move has ended, but no longer than some seconds."""
        self._round.has_ended.wait(seconds)
        self._round.has_ended.clear()

    def reset(self) -> None:
        """Forget all moves under way: the devices' pools are new."""
        self._round = _Round()

    def close(self) -> None:
        """End the threads; a move under way is not waited for."""
        self.reset()
        for executor in self._executors:
            executor.shutdown(wait=False, cancel_futures=True)

    @running()
    def _save(self, current: _Round, saves: Sequence[Save], content: tuple[Array, ...]) -> None:
        try:
            if current is self._round:
                self._hosts[saves[0].holder].write([save.slot for save in saves], content)
            is_right = True
        except Exception:
            logger.exception("%d blocks could not be kept by the host", len(saves))
            is_right = False
        current.saves.extend((save, is_right) for save in saves)
        current.has_ended.set()

    @running()
    def _fetch(self, current: _Round, number: int, loads: Sequence[Load]) -> None:
        fillings = None
        try:
            if number in current.fetching:
                fillings = list(self._read(loads))
        except Exception:
            logger.exception("%d blocks could not be fetched from the host", len(loads))
        current.fetches.append((number, fillings))
        current.has_ended.set()

    def _read(self, loads: Sequence[Load]) -> Iterator[_Filling]:
        by_holder: Mapping[int, list[Load]] = defaultdict(list)
        for load in loads:
            by_holder[load.holder].append(load)
        for holder, of_holder in by_holder.items():
            for some in batched(of_holder, MOVED_BLOCKS):
                content = self._hosts[holder].read([load.slot for load in some], MOVED_BLOCKS)
                yield _Filling(holder, _ids([load.block_id for load in some]), content)


class _Round:
    """The moves between two resets; threads append what has ended."""

    def __init__(self) -> None:
        self.fetching: set[int] = set()
        """The fetches that are wanted."""
        self.saves: deque[tuple[Save, bool]] = deque()
        self.fetches: deque[tuple[int, list[_Filling] | None]] = deque()
        """None stands for the content of a fetch that has failed."""
        self.has_ended = threading.Event()


def _ids(block_ids: Sequence[int]) -> np.ndarray:
    """Return block ids for one run of a program, with -1 for none behind them."""
    ids_m = np.full(MOVED_BLOCKS, -1, np.int32)
    ids_m[: len(block_ids)] = block_ids
    return ids_m
