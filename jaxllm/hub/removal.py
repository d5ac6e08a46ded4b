"""Delete models from the hub's cache: repositories, some of their revisions, or one GGUF file of several."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.exceptions import VLLMValidationError
from jaxllm.hub.cache import Cache, CachedModel
from jaxllm.loading.gguf.split_files import first_parts, part_names

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo


@dataclass(frozen=True, slots=True)
class Removal:
    """What deletes a model."""

    revisions: tuple[str, ...]
    """The commits that lose files."""
    paths: tuple[Path, ...]
    """The files and folders that are deleted."""
    num_bytes: int
    """The bytes that this frees."""

    def execute(self) -> Path | None:
        """Delete, and return a path that could not be deleted; None if all are gone."""
        for path in self.paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                try:
                    path.unlink(missing_ok=True)
                except OSError:
                    return path
        return next((path for path in self.paths if path.exists()), None)


def plan_removal(cache: Cache, name: str, models: list[CachedModel], quant: str = "") -> Removal:
    """Return what deletes some revisions of a repository, or with `quant` only the GGUF file of that quantization in
    them, all its parts, and what no file is left of.

    Raises VLLMValidationError unless exactly one GGUF file has that quantization.
    """
    if quant:
        files = {model.revision: _files_of(cache, model, name, quant) for model in models}
        models = [model for model in models if files[model.revision]]
        if any(len(files[model.revision]) < len(cache.files(model)) for model in models):
            return _removal_of_files(cache, name, files)
    strategy, num_bytes = cache.plan_removal(name, models)
    paths = (*strategy.repos, *strategy.refs, *strategy.snapshots, *strategy.blobs)
    return Removal(tuple(model.revision for model in models), paths, num_bytes)


def _files_of(cache: Cache, model: CachedModel, name: str, quant: str) -> list[CachedFileInfo]:
    """Return the files of the model of a quantization in a revision; none if the revision has no GGUF file."""
    files = {file.file_path.relative_to(model.path).as_posix(): file for file in cache.files(model)}
    names = first_parts(sorted(files))
    chosen = [each for each in names if quant.lower() in each.lower()]
    if names and len(chosen) != 1:
        message = f"{name}:{quant}: expected one GGUF file, the cache has: {', '.join(names)}."
        raise VLLMValidationError(message, parameter="model", value=f"{name}:{quant}")
    if not names and len(files) > 0:
        message = f"{name}:{quant}: the cache has no GGUF file of {name}."
        raise VLLMValidationError(message, parameter="model", value=f"{name}:{quant}")
    return [files[part] for each in chosen for part in part_names(each) if part in files]


def _removal_of_files(cache: Cache, name: str, files: dict[str, list[CachedFileInfo]]) -> Removal:
    """Return what deletes files of revisions, and their contents where no other file has them."""
    gone = {file.file_path: file for several in files.values() for file in several}
    kept = {
        file.blob_path
        for model in cache.models()
        if model.name == name
        for file in cache.files(model)
        if file.file_path not in gone
    }
    blobs = {file.blob_path: file.size_on_disk for file in gone.values() if file.blob_path not in kept}
    revisions = tuple(revision for revision, several in files.items() if several)
    return Removal(revisions, (*gone, *blobs), sum(blobs.values()))
