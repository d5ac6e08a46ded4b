"""Download models for Ollama's clients and delete them: for a server that was started with --enable-pull."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import threading
from collections.abc import AsyncGenerator, Iterable
from http import HTTPStatus
from pathlib import Path

import msgspec

from jaxllm.config.environment import environment
from jaxllm.exceptions import VLLMValidationError
from jaxllm.hub.cache import Cache
from jaxllm.hub.pull import MODULE, PullEvent, PullRequest, drop_partial
from jaxllm.hub.removal import plan_removal
from jaxllm.params.checks import shown
from jaxllm.server.http.errors import RequestFailedError
from jaxllm.utils.child_process import started

logger = logging.getLogger(__name__)

_HOSTS = ("hf.co/", "huggingface.co/")
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(:\w[\w.-]*)?")
_DISABLED = "models are neither downloaded nor deleted: start the server with --enable-pull."


def check_enabled(is_enabled: bool) -> None:
    """Raise RequestFailedError, 403, for a server without --enable-pull."""
    if not is_enabled:
        raise RequestFailedError(HTTPStatus.FORBIDDEN, _DISABLED)


def hub_name(name: str) -> str:
    """Return a model's name on the hub, as "org/name" or "org/name:QUANT": Ollama's clients may add a host, and a tag.

    Raises VLLMValidationError for another form.
    """
    plain = next((name.removeprefix(host) for host in _HOSTS if name.startswith(host)), name).removesuffix(":latest")
    if not _NAME.fullmatch(plain):
        message = f"model must be a name on the hub, org/name or org/name:QUANT, got {shown(name)}."
        raise VLLMValidationError(message, parameter="model", value=name)
    return plain


def is_part(removed: str, served: str) -> bool:
    """Return whether the files of a model that is served are among those of one that is to be removed."""
    (name, _, quant), (served_name, _, served_quant) = removed.lower().partition(":"), served.lower().partition(":")
    if name != served_name:
        return False
    return not quant or (served_quant != "" and (quant in served_quant or served_quant in quant))


class _Download:
    """One download, and the clients that follow it. For an event loop, but for its thread."""

    def __init__(self, request: PullRequest) -> None:
        self._request, self._loop = request, asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_given_up = False
        self._files: dict[str, PullEvent] = {}
        """The last report of each file, for clients that come later."""
        self.last: PullEvent | None = None
        """The report of its end, once it has ended."""
        self.followers: list[asyncio.Queue[PullEvent]] = []
        threading.Thread(target=self._run, name="jaxllm-pull", daemon=True).start()

    def join(self) -> asyncio.Queue[PullEvent]:
        """Return the reports that a new client reads, the last ones of all files first."""
        queue: asyncio.Queue[PullEvent] = asyncio.Queue()
        for event in self._files.values():
            queue.put_nowait(event)
        self.followers.append(queue)
        return queue

    def give_up(self) -> None:
        """End the download: nobody follows it any more."""
        self._is_given_up = True
        if self._process is not None:
            self._process.kill()

    def cut_off(self) -> None:
        """End the download, and tell all who follow it."""
        self._take(PullEvent("failed", error="the server is about to end, and the download with it."))
        self.give_up()

    def _run(self) -> None:
        """Run the process of the download, and hand its reports to the event loop."""
        last = PullEvent("failed", error="the download has ended before its time; the server's log tells more.")
        try:
            with started(MODULE, self._request, environment(("",)) | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}) as process:
                self._process = process
                assert process.stdout is not None
                for line in () if self._is_given_up else process.stdout:
                    event = msgspec.json.decode(line, type=PullEvent)
                    if event.stage in ("done", "failed"):
                        last = event
                        break
                    self._hand_on(event)
            if last.stage == "failed":
                drop_partial(self._request, list(self._files))
        except Exception:
            logger.exception("the download of %s has failed", self._request.name)
        self._hand_on(last)

    def _hand_on(self, event: PullEvent) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take, event)

    def _take(self, event: PullEvent) -> None:
        if event.stage == "download":
            self._files[event.digest] = event
        elif event.stage != "verify":
            self.last = event
        for queue in self.followers:
            queue.put_nowait(event)


class Pulls:
    """The downloads of a server: at most one of a model at a time, which several clients may follow."""

    def __init__(self) -> None:
        self._downloads: dict[PullRequest, _Download] = {}

    async def follow(self, request: PullRequest) -> AsyncGenerator[PullEvent, None]:
        """Download a model, or follow its download, and yield the reports up to that of its end.

        A download that nobody follows any more ends.
        """
        download = self._downloads.get(request)
        if download is None or download.last is not None:
            download = self._downloads[request] = _Download(request)
        queue = download.join()
        try:
            is_ended = False
            while not is_ended:
                event = await queue.get()
                is_ended = event.stage in ("done", "failed")
                yield event
        finally:
            download.followers.remove(queue)
            if not download.followers:
                download.give_up()
                if self._downloads.get(request) is download:
                    del self._downloads[request]

    def cut_off(self) -> None:
        """End all downloads, for the server ends."""
        for download in list(self._downloads.values()):
            download.cut_off()

    async def delete(self, name: str, download_dir: str | None, served: Iterable[str]) -> None:
        """Delete a model, or one GGUF file of it, from the hub's cache.

        Raises RequestFailedError, 404, for one that is not there, VLLMValidationError for one of `served`, for one that
        is being downloaded, and if it cannot be deleted.
        """
        served = list(served)
        if any(is_part(name, each) for each in served):
            raise VLLMValidationError(f"model {name!r} is being served.", parameter="model", value=name)
        if any(is_part(name, each.name) or is_part(each.name, name) for each in self._downloads):
            raise VLLMValidationError(f"model {name!r} is being downloaded.", parameter="model", value=name)
        await asyncio.to_thread(_delete, name, download_dir, served)


def _delete(name: str, download_dir: str | None, served: Iterable[str]) -> None:
    repository, _, quant = name.partition(":")
    cache = Cache(download_dir)
    models = [model for model in cache.models() if model.name == repository]
    if not models:
        raise RequestFailedError(HTTPStatus.NOT_FOUND, f"model {name!r} not found")
    folder = models[0].path.parents[1].resolve()
    if any(Path(each).resolve().is_relative_to(folder) for each in served):
        raise VLLMValidationError(f"model {name!r} is being served.", parameter="model", value=name)
    try:
        removal = plan_removal(cache, repository, models, quant)
    except VLLMValidationError as error:  # it has other GGUF files
        raise RequestFailedError(HTTPStatus.NOT_FOUND, str(error)) from error
    if removal.execute() is not None:
        raise VLLMValidationError(f"model {name!r} cannot be deleted: its files stay.", parameter="model", value=name)
    logger.info("deleted %s: freed %d bytes", name, removal.num_bytes)
