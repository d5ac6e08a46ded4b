"""Files in caches, which other processes read and write too."""

from __future__ import annotations

import tempfile
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, in a folder that is made if need be. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(content)
        except OSError:
            temporary.unlink()
            raise
    temporary.replace(path)
