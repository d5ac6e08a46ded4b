"""Ollama's /api/pull and /api/delete over a stand-in for the hub, with --enable-pull and without."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jaxllm.exceptions import VLLMValidationError
from jaxllm.hub.pull import PullEvent, PullRequest
from jaxllm.server.ollama import pulls
from jaxllm.server.ollama.pulls import Pulls, hub_name, is_part
from tests.cli.test_hub_commands import GGUF, LLAMA, REPOSITORIES, WEIGHTS, put
from tests.loading.hub_server import COMMIT, HubServer, serving
from tests.server.support import Served, served

pytestmark = pytest.mark.server

DIGEST = hashlib.sha256(WEIGHTS).hexdigest()


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    """Return a server in place of the hub."""
    with serving(REPOSITORIES) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache of the server's processes, which ask the stand-in."""
    for name, value in {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.fixture
def server(mock: Any, cache: Path) -> Iterator[Served]:
    """Return a server that downloads into the cache."""
    with served(mock, "--enable-pull", "--download-dir", str(cache)) as server:
        yield server


def lines(server: Served, **body: Any) -> list[dict[str, Any]]:
    answer = server.post("/api/pull", body)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/x-ndjson")
    return [json.loads(line) for line in answer.body.splitlines()]


def names(cache: Path, name: str) -> set[str]:
    """Return the files of a repository in the cache."""
    folder = cache / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.parametrize(("method", "path"), [("POST", "/api/pull"), ("DELETE", "/api/delete")])
def test_without_the_flag_both_are_refused(mock: Any, method: str, path: str) -> None:
    with served(mock) as server:
        answer = server.ask(method, path, {"model": "org/llama"})
    assert answer.status == 403
    assert "--enable-pull" in answer.json["error"]


def test_a_model_comes_and_goes(server: Served, cache: Path) -> None:
    first, *progress, verifying, writing, last = lines(server, model="hf.co/org/llama:latest")
    assert [first, verifying, writing, last] == [
        {"status": "pulling manifest"},
        {"status": "verifying sha256 digest"},
        {"status": "writing manifest"},
        {"status": "success"},
    ]
    assert {line["status"] for line in progress} == {f"pulling {DIGEST[:12]}"}
    assert {(line["digest"], line["total"]) for line in progress} == {(f"sha256:{DIGEST}", len(WEIGHTS))}
    done = [line["completed"] for line in progress]
    assert done == sorted(done)
    assert done[-1] == len(WEIGHTS)
    assert names(cache, "org/llama") == {"config.json", "tokenizer.json", "model.safetensors"}
    assert server.post("/api/pull", {"name": "org/llama", "stream": False}).json == {"status": "success"}
    deleted = server.ask("DELETE", "/api/delete", {"model": "org/llama"})
    assert (deleted.status, deleted.body) == (200, b"")
    assert names(cache, "org/llama") == set()
    gone = server.ask("DELETE", "/api/delete", {"name": "org/llama"})
    assert (gone.status, gone.json) == (404, {"error": "model 'org/llama' not found"})


def test_errors_are_the_last_line(server: Served, cache: Path) -> None:
    for name, words in (
        ("org/none", "no such repository"),
        ("org/alien", "'AlienForCausalLM' is not supported"),
        ("org/gguf", '"org/gguf:Q4_K_M"'),
    ):
        first, last = lines(server, model=name)
        assert (first, last.keys()) == ({"status": "pulling manifest"}, {"error"})
        assert words in last["error"]
        whole = server.post("/api/pull", {"model": name, "stream": False})
        assert (whole.status, whole.json) == (400, last)
    for name in ("", "/etc/passwd", "../a/b", "a/../b", "a/b/c", "a b/c"):
        answer = server.post("/api/pull", {"model": name})
        assert (answer.status, "org/name" in answer.json["error"]) == (400, True)
    assert names(cache, "org/alien") == {"config.json"}


def test_a_damaged_file_is_not_kept(server: Served, cache: Path, hub: HubServer) -> None:
    wrong = hashlib.sha256(GGUF).hexdigest()
    hub.wrong_digests["model.safetensors"] = wrong
    try:
        last = lines(server, model="org/llama")[-1]
    finally:
        hub.wrong_digests.clear()
    assert f"its SHA-256 is {DIGEST}, not {wrong}" in last["error"]
    assert not [path for path in (cache / "models--org--llama" / "blobs").iterdir() if path.name == wrong]


def test_what_is_served_is_not_deleted(server: Served, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = put(cache, "org/served", COMMIT, {"config.json": b"{}"})
    [entry] = server.app.state.models.entries
    config = server.llm.model_config
    assert entry.sources == (config.model, config.tokenizer)
    for source in ("org/served", str(folder / "snapshots" / COMMIT)):
        monkeypatch.setattr(entry, "sources", ("another/model", source))
        answer = server.ask("DELETE", "/api/delete", {"model": "org/served"})
        assert (answer.status, answer.json) == (400, {"error": "model 'org/served' is being served."})
        assert names(cache, "org/served") == {"config.json"}
    [model] = server.get("/api/tags").json["models"]
    answer = server.ask("DELETE", "/api/delete", {"model": model["name"]})
    assert (answer.status, answer.json) == (400, {"error": f"model {model['name']!r} is being served."})


def test_a_gguf_file_that_is_not_there(server: Served, cache: Path) -> None:
    put(cache, "org/gguf", COMMIT, {"m.Q4_K_M.gguf": b"four"})
    answer = server.ask("DELETE", "/api/delete", {"model": "org/gguf:Q8_0"})
    assert (answer.status, answer.json["error"]) == (
        404,
        "org/gguf:Q8_0: expected one GGUF file, the cache has: m.Q4_K_M.gguf.",
    )
    assert server.ask("DELETE", "/api/delete", {"model": "org/gguf:q4_k_m"}).status == 200
    assert names(cache, "org/gguf") == set()


@pytest.fixture
def held(hub: HubServer) -> Iterator[threading.Event]:
    """Return what the second half of all weights waits for."""
    event = hub.held["model.safetensors"] = threading.Event()
    yield event
    event.set()
    hub.held.clear()


def pulling() -> list[psutil.Process]:
    """Return the processes of downloads."""
    return [each for each in psutil.Process().children() if is_pull(each)]


def is_pull(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # it has ended
        return "jaxllm.hub.pull" in process.cmdline()
    return False


def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextlib.contextmanager
def following(server: Served) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the lines of a download as they come, and leave it after a block."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    with contextlib.closing(connection):
        connection.request(
            "POST", "/api/pull", json.dumps({"model": "org/llama"}), {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        yield (json.loads(line) for line in answer)
        answer.close()


def test_two_clients_share_a_process(server: Served, held: threading.Event) -> None:
    with following(server) as first, following(server) as second:
        assert [next(first), next(second)] == [{"status": "pulling manifest"}] * 2
        assert next(first)["digest"] == next(second)["digest"] == f"sha256:{DIGEST}"
        assert len(pulling()) == 1
        refused = server.ask("DELETE", "/api/delete", {"model": "org/llama"})
        assert (refused.status, refused.json) == (400, {"error": "model 'org/llama' is being downloaded."})
        held.set()
        assert [*first][-1] == [*second][-1] == {"status": "success"}


def test_a_client_that_leaves_ends_its_download(server: Served, cache: Path, held: threading.Event) -> None:
    blobs = cache / "models--org--llama" / "blobs"
    with following(server) as lines_of_one:
        next(lines_of_one)
        assert next(lines_of_one)["completed"] == 0
        until(lambda: list(blobs.glob("*.incomplete")))
    until(lambda: not pulling() and not list(blobs.glob("*.incomplete")))
    assert names(cache, "org/llama") == {"config.json", "tokenizer.json"}
    held.set()
    assert lines(server, model="org/llama")[-1] == {"status": "success"}


def test_a_download_that_is_killed_is_told_of(server: Served, cache: Path, held: threading.Event) -> None:
    blobs = cache / "models--org--llama" / "blobs"
    with following(server) as lines_of_one:
        next(lines_of_one)
        next(lines_of_one)
        until(lambda: list(blobs.glob("*.incomplete")))
        [process] = pulling()
        process.kill()
        [last] = lines_of_one
    assert last.keys() == {"error"}
    assert "has ended before its time" in last["error"]
    assert not list(blobs.glob("*.incomplete"))


def test_a_full_disk(server: Served, cache: Path) -> None:
    """A process whose files may have no more bytes than `limit` stands in for one whose disk is full."""
    limit = len(WEIGHTS) - 1
    assert max(len(LLAMA), len(str(cache))) < limit
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with following(server) as lines_of_one:
        next(lines_of_one)
        until(pulling)
        resource.prlimit(pulling()[0].pid, resource.RLIMIT_FSIZE, (limit, before[1]))
        last = [*lines_of_one][-1]
    assert "its files cannot be written to the cache: [Errno 27] File too large" in last["error"]
    assert not list((cache / "models--org--llama" / "blobs").glob("*.incomplete"))
    assert lines(server, model="org/llama")[-1] == {"status": "success"}


@pytest.mark.parametrize(
    ("removed", "served_name", "expected"),
    [
        ("org/a", "org/a", True),
        ("org/a", "Org/A:Q4_K_M", True),
        ("org/a:q4", "org/a:Q4_K_M", True),
        ("org/a:Q4_K_M", "org/a:q4", True),
        ("org/a:Q8_0", "org/a:Q4_K_M", False),
        ("org/a:Q8_0", "org/a", False),
        ("org/a", "org/ab", False),
        ("org/a", "/models/a", False),
    ],
)
def test_parts_of_served_models(removed: str, served_name: str, expected: bool) -> None:
    assert is_part(removed, served_name) is expected


def test_names() -> None:
    assert hub_name("huggingface.co/org/a-b.c:Q4_K_M") == "org/a-b.c:Q4_K_M"
    with pytest.raises(VLLMValidationError, match="org/name"):
        hub_name("llama3.2")


class Downloads:
    """Stands in for processes of downloads, which report when they are told to."""

    def __init__(self) -> None:
        self.started: list[Downloads._One] = []

    class _One:
        def __init__(self) -> None:
            self.lines: list[bytes] = []
            self.changed = threading.Condition()
            self.is_killed = False
            self.stdout = self

        def __enter__(self) -> Downloads._One:
            return self

        def __exit__(self, *_: object) -> None:
            self.kill()

        def __iter__(self) -> Iterator[bytes]:
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.lines or self.is_killed)
                    if not self.lines:
                        return
                    line = self.lines.pop(0)
                yield line

        def kill(self) -> None:
            with self.changed:
                self.is_killed = True
                self.changed.notify()

        def tell(self, text: str) -> None:
            with self.changed:
                self.lines.append(text.encode())
                self.changed.notify()

    def start(self, *_: object) -> Downloads._One:
        self.started.append(self._One())
        return self.started[-1]


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> Downloads:
    """Return the downloads that are started."""
    made = Downloads()
    monkeypatch.setattr(pulls, "started", made.start)
    return made


REQUEST = PullRequest("org/llama", None, None)
HALF = PullEvent("download", "d", 8, 4)
HALF_LINE = '{"stage":"download","digest":"d","num_bytes":8,"num_done":4}'


async def take(reading: Any) -> PullEvent:
    return await asyncio.wait_for(anext(reading), 5)


def test_several_follow_one_download(downloads: Downloads) -> None:
    """The second sees at once how far it is, and follows it when the first has left."""

    async def run() -> None:
        shared = Pulls()
        first = shared.follow(REQUEST)
        asking = asyncio.ensure_future(take(first))
        await asyncio.sleep(0.05)
        downloads.started[0].tell(HALF_LINE)
        assert await asking == HALF
        second = shared.follow(REQUEST)
        assert await take(second) == HALF
        await first.aclose()
        assert not downloads.started[0].is_killed
        with pytest.raises(VLLMValidationError, match="is being downloaded"):
            await shared.delete("org/llama", None, [])
        downloads.started[0].tell('{"stage":"done"}')
        assert (await take(second)).stage == "done"
        with pytest.raises(StopAsyncIteration):
            await take(second)
        assert len(downloads.started) == 1
        third = shared.follow(REQUEST)
        asking = asyncio.ensure_future(take(third))
        await asyncio.sleep(0.05)
        assert len(downloads.started) == 2, "the first download has ended"
        downloads.started[1].kill()
        assert (await asking).stage == "failed"

    asyncio.run(run())


def test_a_download_that_nobody_follows_ends(downloads: Downloads) -> None:
    async def run() -> None:
        shared = Pulls()
        reading = shared.follow(REQUEST)
        asking = asyncio.ensure_future(take(reading))
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.wait([asking])
        assert downloads.started[0].is_killed

    asyncio.run(run())


def test_the_end_of_a_server_ends_its_downloads(downloads: Downloads) -> None:
    async def run() -> None:
        shared = Pulls()
        reading = shared.follow(REQUEST)
        asking = asyncio.ensure_future(take(reading))
        await asyncio.sleep(0.05)
        shared.cut_off()
        assert (await asking) == PullEvent("failed", error="the server is about to end, and the download with it.")
        assert downloads.started[0].is_killed
        with pytest.raises(StopAsyncIteration):
            await take(reading)

    asyncio.run(run())
