"""Nobody else can write files of caches, and what somebody else has written is not read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxllm.utils.files import make_own, read_own, write_whole
from tests.utils.ownership import give_away


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_folders_are_ones_own_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_whole(tmp_path / "cache" / "programs" / "one", b"content")
        (tmp_path / "open to all").mkdir(mode=0o777)
    finally:
        os.umask(before)
    assert [mode(tmp_path / name) for name in ("cache", "cache/programs", "cache/programs/one")] == [
        0o700,
        0o700,
        0o600,
    ]
    make_own(tmp_path / "open to all")
    assert mode(tmp_path / "open to all") == 0o700
    assert read_own(tmp_path / "cache" / "programs" / "one") == b"content"


def test_what_another_user_owns_or_may_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    path = folder / "file"
    write_whole(path, b"content")
    path.chmod(0o620)
    with pytest.raises(PermissionError, match="file can be written by other users"):
        read_own(path)
    path.chmod(0o644)
    assert read_own(path) == b"content"
    give_away(monkeypatch, path)
    with pytest.raises(PermissionError, match="file belongs to another user"):
        read_own(path)
    give_away(monkeypatch, folder)
    with pytest.raises(PermissionError, match="folder belongs to another user"):
        write_whole(folder / "other", b"content")
