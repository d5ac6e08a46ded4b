"""Files of blocks: what is read is what was written, or nothing, whatever happened to the file or its writer."""

from __future__ import annotations

import errno
import io
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from jaxllm.execution.tiers import folder as folder_module
from jaxllm.execution.tiers.folder import BlockFolder

SIZE = 3000
NUM_MUTATIONS = 200
NUM_KILLS = 3
CONTENT = bytes(range(32)), bytes(64)

WRITER = """
import sys
from pathlib import Path
from tests.execution.test_block_folder import body_of, content_of
from jaxllm.execution.tiers.folder import BlockFolder
files = BlockFolder(Path(sys.argv[1]), "m", 2**40)
print("begun", flush=True)
for number in range(10**6):
    files.write(0, content_of(number), body_of(number), 0)
"""


def content_of(number: int) -> tuple[bytes, bytes]:
    return number.to_bytes(32, "little"), number.to_bytes(8, "little")


def body_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def read(files: BlockFolder, number: int) -> bool:
    """Read a block, and check that it is right if it counts as such."""
    body = np.zeros(SIZE, np.uint8)
    is_right = files.read(0, content_of(number), body)
    assert not is_right or np.array_equal(body, body_of(number)), "a wrong block is taken"
    return is_right


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def fill(folder: Path, numbers: Sequence[int], max_bytes: int = 2**30) -> BlockFolder:
    files = BlockFolder(folder, "m", max_bytes)
    for number in numbers:
        files.write(0, content_of(number), body_of(number), 0)
    return files


def test_another_engine_reads_what_one_wrote(tmp_path: Path) -> None:
    fill(tmp_path, range(5))
    later = BlockFolder(tmp_path, "m", 2**30)
    assert all(later.has(0, content_of(number)[0]) and read(later, number) for number in range(5))
    assert not later.has(1, content_of(0)[0])
    assert not later.has(0, content_of(5)[0])
    assert not BlockFolder(tmp_path, "other", 2**30).has(0, content_of(0)[0])


def test_only_the_user_reads_the_files(tmp_path: Path) -> None:
    fill(tmp_path / "new", [1])
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "new").rglob("*")} == {0}


def mutate(path: Path, rng: random.Random) -> None:
    """Change, cut, lengthen or exchange a file, so that it is another one."""
    old = path.read_bytes()
    while (new := _mutated(old, rng)) == old:
        pass
    path.write_bytes(new)


def _mutated(old: bytes, rng: random.Random) -> bytes:
    at, kind = rng.randrange(len(old)), rng.randrange(5)
    if kind == 0:
        return old[:at] + bytes([old[at] ^ 1 << rng.randrange(8)]) + old[at + 1 :]
    if kind == 1:
        return old[:at]
    if kind == 2:
        return old[:at] + rng.randbytes(rng.randrange(1, 50)) + old[at:]
    if kind == 3:
        return rng.randbytes(rng.randrange(2 * len(old)))
    return old[:at] + bytes(len(old) - at)


def test_a_changed_file_is_missing_and_removed(tmp_path: Path) -> None:
    fill(tmp_path, range(NUM_MUTATIONS))
    rng = random.Random(11)
    for path in files_in(tmp_path):
        mutate(path, rng)
    files = BlockFolder(tmp_path, "m", 2**30)
    assert not any(read(files, number) for number in range(NUM_MUTATIONS))
    assert files_in(tmp_path) == []
    fill(tmp_path, [3])
    assert read(BlockFolder(tmp_path, "m", 2**30), 3)


def test_the_file_of_another_block_is_missing(tmp_path: Path) -> None:
    files = fill(tmp_path, [1, 2])
    one, two = files_in(tmp_path)
    os.replace(one, two)
    assert not read(files, 1)
    assert not read(files, 2)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "writable by others"])
def test_what_is_no_file_of_the_user_is_missing(tmp_path: Path, kind: str) -> None:
    files = fill(tmp_path, [1])
    [path] = files_in(tmp_path)
    if kind == "writable by others":
        path.chmod(0o666)
    else:
        path.rename(tmp_path / "moved")
        if kind == "link":
            path.symlink_to(tmp_path / "moved")
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.mkdir()
    assert not read(files, 1)
    assert not files.has(0, content_of(1)[0])


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    files = fill(tmp_path, range(4))
    size = files_in(tmp_path)[0].stat().st_size
    for age, number in enumerate((0, 3, 1, 2)):
        [path] = tmp_path.rglob(f"0-{content_of(number)[0].hex()}*")
        used = time.time() - 1000 - age
        os.utime(path, (used, used))
    assert read(files, 2)  # now it is the one that was used last
    files = BlockFolder(tmp_path, "m", 3 * size + size // 4)
    assert [files.has(0, content_of(number)[0]) for number in range(4)] == [True, False, True, True]
    files.write(0, content_of(9), body_of(9), 0)
    assert [files.has(0, content_of(number)[0]) for number in (0, 2, 3, 9)] == [True, True, False, True]
    assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 3 * size


def refuse(*_: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


class Filled(io.FileIO):
    """A file on a disk that has room for 100 bytes more."""

    def writelines(self, parts: Iterable[Any], /) -> None:
        self.write(b"".join(parts)[:100])
        refuse()


def fill_disk(patch: pytest.MonkeyPatch, where: str) -> None:
    """Let writes of blocks fail: in the middle of a file, or when a file gets its name."""
    if where == "rename":
        patch.setattr(folder_module.os, "replace", refuse)
    else:
        patch.setattr(folder_module, "open", Filled, raising=False)


@pytest.mark.parametrize("where", ["write", "rename"])
def test_a_full_disk_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    files = fill(tmp_path, [1])
    with monkeypatch.context() as patch:
        fill_disk(patch, where)
        files.write(0, content_of(2), body_of(2), 0)
    assert len(files_in(tmp_path)) == 1
    assert read(files, 1)
    assert not files.has(0, content_of(2)[0])
    files.write(0, content_of(2), body_of(2), 0)  # none is written for a while
    assert len(files_in(tmp_path)) == 1


def test_what_was_computed_before_all_was_forgotten_is_not_written(tmp_path: Path) -> None:
    files = fill(tmp_path, [1])
    files.forget_all()
    files.write(0, content_of(2), body_of(2), 0)
    assert files_in(tmp_path) == []
    files.write(0, content_of(3), body_of(3), files.epoch)
    assert read(files, 3)


def test_forgotten_files_are_removed_by_the_writer_and_found_no_more_before(tmp_path: Path) -> None:
    files, tasks = fill(tmp_path, [1, 2]), []
    files.run_later = tasks.append
    files.scan()
    files.forget_all()
    files.scan()  # as one that was begun before
    assert len(files_in(tmp_path)) == 2
    assert not any(files.has(0, content_of(number)[0]) for number in (1, 2))
    [remove] = tasks
    remove()
    assert files_in(tmp_path) == []
    files.write(0, content_of(1), body_of(1), files.epoch)
    assert read(files, 1)


def test_files_of_other_engines_are_found_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(folder_module.time, "monotonic", lambda: now)
    files = fill(tmp_path, [1])
    fill(tmp_path, [2])
    assert not files.has(0, content_of(2)[0])
    now += 11
    assert not files.has(0, content_of(2)[0])  # it has looked meanwhile, as another thread would
    assert files.has(0, content_of(2)[0])


def test_a_file_that_another_engine_removed_is_missing_and_not_broken(tmp_path: Path) -> None:
    files = fill(tmp_path, [1, 2])
    fill(tmp_path, []).forget_all()
    assert not read(files, 1)
    assert files.num_broken == 0
    path = tmp_path / "jaxllm-kv-m" / f"0-{content_of(2)[0].hex()}.block"
    path.touch()
    assert not read(files, 2)
    assert files.num_broken == 1


def kill_a_writer(folder: Path, seconds: float) -> None:
    """Start a program that writes blocks, and kill it some time after it has begun."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"begun\n"
        time.sleep(seconds)
        writer.send_signal(signal.SIGKILL)


def check_after_kill(folder: Path) -> int:
    """Check all files that a killed writer has left, and remove them; return how many blocks there are."""
    files, number = BlockFolder(folder, "m", 2**40), 0
    while files.has(0, content_of(number)[0]):
        assert read(files, number), "a file that has its name is not whole"
        number += 1
    files.forget_all()
    assert {path.suffix for path in files_in(folder)} <= {".unfinished"}
    return number


def test_a_writer_that_is_killed_leaves_whole_files(tmp_path: Path) -> None:
    rng = random.Random(5)
    num_blocks = 0
    for _ in range(NUM_KILLS):
        kill_a_writer(tmp_path, rng.uniform(0.02, 0.2))
        num_blocks += check_after_kill(tmp_path)
    assert num_blocks > 0
