"""Read and write cache files that only this user may touch, since their contents are trusted or executed."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

_FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_own(folder: Path) -> None:
    """Create a folder, and any missing parents, that only this user can access, whatever the umask.

    An existing folder of this user loses write permission for others. Raises PermissionError if it belongs to another
    user, OSError if it cannot be created.
    """
    for path in reversed((folder, *folder.parents)):
        path.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & _FOR_OTHERS:
        folder.chmod(0o700)
        status = folder.stat()
    check_own(folder, status)


def read_own(path: Path) -> bytes:
    """Read a file that no other user can have written. Raises PermissionError if one could, OSError if missing."""
    with path.open("rb") as file:
        check_own(path, os.fstat(file.fileno()))
        return file.read()


MAX_TEXT_BYTES = 2**26


def read_text(path: Path) -> str:
    """Read a text file of at most 64 MiB (a device or pipe may never end). Raises OSError or ValueError."""
    if not path.is_file():
        raise OSError("there is no such file" if not path.exists() else "it is not a regular file")
    with path.open("rb") as file:
        content = file.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise ValueError(f"it is longer than {MAX_TEXT_BYTES} bytes")
    return content.decode()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically, in a folder of this user that is created if missing.

    Raises OSError.
    """
    make_own(path.parent)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(content)
        except OSError:
            temporary.unlink()
            raise
    temporary.replace(path)


def check_own(path: Path, status: os.stat_result) -> None:
    """Raise PermissionError if another user but root owns the file or may write it."""
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & _FOR_OTHERS:
        raise PermissionError(f"{path} can be written by other users")
