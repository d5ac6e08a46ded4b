"""The blocks of encoded clips, which the decoders of requests attend to, and who holds them.

A clip is known by its key, the hash of its content, so requests with the same clip share its blocks. A request holds
its clip from its admission until it ends or is preempted. Clips without a holder stay until their place is wanted: the
least recently held go first.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection

import msgspec

from jaxllm.core_messages import Clip


class ClipEncode(msgspec.Struct, frozen=True, gc=False):
    """A clip to be encoded into blocks before a step runs."""

    clip: Clip
    block_ids: array[int]


class _Entry:
    """The blocks of a clip, and the requests that hold it."""

    __slots__ = ("block_ids", "holders")

    def __init__(self, block_ids: array[int]) -> None:
        self.block_ids = block_ids
        self.holders: set[str] = set()


class ClipCache:
    """The blocks of encoded clips: free, or of a clip. All clips have the same number of blocks."""

    def __init__(self, num_blocks: int, clip_blocks: int) -> None:
        """Have `num_blocks` blocks, including block 0, which has no owner; a clip takes `clip_blocks`."""
        self._num_blocks, self._clip_blocks = num_blocks, clip_blocks
        self._free = array("i", range(num_blocks - 1, 0, -1))
        self._entries: dict[bytes, _Entry] = {}
        """By key; those without holders in the order in which they lost the last one."""
        self._num_idle = 0
        """The number of clips without holders."""
        self._held: dict[str, bytes] = {}
        """The key that each request holds."""
        self.begin_step(0)

    @property
    def usage(self) -> tuple[int, int]:
        """Return the number of blocks that requests hold, and of all blocks."""
        num_held = sum(len(entry.block_ids) for entry in self._entries.values() if entry.holders)
        return num_held, self._num_blocks

    def begin_step(self, num_frames: int) -> None:
        """Begin to plan a step, which may encode clips of `num_frames` frames together, or one."""
        self._num_encodable = max(1, num_frames)
        self._encodes: list[ClipEncode] = []

    def fits(self, clip: Clip) -> bool:
        """Return whether a request can have its clip in this step: it is encoded, or there is room for it."""
        if clip.key in self._entries:
            return True
        has_room = len(self._free) >= self._clip_blocks or self._num_idle > 0
        return has_room and (not self._encodes or self._num_encodable >= clip.num_frames)

    def take(self, request_id: str, clip: Clip) -> array[int]:
        """Hold a clip, which fits, for a request, and return its blocks; it is encoded if it is not yet."""
        entry = self._entries.get(clip.key)
        if entry is None:
            entry = self._entries[clip.key] = _Entry(self._take_blocks())
            self._encodes.append(ClipEncode(clip, entry.block_ids))
            self._num_encodable -= clip.num_frames
        elif not entry.holders:
            self._num_idle -= 1
        entry.holders.add(request_id)
        self._held[request_id] = clip.key
        return entry.block_ids

    def end_step(self) -> tuple[ClipEncode, ...]:
        """Return the clips to encode before the step."""
        return tuple(self._encodes)

    def release(self, request_id: str) -> None:
        """Give up the clip of a request, if it holds one."""
        key = self._held.pop(request_id, None)
        if key is None:
            return
        entry = self._entries[key]
        entry.holders.remove(request_id)
        if not entry.holders:
            self._num_idle += 1
            self._entries[key] = self._entries.pop(key)

    def _take_blocks(self) -> array[int]:
        if len(self._free) < self._clip_blocks:
            key = next(key for key, entry in self._entries.items() if not entry.holders)
            self._num_idle -= 1
            return self._entries.pop(key).block_ids
        block_ids = self._free[len(self._free) - self._clip_blocks :]
        del self._free[len(self._free) - self._clip_blocks :]
        return block_ids

    def forget_all(self) -> bool:
        """Forget all clips; return False, and forget nothing, while a request holds one."""
        if self._held:
            return False
        for entry in self._entries.values():
            self._free.extend(entry.block_ids)
        self._entries.clear()
        self._num_idle = 0
        return True

    def check(self, running: Collection[str]) -> None:
        """Assert that each block is free or of one clip, and that the running requests with clips hold theirs."""
        taken = [block_id for entry in self._entries.values() for block_id in entry.block_ids]
        assert sorted([*self._free, *taken]) == list(range(1, self._num_blocks)), "a block is lost or has two owners"
        idle = sum(not entry.holders for entry in self._entries.values())
        assert idle == self._num_idle, "the clips without holders are miscounted"
        holders = {(name, key) for key, entry in self._entries.items() for name in entry.holders}
        assert holders == set(self._held.items()), "holders differ"
        assert self._held.keys() == set(running), "a request lacks its clip, or holds one and does not run"
