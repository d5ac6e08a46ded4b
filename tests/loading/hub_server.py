"""A server on 127.0.0.1 stands in for the hub: the few endpoints that opening and fetching a model use."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Repositories = Mapping[str, Mapping[str, bytes]]


class HubServer(ThreadingHTTPServer):
    """Serves `repositories`, name -> path -> bytes. Those named in `gated` list their files but need TOKEN."""

    TOKEN = "hf_right"

    def __init__(self, repositories: Repositories, gated: frozenset[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.gated = gated
        self.requests: list[tuple[str, str, int]] = []
        """One (method, path, bytes of the answer) per request."""
        self.wrong_digests: dict[str, str] = {}
        """By path, a digest that is told in place of a file's."""
        self.held: dict[str, threading.Event] = {}
        """By path, what the second half of a file waits for that is asked for whole."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(repositories: Repositories, gated: frozenset[str] = frozenset()) -> Iterator[HubServer]:
    """Serve in a thread until the block is left."""
    server = HubServer(repositories, gated)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> HubServer:
        """Return the server as the class that it is of."""
        assert isinstance(self.server, HubServer)
        return self.server

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Stay silent; `requests` has it all."""

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        api = re.fullmatch(r"/api/models/(\w+/[\w.-]+?)(?:/(revision|tree)/([^/]+))?", path)
        file = re.fullmatch(r"/(\w+/[\w.-]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        if match is None or match[1] not in self.hub.repositories:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif api:
            self._answer_api(api[1], api[2], api[3] or "main")
        elif file:
            self._answer_file(file[1], file[3])

    def _answer_api(self, name: str, kind: str | None, revision: str) -> None:
        files = self.hub.repositories[name]
        if revision not in ("main", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif kind == "tree":
            tree = [
                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                | ({"lfs": self._pointer(path, data)} if path.endswith((".gguf", ".safetensors")) else {})
                for path, data in files.items()
            ]
            self._send(200, json.dumps(tree).encode())
        else:
            siblings = [{"rfilename": path} for path in files]
            self._send(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())

    def _pointer(self, path: str, data: bytes) -> dict[str, str | int]:
        return {"oid": self._digest(path, data), "size": len(data), "pointerSize": 134}

    def _digest(self, path: str, data: bytes) -> str:
        return self.hub.wrong_digests.get(path) or hashlib.sha256(data).hexdigest()

    def _answer_file(self, name: str, path: str) -> None:
        files = self.hub.repositories[name]
        if name in self.hub.gated and self.headers["Authorization"] != f"Bearer {self.hub.TOKEN}":
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path not in files:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        else:
            data = files[path]
            headers = {"ETag": f'"{self._digest(path, data)}"', "X-Repo-Commit": COMMIT}
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
            if wanted:
                data = data[int(wanted[1]) : int(wanted[2]) + 1 if wanted[2] else None]
            self._send(206 if wanted else 200, data, headers, None if wanted else self.hub.held.get(path))

    def _send(
        self, status: int, data: bytes, headers: Mapping[str, str] | None = None, held: threading.Event | None = None
    ) -> None:
        sent = 0 if self.command == "HEAD" else len(data)
        self.hub.requests.append((self.command, self.path.partition("?")[0], sent))
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        half = len(data) // 2 if held is not None else 0
        if sent:
            self.wfile.write(data[:half])
            if held is not None:
                held.wait()
            with suppress(ConnectionError):  # a killed client
                self.wfile.write(data[half:])
