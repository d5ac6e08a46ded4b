"""A fake host: it keeps what the scheduler saves, some time later, and fills blocks again; now and then it fails."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from jaxllm.scheduling.cache.fetch_times import Part, PartTime
from jaxllm.scheduling.cache.tiers import Load, Moves, Save, Tiers

_FAILS = 0.05
_SECONDS = (0.0001, 0.004, 1.0)
"""The seconds that a block may take: sooner than a step's tokens for it, about as long, and longer."""


class Device(Protocol):
    """The fake device, as far as its blocks move."""

    digests: list[array[int]]
    token_ids: list[array[int]]
    states: list[int | None]


class FakeHost:
    """The moves under way, and the content of the host's slots."""

    def __init__(self, block_size: int, seed: int = 0) -> None:
        self._size, self._random = block_size, random.Random(seed)
        self.fails, self.writes = _FAILS, 0.5
        """The shares of moves that fail, and of saves that are written to files."""
        self.block_seconds: Sequence[float] = _SECONDS
        """A block of a fetch takes one of these."""
        self._files: dict[tuple[int, bytes], Any] = {}
        self.lose_moves()
        self.num_fetches = self.num_loads = self.num_from_files = self.num_given_up = self.num_failures = 0

    def lose_moves(self) -> None:
        """Lose the moves under way and what is in slots; files stay."""
        self._slots: dict[tuple[int, int], Any] = {}
        self._saves: list[tuple[Save, Any]] = []
        self._fetches: dict[int, list[Load]] = {}
        self._given_up: set[int] = set()

    def has(self, holder: int, block_hash: bytes) -> bool:
        """Return whether a file has some content."""
        return (holder, block_hash) in self._files

    def forget_all(self) -> None:
        """Remove all files."""
        self._files.clear()

    def begin(self, moves: Moves, device: Device) -> None:
        """Take what is saved from the device, before the step that overwrites it."""
        self._saves += [(save, self._read(device, save.holder, save.block_id)) for save in moves.saves]
        slots = [(save.holder, save.slot) for save, _ in self._saves]
        assert len(set(slots)) == len(slots), "two saves are under way to one slot"
        self._fetches |= moves.fetches
        self.num_fetches += len(moves.fetches)
        self._given_up.update(moves.given_up)
        self.num_given_up += len(moves.given_up)

    def end_some(self, tiers: Tiers, device: Device, *, all_of_them: bool = False) -> None:
        """End some of the moves under way, or all of them; saves end in order."""
        rng = self._random
        while self._saves and (all_of_them or rng.random() < 0.5):
            save, content = self._saves.pop(0)
            is_right = rng.random() >= self.fails
            self._slots[save.holder, save.slot] = content if is_right else None
            self.num_failures += not is_right
            if is_right and rng.random() < self.writes:
                self._files[save.holder, save.content[0]] = content
            tiers.end_save(save, is_right=is_right)
        for number in list(self._fetches):
            if not all_of_them and rng.random() < 0.5:
                continue
            loads, is_right = self._fetches.pop(number), rng.random() >= self.fails
            self.num_from_files += sum(load.is_in_file for load in loads)
            self.num_failures += not is_right
            for load in loads:
                if load.is_in_file:
                    self._slots[load.holder, load.slot] = self._files.get((load.holder, load.content[0]))
                if number in self._given_up:
                    continue
                if is_right or rng.random() < 0.5:  # one that fails may have filled some
                    self._write(device, load.holder, load.block_id, self._slots[load.holder, load.slot])
                    self.num_loads += 1
            tiers.end_fetch(number, is_right=is_right, times=self._times(loads))

    def _times(self, loads: Sequence[Load]) -> list[PartTime]:
        seconds = self._random.choice(self.block_seconds)
        counts = Counter(Part(load.holder, reads_files=False) for load in loads)
        counts.update(Part(load.holder, reads_files=True) for load in loads if load.is_in_file)
        return [PartTime(part, number, seconds * number) for part, number in counts.items()]

    def _read(self, device: Device, holder: int, block_id: int) -> Any:
        if holder == len(device.digests):
            return device.states[block_id]
        span = slice(block_id * self._size, (block_id + 1) * self._size)
        return device.digests[holder][span], device.token_ids[holder][span]

    def _write(self, device: Device, holder: int, block_id: int, content: Any) -> None:
        if holder == len(device.digests):
            device.states[block_id] = content
            return
        span = slice(block_id * self._size, (block_id + 1) * self._size)
        device.digests[holder][span], device.token_ids[holder][span] = content
