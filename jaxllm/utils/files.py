"""Files of caches are read and written by other processes too, but by no other user: they are run, or trusted."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_own(folder: Path) -> None:
    """Make a folder that nobody else may look into, whatever the umask, and so any missing folder above it.

    Where this user's folder is there already, others lose the right to write to it. Raises PermissionError if it is
    another user's, OSError if it cannot be made.
    """
    for each in reversed((folder, *folder.parents)):
        each.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & FOR_OTHERS:
        folder.chmod(0o700)
        status = folder.stat()
    _check_own(folder, status)


def read_own(path: Path) -> bytes:
    """Read a file that nobody else can have written. Raises PermissionError if they can, OSError if there is none."""
    with path.open("rb") as file:
        _check_own(path, os.fstat(file.fileno()))
        return file.read()


MAX_TEXT_BYTES = 2**26


def read_text(path: Path) -> str:
    """Read a text file of at most 64 MiB; devices and pipes may never end. Raises OSError or ValueError."""
    if not path.is_file():
        raise OSError("there is no such file" if not path.exists() else "it is not a regular file")
    with path.open("rb") as file:
        content = file.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise ValueError(f"it is longer than {MAX_TEXT_BYTES} bytes")
    return content.decode()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, in a folder of this user's that is made if need be.

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


def _check_own(path: Path, status: os.stat_result) -> None:
    """Raise PermissionError for what another user owns or may write; root may do anything anyway, so root's is fine."""
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & FOR_OTHERS:
        raise PermissionError(f"{path} can be written by other users")
