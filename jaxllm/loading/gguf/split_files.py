"""Open a model split into GGUF files NAME-00001-of-00003.gguf, ...: the first has the metadata, each has tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePath

from jaxllm.loading.gguf.file import GGUFFile

_PART = re.compile(r"(.*-)(\d{5})(-of-(\d{5})\.gguf)\Z", re.DOTALL)
_MAX_PARTS = 65535
_VISION_MARK = "mmproj"
"""What the name of a file with a vision tower contains."""


def open_gguf(path: Path) -> GGUFFile:
    """Open a file, with all its parts if it is the first of several. Raises ValueError if they do not fit together."""
    file = GGUFFile(path)
    count = file.value("split.count", int, 1)
    if not 0 <= count <= _MAX_PARTS:
        raise ValueError(f"split.count is {count}, not 1 to {_MAX_PARTS}")
    if count <= 1:
        return file
    names = part_names(path.name)
    if len(names) != count:
        raise ValueError(f"it is one of {count} parts, which must be named NAME-00001-of-{count:05}.gguf and so on")
    if file.value("split.no", int, 0) != 0:
        raise ValueError(f"it is a later part of {count}; give the first one, {names[0]}")
    for number, name in enumerate(names[1:], start=1):
        part_path = path.with_name(name)
        if not part_path.is_file():
            raise ValueError(f"its part {name} is missing; all {count} parts must be in one folder")
        try:
            part = GGUFFile(part_path)
            part_number = part.value("split.no", int, 0)
            if part_number != number:
                raise ValueError(f"it is part {part_number + 1}, though its name is that of part {number + 1}")
            file.extend(part)
        except ValueError as error:
            raise ValueError(f"in its part {name}: {error}") from error
    num_tensors = file.value("split.tensors.count", int, len(file.tensors))
    if num_tensors != len(file.tensors):
        raise ValueError(f"its parts have {len(file.tensors)} tensors, but split.tensors.count is {num_tensors}")
    return file


def part_names(name: str) -> list[str]:
    """Return the names of all parts of the model to which this file belongs; just the name if it is not split."""
    match = _PART.fullmatch(name)
    if match is None or int(match[4]) < 1:
        return [name]
    return [f"{match[1]}{number + 1:05}{match[3]}" for number in range(int(match[4]))]


def first_parts(names: Iterable[str]) -> list[str]:
    """Return the names of the models among files: the first part of each, without vision towers."""
    models = [name for name in names if name.endswith(".gguf") and not is_vision_file(name)]
    return list(dict.fromkeys(_PART.sub(r"\g<1>00001\g<3>", name) for name in models))


def is_vision_file(name: str) -> bool:
    """Return whether a file's name says that it holds a vision tower, as llama.cpp's converter names it."""
    return name.endswith(".gguf") and _VISION_MARK in PurePath(name).name


def vision_files(folder: Path) -> list[Path]:
    """Return the files in a folder that hold vision towers by their names, in alphabetical order."""
    return sorted(path for path in folder.iterdir() if is_vision_file(path.name) and path.is_file())
