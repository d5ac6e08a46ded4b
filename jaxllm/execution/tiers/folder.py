"""A folder of blocks: the content of a block is one file, named by its hash, which any later engine may find.

An engine writes below a folder that is named by all that content depends on, so that engines of several models share
one. Files are the user's alone. Each is written under another name first, and is checked by a digest when it is read:
one that is cut off or changed counts as missing and is removed. The least recently used files are removed when all
together are too large; other engines may write and remove files at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxllm.utils.files import check_own, make_own

logger = logging.getLogger(__name__)

_MAGIC = b"jaxllm block 1\n"
_PART, _SUFFIX, _UNFINISHED = "jaxllm-kv-", ".block", ".unfinished"
_SCAN_SECONDS = 10.0
"""How often the folder is looked through for what other engines have written and removed."""
_STALE_SECONDS = 600.0
"""A file that was not finished for so long is nobody's."""
_PAUSE_SECONDS = 60.0
"""How long nothing is written after a failure, such as a full disk."""


class _Entry(NamedTuple):
    path: Path
    num_bytes: int
    used: float


class BlockFolder:
    """The files of one engine's blocks in a folder, up to a size that all engines' files count for.

    `has` and `forget_all` are for the thread of the steps, and leave what takes time to `run_later`. `write` and `read`
    are for one other thread each.
    """

    def __init__(self, folder: Path, name: str, max_bytes: int) -> None:
        """Use the part `name` of a folder, and make it if need be. Raises OSError."""
        self._folder, self._own, self._max_bytes = folder, folder / f"{_PART}{name}", max_bytes
        make_own(self._own)
        self._known: set[str] = set()
        self.num_bytes = 0
        """The bytes of all engines' files, as far as is known."""
        self.num_evicted = self.num_broken = 0
        """The files that were removed for others, and those that were not right."""
        self._scan_at = time.monotonic() + _SCAN_SECONDS
        self._paused_until = float("-inf")
        self.run_later: Callable[[Callable[[], None]], object] = lambda task: task()
        """It runs a task in the thread that writes, after the writes that were begun before."""
        self._lock = threading.Lock()
        self.epoch = 0
        """The number of times that all was forgotten."""
        self._removed_epoch = 0
        """The last one for which the files have been removed."""
        self.scan()

    def has(self, holder: int, block_hash: bytes) -> bool:
        """Return whether there is a file, as far as is known; look for new ones now and then."""
        if _name(holder, block_hash) in self._known:
            return True
        if (now := time.monotonic()) >= self._scan_at:
            self._scan_at = now + _SCAN_SECONDS
            self.run_later(self.scan)
        return False

    @property
    def num_blocks(self) -> int:
        """Return the number of this engine's files, as far as is known."""
        return len(self._known)

    def forget_all(self) -> None:
        """Forget all files of this part, write none of what was computed before, and remove them later."""
        with self._lock:
            self.epoch += 1
            self._known = set()
        self.run_later(self._remove_all)

    def _remove_all(self) -> None:
        epoch = self.epoch
        for path in self._own.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                path.unlink()
        self._removed_epoch = epoch
        self.scan()

    def write(self, holder: int, content: tuple[bytes, bytes], body: np.ndarray, epoch: int) -> None:
        """Write a block, uint8 [n], unless a file has it; `content` is its hash and the bytes of its token ids.

        Nothing is written if all was forgotten after `epoch`. A failure is logged, and no more is written for a while.
        """
        name, now = _name(holder, content[0]), time.monotonic()
        if name in self._known or now < self._paused_until or epoch != self.epoch:
            return
        unfinished = self._own / f"{secrets.token_hex(8)}{_UNFINISHED}"
        try:
            parts = _head(name, content[1], body), memoryview(body)
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.writelines(parts)
            with self._lock:
                if epoch != self.epoch:
                    unfinished.unlink()
                    return
                os.replace(unfinished, self._own / name)
                self._known.add(name)
                self.num_bytes += sum(map(len, parts))
        except OSError as error:
            logger.warning("a KV block cannot be written to %s: %s; none is for a minute", self._own, error)
            self._paused_until = now + _PAUSE_SECONDS
            with contextlib.suppress(OSError):
                unfinished.unlink()
            return
        if self.num_bytes > self._max_bytes:
            self.scan(self._max_bytes * 15 // 16)  # with some room, so that not every write looks at all files

    def read(self, holder: int, content: tuple[bytes, bytes], body: np.ndarray) -> bool:
        """Fill `body`, uint8 [n], from a block's file; if that is not whole and right, remove it and return False."""
        name = _name(holder, content[0])
        path = self._own / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                check_own(path, os.fstat(descriptor))
                head = file.read(len(_head(name, content[1], body[:0])))
                is_whole = file.readinto(memoryview(body)) == len(body) and not file.read(1)
            if is_whole and head == _head(name, content[1], body):
                os.utime(path)
                return True
            self.num_broken += 1
        except FileNotFoundError:  # another engine has removed it
            pass
        except OSError:
            self.num_broken += 1
        with self._lock:
            self._known.discard(name)
        with contextlib.suppress(OSError):
            path.unlink()
        return False

    def scan(self, max_bytes: int | None = None) -> None:
        """Look at the files of all engines, and keep at most `max_bytes` of them: those that were used last."""
        max_bytes, epoch = self._max_bytes if max_bytes is None else max_bytes, self.epoch
        entries = sorted(self._entries(), key=lambda entry: entry.used, reverse=True)
        total, known = 0, set[str]()
        for path, num_bytes, used in entries:
            is_finished = path.suffix == _SUFFIX
            if total + num_bytes > max_bytes or (not is_finished and used < time.time() - _STALE_SECONDS):
                with contextlib.suppress(OSError):
                    path.unlink()
                    self.num_evicted += is_finished
                continue
            total += num_bytes
            if is_finished and path.parent == self._own:
                known.add(path.name)
        with self._lock:
            # Files that were forgotten and are not removed yet stay forgotten.
            self._known = known if self.epoch == epoch == self._removed_epoch else set()
            self.num_bytes = total

    def _entries(self) -> Iterator[_Entry]:
        """Yield the files of all engines; any may vanish meanwhile."""
        for part in self._folder.iterdir():
            if not part.name.startswith(_PART) or part.is_symlink() or not part.is_dir():
                continue
            with contextlib.suppress(OSError):
                for entry in os.scandir(part):
                    with contextlib.suppress(OSError):
                        stat = entry.stat(follow_symlinks=False)
                        if entry.is_file(follow_symlinks=False) and entry.name.endswith((_SUFFIX, _UNFINISHED)):
                            yield _Entry(Path(entry.path), stat.st_size, stat.st_mtime)


def _name(holder: int, block_hash: bytes) -> str:
    return f"{holder}-{block_hash.hex()}{_SUFFIX}"


def _head(name: str, token_bytes: bytes, body: np.ndarray) -> bytes:
    """Return what a file begins with: a mark, a digest of its name and of all that follows, and the tokens."""
    tokens = len(token_bytes).to_bytes(8, "little") + token_bytes
    digest = hashlib.sha256(name.encode() + tokens)
    digest.update(memoryview(body))
    return _MAGIC + digest.digest() + tokens
