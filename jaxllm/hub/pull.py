"""Download a model into the hub's cache: the files that an engine reads, and no others.

As a program, it is the process of a download that a server may end at any time; it reports in lines of JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from jaxllm.config.plugins import load_plugins
from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.hub import Download, blobs_folder
from jaxllm.loading.open import local_path, open_checkpoint
from jaxllm.resolve.checkpoint_settings import find_family
from jaxllm.utils.child_process import receive

MODULE = "jaxllm.hub.pull"
_LOOK_SECONDS = 0.25


class PullRequest(msgspec.Struct, frozen=True):
    """What the program downloads: a model by its name on the hub."""

    name: str
    token: str | bool | None
    download_dir: str | None


class PullEvent(msgspec.Struct, frozen=True):
    """What the program reports: how far a file has come, that files are verified, or the end."""

    stage: Literal["download", "verify", "done", "failed"]
    digest: str = ""
    """The SHA-256 of a file that is downloaded."""
    num_bytes: int = 0
    """Its size."""
    num_done: int = 0
    """The bytes of it that are here."""
    error: str = ""
    """What has failed."""


def pull(
    name: str,
    *,
    revision: str | None = None,
    load_format: str = "auto",
    token: str | bool | None = None,
    download_dir: str | None = None,
    on_download: Callable[[Sequence[Download]], object] | None = None,
) -> None:
    """Download a model. `on_download` is called with large files before they are downloaded.

    Raises VLLMValidationError if it cannot be had, or run: that is found before its weights are downloaded.
    """
    if local_path(name) is not None:
        message = f"{name!r} is a folder or file here, which engines read as it is: there is nothing to download."
        raise VLLMValidationError(message, parameter="model", value=name)
    load_plugins()
    checkpoint = open_checkpoint(
        name,
        load_format=load_format,
        revision=revision,
        token=token,
        download_dir=download_dir,
        check_config=lambda config: find_family(name, config),
        on_download=on_download,
    )
    checkpoint.fetch()
    find_family(name, checkpoint.config)  # a GGUF file has its config in it


def drop_partial(request: PullRequest, digests: Iterable[str]) -> None:
    """Delete what a download that was ended has left of files, by their digests."""
    blobs = blobs_folder(request.name.partition(":")[0], request.download_dir)
    for digest in digests:
        Download(digest, 0, blobs / digest).drop_partial()


class _Reporter:
    """Reports how far downloads have come, from a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: dict[Download, int] = {}
        """The bytes that were last reported of each file."""
        self._fresh: list[Download] = []
        """The files that were not here at first."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxllm-pull", daemon=True)
        self._thread.start()

    def add(self, downloads: Sequence[Download]) -> None:
        """Report on more files from now on."""
        with self._lock:
            for download in downloads:
                if download not in self._shown:
                    self._shown[download] = -1
                    if not download.blob.exists():
                        download.drop_partial()
                        self._fresh.append(download)
        self._look()

    def verify(self) -> None:
        """Report for the last time, and compare the digests of new files. Raises VLLMValidationError for a file that is
        not what the hub has announced, which it deletes.
        """
        self._ended.set()
        self._thread.join()
        self._look()
        if self._fresh:
            _report(PullEvent("verify"))
        for download in self._fresh:
            with download.blob.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != download.digest:
                download.blob.unlink()
                message = f"a file has arrived damaged: its SHA-256 is {digest}, not {download.digest}. Pull it again."
                raise VLLMValidationError(message, parameter="model")

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        with self._lock:
            for download, shown in self._shown.items():
                if (num_done := download.num_done()) != shown:
                    self._shown[download] = num_done
                    _report(PullEvent("download", download.digest, download.num_bytes, num_done))


def _report(event: PullEvent) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


def main() -> int:
    """Download what the request on standard input names, and report; return the exit status."""
    request = receive(PullRequest)
    reporter = _Reporter()
    with contextlib.suppress(BrokenPipeError):  # nobody waits any more
        try:
            pull(request.name, token=request.token, download_dir=request.download_dir, on_download=reporter.add)
            reporter.verify()
        except VLLMValidationError as error:
            _report(PullEvent("failed", error=str(error)))
            return 1
        _report(PullEvent("done"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
