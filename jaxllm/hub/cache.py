"""Models in the hub's cache: their revisions, sizes and last use, and whether jaxllm can run them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.utils.streams import say

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, CachedRevisionInfo, DeleteCacheStrategy, HFCacheInfo

GIB = 2**30
_ADAPTER_NAME = "adapter_config.json"
_HASH_LETTERS = 7
"""The fewest letters of a commit that name it."""


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One revision of a repository in the cache."""

    name: str
    revision: str
    """The commit."""
    refs: tuple[str, ...]
    """The branches and tags that are at this commit."""
    num_bytes: int
    """The size of its files; another revision of the repository may share some of them."""
    last_used: float
    """When its largest file was last read, in seconds since 1970, as the file system recorded it."""
    path: Path
    largest: Path | None
    """The largest file; None if there are no files."""

    def is_at(self, revision: str) -> bool:
        """Return whether a branch, a tag, or the beginning of a commit means this revision."""
        is_commit = len(revision) >= _HASH_LETTERS and self.revision.startswith(revision)
        return revision in self.refs or is_commit


@dataclass(frozen=True, slots=True)
class Ability:
    """Whether jaxllm can run a model; `reason` is why not, and "" if it can."""

    architecture: str | None
    reason: str


class Cache:
    """The hub's cache, as it was when this was made."""

    def __init__(self, folder: str | None) -> None:
        """Read the cache in `folder`, or else the hub library's own. A damaged repository is told of and left out.

        Raises VLLMValidationError if it is no folder or cannot be read.
        """
        from huggingface_hub import constants, scan_cache_dir
        from huggingface_hub.errors import CacheNotFound

        self.path = Path(constants.HF_HUB_CACHE if folder is None else folder).expanduser()
        self._info: HFCacheInfo | None = None
        try:
            self._info = scan_cache_dir(self.path)
        except CacheNotFound:
            return
        except (OSError, ValueError) as error:
            message = f"the hub's cache {str(self.path)!r} cannot be read: {error}"
            raise VLLMValidationError(message, parameter="download_dir", value=folder) from error
        for warning in self._info.warnings:
            if f"{os.sep}models--" in str(warning):
                say(f"left out: {warning}")

    def models(self) -> list[CachedModel]:
        """Return all revisions of models, sorted by name."""
        models = [_cached(repo, revision) for repo in self._repos() for revision in repo.revisions]
        return sorted(models, key=lambda model: (model.name, not model.refs, model.revision))

    def files(self, model: CachedModel) -> list[CachedFileInfo]:
        """Return the files of a revision."""
        revisions = (each for repo in self._repos() if repo.repo_id == model.name for each in repo.revisions)
        return [file for each in revisions if each.commit_hash == model.revision for file in each.files]

    def unfinished(self) -> dict[str, int]:
        """Return the bytes of unfinished downloads by repository, for those that have any."""
        sizes = {repo.repo_id: _unfinished_bytes(repo) for repo in self._repos()}
        return {name: size for name, size in sorted(sizes.items()) if size}

    def plan_removal(self, name: str, models: list[CachedModel]) -> tuple[DeleteCacheStrategy, int]:
        """Return what deletes some revisions of a repository, and the bytes that this frees."""
        assert self._info is not None
        repo = next(repo for repo in self._repos() if repo.repo_id == name)
        # Only of this repository: a copy of it under another name has the same commits.
        info = dataclasses.replace(self._info, repos=frozenset({repo}))
        strategy = info.delete_revisions(*(model.revision for model in models))
        return strategy, strategy.expected_freed_size + (_unfinished_bytes(repo) if strategy.repos else 0)

    def _repos(self) -> list[CachedRepoInfo]:
        repos = [] if self._info is None else self._info.repos
        return [repo for repo in repos if repo.repo_type == "model"]


def find_abilities(models: Sequence[CachedModel]) -> list[Ability]:
    """Return whether jaxllm can run the models: by architecture and quantization, and if no weight file is missing.

    They are those of config.json, or of the header of a GGUF file. No tensor is read.
    """
    from jaxllm.config.plugins import load_plugins

    load_plugins()
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(_access_time_kept(model.largest))
        return [_find_ability(model) for model in models]


def _find_ability(model: CachedModel) -> Ability:
    from jaxllm.resolve.checkpoint_settings import find_family

    if (model.path / _ADAPTER_NAME).is_file():
        return Ability(None, "a LoRA adapter, for an engine with --enable-lora")
    config: dict[str, Any] = {}
    try:
        config = _read_config(model)
        return Ability(find_family(model.name, config)[0], _missing_weights(model))
    except VLLMValidationError as error:
        names = config.get("architectures")
        stated = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
        return Ability(stated, _reason(model, error))
    except Exception as error:  # noqa: BLE001 (another program's files may hold anything)
        return Ability(None, f"its files cannot be read: {type(error).__name__}: {error}")


def _reason(model: CachedModel, error: VLLMValidationError) -> str:
    return str(error).removeprefix(f"model={model.name!r}: ").removeprefix(f"{model.name}: ")


def _read_config(model: CachedModel) -> dict[str, Any]:
    from jaxllm.loading.folder import CONFIG_NAME, read_config
    from jaxllm.loading.gguf.checkpoint import GGUFCheckpoint
    from jaxllm.loading.mistral.config import PARAMS_NAME

    files = _gguf_files(model.path)
    if not files or any((model.path / name).is_file() for name in (CONFIG_NAME, PARAMS_NAME)):
        return read_config(model.path, model.name)
    return GGUFCheckpoint(files[0], source=model.name).config


def _missing_weights(model: CachedModel) -> str:
    """Return which weight files are missing; "" if one format has all of its files."""
    from jaxllm.loading.weight_files import FORMATS, read_index, weight_files

    reasons = []
    for form in FORMATS["auto"]:
        if form.is_in(model.path):
            try:
                weight_files(model.path, form, read_index(model.path, form, model.name), model.name)
            except VLLMValidationError as error:
                reasons.append(_reason(model, error))
            else:
                return ""
    if _gguf_files(model.path):
        return ""
    return reasons[0] if reasons else "its weights are not here yet"


def _gguf_files(folder: Path) -> list[Path]:
    from jaxllm.loading.gguf.split_files import first_parts

    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf"))
    return [folder / name for name in first_parts(names)]


@contextmanager
def _access_time_kept(path: Path | None) -> Iterator[None]:
    """Keep a file's access time, so that looking at a model is no use of it."""
    before = None if path is None else path.stat()
    try:
        yield
    finally:
        if path is not None and before is not None and path.stat().st_atime_ns != before.st_atime_ns:
            with suppress(OSError):  # another user's file
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _cached(repo: CachedRepoInfo, revision: CachedRevisionInfo) -> CachedModel:
    largest = max(revision.files, key=lambda file: file.size_on_disk, default=None)
    return CachedModel(
        name=repo.repo_id,
        revision=revision.commit_hash,
        refs=tuple(sorted(revision.refs)),
        num_bytes=revision.size_on_disk,
        last_used=revision.last_modified if largest is None else largest.blob_last_accessed,
        path=revision.snapshot_path,
        largest=None if largest is None else largest.blob_path,
    )


def _unfinished_bytes(repo: CachedRepoInfo) -> int:
    return sum(path.stat().st_size for path in (repo.repo_path / "blobs").glob("*.incomplete"))
