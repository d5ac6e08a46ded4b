"""Load a checkpoint from the Hugging Face hub in two stages: config, tokenizer and tensor headers, then the weights.

The offline switch, cache folder, token and endpoint follow the hub library's own environment variables.
"""

from __future__ import annotations

import errno
import glob
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading import folder as local
from jaxllm.loading.checkpoint import Checkpoint, TensorInfo, dominant_dtype
from jaxllm.loading.mapped_file import FileSpan
from jaxllm.loading.mistral.config import PARAMS_NAME
from jaxllm.loading.safetensors import DTYPES
from jaxllm.loading.sentence_transformers import METADATA_NAME, SENTENCE_FILES, read_files
from jaxllm.loading.weight_files import HEAD_FILES, MISTRAL, SAFETENSORS, TORCH, open_weights

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

SMALL_FILES = (
    "config.json",
    local.QUANTIZATION_NAME,
    "generation_config.json",
    *local.PROCESSOR_NAMES,
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    *SENTENCE_FILES,
    METADATA_NAME,
    *HEAD_FILES,
    SAFETENSORS.index,
    TORCH.index,
    MISTRAL.index,
    PARAMS_NAME,
)
"""The small files that opening downloads: no code, and no weights, except those of BGE-M3's heads (2 MB)."""
_NUM_HEADER_THREADS = 8
_LOCK_SECONDS = 0.2
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
"""The errors of a disk that is full, or not to be written to."""


@dataclass(frozen=True, slots=True)
class Download:
    """A large file that is to be downloaded."""

    digest: str
    """Its SHA-256, in hexadecimal digits."""
    num_bytes: int
    blob: Path
    """Where it is in the cache once it is whole."""

    def num_done(self) -> int:
        """Return how many of its bytes are here: all, or those of the download that goes on."""
        if self.blob.exists():
            return self.num_bytes
        sizes: dict[float, int] = {0.0: 0}
        for path in self.blob.parent.glob(f"{self.digest}*.incomplete"):
            with suppress(FileNotFoundError):  # it has become the blob
                status = path.stat()
                sizes[status.st_mtime] = status.st_size
        return min(sizes[max(sizes)], self.num_bytes)

    def drop_partial(self) -> None:
        """Delete what downloads of it that were cut off have left: the hub library goes on with none of that. Nothing
        is deleted while a program downloads it.
        """
        from huggingface_hub.utils import WeakFileLock

        repository = self.blob.parent.parent
        lock = repository.parent / ".locks" / repository.name / f"{self.digest}.lock"
        if lock.exists():
            with suppress(OSError), WeakFileLock(lock, timeout=_LOCK_SECONDS):
                for path in self.blob.parent.glob(f"{self.digest}.*.incomplete"):
                    path.unlink(missing_ok=True)


def blobs_folder(name: str, cache_dir: str | None) -> Path:
    """Return the folder of the cache that has the contents of a repository's files."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    cache = Path(cache_dir or constants.HF_HUB_CACHE).expanduser()
    return cache / repo_folder_name(repo_id=name, repo_type="model") / "blobs"


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of the hub, as the user named it."""

    name: str
    revision: str | None
    token: str | bool | None
    cache_dir: str | None
    on_download: Callable[[Sequence[Download]], object] | None = None
    """It is called with large files before they are downloaded, those too that are here already."""

    def download(self, patterns: Sequence[str], commit: str | None = None) -> Path:
        """Download the matching files and return their folder, whose name is the commit."""
        from huggingface_hub import snapshot_download

        if self.on_download is not None and commit is not None:
            with suppress(VLLMValidationError):  # without the hub all may be here
                self.on_download(self._large(patterns, commit))
        with _translated_errors(self):
            return Path(
                snapshot_download(
                    self.name,
                    revision=commit or self.revision,
                    token=self.token,
                    cache_dir=self.cache_dir,
                    allow_patterns=list(patterns),
                )
            )

    def ask[T](self, question: Callable[[HfApi], T]) -> T:
        """Call the hub's API."""
        from huggingface_hub import HfApi

        with _translated_errors(self):
            return question(HfApi(token=self.token))

    def _large(self, patterns: Sequence[str], commit: str) -> list[Download]:
        """Return the matching files that the hub keeps by their digests, as it does large ones."""
        from huggingface_hub import RepoFile
        from huggingface_hub.utils import filter_repo_objects

        blobs = blobs_folder(self.name, self.cache_dir)
        tree = self.ask(lambda api: list(api.list_repo_tree(self.name, recursive=True, revision=commit)))
        files = {file.path: file.lfs for file in tree if isinstance(file, RepoFile)}
        wanted = (files[path] for path in filter_repo_objects(files, allow_patterns=list(patterns)))
        return [Download(lfs.sha256, lfs.size, blobs / lfs.sha256) for lfs in wanted if lfs is not None]

    def files(self, commit: str) -> list[str]:
        """List all files of one commit."""
        return self.ask(lambda api: api.list_repo_files(self.name, revision=commit))


class HubCheckpoint(Checkpoint):
    """Safetensors on the hub: headers are known at once, the weights are local after `fetch`."""

    def __init__(self, repository: Repository, source: str, small: Path, names: Sequence[str]) -> None:
        self.source = source
        self._repository = repository
        self._small = small
        self._names = list(names)
        self._fetched: local.FolderCheckpoint | None = None
        self.config = local.read_config(small, source)
        self.generation_config = local.read_generation_config(small, source)
        self.image_processor = local.read_processor(small, source, "image")
        self.video_processor = local.read_processor(small, source, "video")
        self.audio_processor = local.read_feature_extractor(small, source)
        self.sentence_files = read_files(small, source)
        self.tensors: Mapping[str, TensorInfo] = self._read_headers()
        self.is_gguf = False
        self.dtype = dominant_dtype(self.tensors.values(), self.config)

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        return self._here().read(name, index)

    def spans(self, name: str) -> Sequence[FileSpan]:
        return self._here().spans(name)

    def release(self, name: str) -> None:
        self._here().release(name)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return local.folder_tokenizer(self._small, self.source)

    def tokenizer_digest(self) -> str | None:
        return local.tokenizer_digest(self._small)

    def stamp(self) -> str:
        return f"{self.source} {self._small.name}"  # the commit

    @property
    def is_local(self) -> bool:
        return all((self._small / name).exists() for name in self._names)

    def fetch(self) -> None:
        if self._fetched is not None:
            return
        size = sum(info.num_bytes for info in self.tensors.values())
        logger.info("Fetching %d files, %.2f GB, of %s", len(self._names), size / 1e9, self.source)
        patterns = [glob.escape(name) for name in self._names]
        folder = self._repository.download(patterns, commit=self._small.name)
        self._fetched = local.FolderCheckpoint(folder, source=self.source)

    def _here(self) -> local.FolderCheckpoint:
        if self._fetched is None:
            raise RuntimeError(f"the weights of {self.source} are read before fetch()")
        return self._fetched

    def _read_headers(self) -> dict[str, TensorInfo]:
        """Download the header of every weight file."""
        ask = partial(_read_header, self._repository, self._small.name)
        with ThreadPoolExecutor(_NUM_HEADER_THREADS) as pool:
            headers = list(pool.map(ask, self._names))
        return {name: info for header in headers for name, info in header.items()} | self._read_heads()

    def _read_heads(self) -> dict[str, TensorInfo]:
        """Return the tensors of BGE-M3's heads, which are among the small files."""
        tensors: dict[str, TensorInfo] = {}
        for file_name in local.head_files(self._small):
            file = open_weights(self._small / file_name, self.source)
            tensors |= local.named_tensors(file_name, file)
        return tensors


def _read_header(repository: Repository, commit: str, file_name: str) -> dict[str, TensorInfo]:
    """Return the tensors of one file on the hub, by name."""
    header = repository.ask(
        lambda api: api.parse_safetensors_file_metadata(repository.name, file_name, revision=commit)
    )
    tensors: dict[str, TensorInfo] = {}
    for name, tensor in header.tensors.items():
        start, stop = tensor.data_offsets
        dtype = DTYPES[tensor.dtype].name if tensor.dtype in DTYPES else tensor.dtype
        tensors[local.tensor_prefix(file_name) + name] = TensorInfo(tuple(tensor.shape), dtype, stop - start)
    return tensors


@contextmanager
def _translated_errors(repository: Repository) -> Iterator[None]:
    """Turn any error of the hub library into one with the way out in it."""
    from huggingface_hub import errors
    from huggingface_hub.utils import HFValidationError

    name = repository.name
    try:
        yield
    except errors.GatedRepoError as error:
        text = f"the repository is gated. Accept its terms at {_page(name)}, then set HF_TOKEN or hf_token=..."
        raise _error(name, text) from error
    except errors.RevisionNotFoundError as error:
        raise VLLMValidationError(
            f"model={name!r} has no revision {repository.revision!r}: give a branch, a tag or a commit.",
            parameter="revision",
            value=repository.revision,
        ) from error
    except errors.RepositoryNotFoundError as error:
        text = (
            f"there is no such folder here, and no such repository at {_page(name)}, or it is private. "
            "Check the spelling; for a private one set HF_TOKEN or hf_token=..."
        )
        raise _error(name, text) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        text = (
            "its files are not all in the cache, and the hub cannot be reached or HF_HUB_OFFLINE is set. "
            "Connect and run again, or give a local folder"
        )
        raise _error(name, text) from error
    except HFValidationError as error:
        raise _error(name, f"there is no such folder here, and it is no hub id ({error})") from error
    except VLLMValidationError:
        raise
    except Exception as error:  # the HTTP client below the hub library may be any
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            raise _error(name, f"its files cannot be written to the cache: {error}") from error
        raise _error(name, f"the hub did not give it: {type(error).__name__}: {error}") from error


def _page(name: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{name}"


def _error(name: str, text: str) -> VLLMValidationError:
    return VLLMValidationError(f"model={name!r}: {text}.", parameter="model", value=name)
