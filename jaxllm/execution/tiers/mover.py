"""Move blocks between the devices and the host in the background, in the order that the scheduler asks for.

A save is launched at once, before the step that overwrites its blocks; a thread waits for it and keeps the content. A
fetch is made ready by another thread: it copies slots side by side and sends them to the devices. Then the thread of
the steps launches the programs that fill the blocks, before the next step. So no step waits for a copy.

If there is a folder, a third thread writes what was saved to files, as far as it keeps up. A fetch reads files into
slots first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import batched
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jaxllm.core_messages import TiersStats, TierStats
from jaxllm.execution.launcher import Launcher
from jaxllm.execution.options import running
from jaxllm.execution.tiers.folder import BlockFolder
from jaxllm.execution.tiers.host_pool import HostPool
from jaxllm.execution.tiers.move_shape import MOVED_BLOCKS
from jaxllm.scheduling.cache.fetch_times import Part, PartTime
from jaxllm.scheduling.cache.tiers import Load, Moves, Save, Tiers

logger = logging.getLogger(__name__)

_UNWRITTEN_BYTES = 2**28
"""The most bytes that wait to be written to files; what comes meanwhile is not written."""
_FLUSH_SECONDS = 10.0
"""How long a shutdown waits for what is saved and written."""


class _Filling(NamedTuple):
    """Content on the devices, and the blocks that it is for."""

    holder: int
    block_ids: np.ndarray
    content: tuple[Array, ...]


class Mover:
    """Run the moves of one engine. All methods are for the thread of the steps."""

    def __init__(
        self,
        launcher: Launcher,
        hosts: Sequence[HostPool],
        files: BlockFolder | None = None,
        are_files_right: Callable[[], bool] = lambda: True,
    ) -> None:
        """Move blocks of a launcher's pools to the slots of each holder, and to files if there are any, and back.

        `are_files_right` tells whether files are still of the weights that the launcher has.
        """
        self.are_files_right = are_files_right
        self._launcher, self._hosts, self.files = launcher, hosts, files
        self._saving, self._fetching, self._writing = (
            ThreadPoolExecutor(1, f"jaxllm-{name}") for name in ("save", "fetch", "write")
        )
        if files is not None:
            files.run_later = partial(_submit, self._writing)
        self._room = threading.Semaphore(max(1, _UNWRITTEN_BYTES // max(len(host.row(0)) for host in hosts)))
        """The further blocks that may wait to be written."""
        self._patience = 0.0
        """How long a block waits for such room."""
        self._round = _Round()

    def begin(self, moves: Moves) -> None:
        """Launch saves, and begin to make fetches ready."""
        epoch = 0 if self.files is None else self.files.epoch
        by_holder: Mapping[int, list[Save]] = defaultdict(list)
        for save in moves.saves:
            by_holder[save.holder].append(save)
        for holder, saves in by_holder.items():
            for some in batched(saves, MOVED_BLOCKS):
                content = self._launcher.read_blocks(holder, _ids([save.block_id for save in some]))
                for array in content:
                    array.copy_to_host_async()
                _submit(self._saving, self._save, self._round, some, content, epoch)
        for number in moves.given_up:
            self._round.fetching.discard(number)
        for number, loads in moves.fetches.items():
            self._round.fetching.add(number)
            _submit(self._fetching, self._fetch, self._round, number, loads)

    def end(self, tiers: Tiers) -> None:
        """Tell the tiers of the moves that have ended; fill the blocks of fetches that are ready."""
        ended = self._round
        while ended.saves:
            save, is_right = ended.saves.popleft()
            tiers.end_save(save, is_right=is_right)
        while ended.fetches:
            number, fillings, times = ended.fetches.popleft()
            is_wanted = number in ended.fetching
            ended.fetching.discard(number)
            for filling in (fillings or ()) if is_wanted else ():
                self._launcher.fill_blocks(*filling)
            tiers.end_fetch(number, is_right=is_wanted and fillings is not None, times=times)

    def wait(self, seconds: float) -> None:
        """Wait until some move has ended, but no longer than some seconds."""
        self._round.has_ended.wait(seconds)
        self._round.has_ended.clear()

    def stats(self, tiers: Tiers) -> TiersStats:
        """Return what the host's memory and the files hold, and what was done with them."""
        counts, kept = tiers.counts, tiers.num_kept()
        host = TierStats(
            num_blocks=sum(kept),
            num_bytes=sum(number * len(host.row(0)) for number, host in zip(kept, self._hosts, strict=True)),
            num_hit_tokens=counts.num_host_tokens,
            num_fetched_blocks=counts.num_host_blocks,
            num_evicted_blocks=counts.num_evicted,
        )
        files = self.files
        disk = TierStats(
            num_blocks=0 if files is None else files.num_blocks,
            num_bytes=0 if files is None else files.num_bytes,
            num_hit_tokens=counts.num_disk_tokens,
            num_fetched_blocks=counts.num_disk_blocks,
            num_evicted_blocks=0 if files is None else files.num_evicted,
        )
        return TiersStats(
            host=host,
            disk=disk,
            num_queried_tokens=counts.num_queried_tokens,
            num_fetches=counts.num_fetches,
            num_failed_fetches=counts.num_failed,
            num_refused_fetches=tiers.times.num_refused,
            num_broken_files=0 if files is None else files.num_broken,
        )

    def finish(self, tiers: Tiers) -> None:
        """Wait until all moves under way have ended, and tell the tiers."""
        for executor in (self._saving, self._fetching):
            executor.submit(int).result()
        self.end(tiers)

    def reset(self) -> None:
        """Forget all moves under way: the devices' pools are new, and so are the scheduler's slots."""
        self._round.fetching.clear()
        self._round = _Round()
        if self.files is not None:
            # What has begun may still write to a slot.
            for executor in (self._saving, self._fetching):
                _submit(executor, int).result()

    def close(self, tiers: Tiers) -> None:
        """End the threads. What the devices hold is written to files first, if that takes no more than seconds."""
        if self.files is not None:
            try:
                self._flush(tiers)
            except Exception:
                logger.exception("not all KV blocks could be written to files")
        self.reset()
        for executor in (self._saving, self._fetching, self._writing):
            executor.shutdown(wait=False, cancel_futures=True)

    def _flush(self, tiers: Tiers) -> None:
        self.end(tiers)
        tiers.save_all()
        self.begin(tiers.take_moves())
        self._patience, deadline = _FLUSH_SECONDS, time.monotonic() + _FLUSH_SECONDS
        for executor in (self._saving, self._writing):
            wait([_submit(executor, int)], max(0.0, deadline - time.monotonic()))
        self._patience = 0.0

    @running()
    def _save(self, current: _Round, saves: Sequence[Save], content: tuple[Array, ...], epoch: int) -> None:
        try:
            if current is self._round:
                self._hosts[saves[0].holder].write([save.slot for save in saves], content)
                self._keep(saves, epoch)
            is_right = True
        except Exception:
            logger.exception("%d blocks could not be kept by the host", len(saves))
            is_right = False
        current.saves.extend((save, is_right) for save in saves)
        current.has_ended.set()

    def _keep(self, saves: Sequence[Save], epoch: int) -> None:
        """Have saved blocks written to files, unless too many wait. A slot may change meanwhile, so it is copied."""
        files = self.files
        if files is None:
            return
        for save in saves:
            if not files.has(save.holder, save.content[0]) and self._room.acquire(timeout=self._patience):
                row = self._hosts[save.holder].row(save.slot).copy()
                _submit(self._writing, self._write, files, save, row, epoch)

    def _write(self, files: BlockFolder, save: Save, row: np.ndarray, epoch: int) -> None:
        try:
            files.write(save.holder, save.content, row, epoch)
        except Exception:
            logger.exception("a KV block could not be written to a file")
        finally:
            self._room.release()

    @running()
    def _fetch(self, current: _Round, number: int, loads: Sequence[Load]) -> None:
        fillings, times = None, list[PartTime]()
        try:
            if number in current.fetching:
                fillings = self._prepare(loads, times)
        except Exception:
            logger.exception("%d blocks could not be fetched from the host", len(loads))
        current.fetches.append((number, fillings, times))
        current.has_ended.set()

    def _prepare(self, loads: Sequence[Load], times: list[PartTime]) -> list[_Filling] | None:
        """Send the content of loads to the devices, and note how long it takes; return None if a file is not right."""
        by_holder: Mapping[int, list[Load]] = defaultdict(list)
        for load in loads:
            by_holder[load.holder].append(load)
        for holder, of_holder in by_holder.items():
            from_files = [load for load in of_holder if load.is_in_file]
            begun = time.monotonic()
            if not all(map(self._read_file, from_files)):
                return None
            if from_files:
                times.append(_time_since(begun, Part(holder, reads_files=True), len(from_files)))
        fillings = list[_Filling]()
        for holder, of_holder in by_holder.items():
            begun = time.monotonic()
            sent = list(self._send(holder, of_holder))
            jax.block_until_ready([filling.content for filling in sent])
            times.append(_time_since(begun, Part(holder, reads_files=False), len(of_holder)))
            fillings += sent
        return fillings

    def _read_file(self, load: Load) -> bool:
        """Read a load's file into its slot; return False if the file is not right, or files are used no more."""
        files = self.files
        return files is not None and files.read(load.holder, load.content, self._hosts[load.holder].row(load.slot))

    def _send(self, holder: int, loads: Sequence[Load]) -> Iterator[_Filling]:
        """Begin to send the content of a holder's slots to the devices, some blocks at a time."""
        for some in batched(loads, MOVED_BLOCKS):
            content = self._hosts[holder].read([load.slot for load in some], MOVED_BLOCKS)
            yield _Filling(holder, _ids([load.block_id for load in some]), content)


class _Round:
    """The moves between two resets; threads append what has ended."""

    def __init__(self) -> None:
        self.fetching: set[int] = set()
        """The fetches that are wanted."""
        self.saves: deque[tuple[Save, bool]] = deque()
        self.fetches: deque[tuple[int, list[_Filling] | None, list[PartTime]]] = deque()
        """By number, the content, or None for a fetch that has failed, and the times of its parts."""
        self.has_ended = threading.Event()


def _submit(executor: ThreadPoolExecutor, function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run a function in an executor's thread, or in this one once the interpreter ends and executors take no more."""
    try:
        return executor.submit(function, *args)
    except RuntimeError:
        done: Future[Any] = Future()
        done.set_result(function(*args))
        return done


def _time_since(begun: float, part: Part, num_blocks: int) -> PartTime:
    return PartTime(part, num_blocks, time.monotonic() - begun)


def _ids(block_ids: Sequence[int]) -> np.ndarray:
    """Return block ids for one run of a program, with -1 for none behind them."""
    ids_m = np.full(MOVED_BLOCKS, -1, np.int32)
    ids_m[: len(block_ids)] = block_ids
    return ids_m
