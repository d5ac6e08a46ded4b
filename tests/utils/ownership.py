"""Tests make files that belong to somebody else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

STRANGER = 12345


def give_away(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Make a file or folder another user's; where only root may do so, make everything another user's."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
