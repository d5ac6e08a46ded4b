"""A web server on the loopback interface whose answers are raw bytes, so that they may be wrong."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

type Answer = bytes | Callable[[socket.socket], None]


@dataclass
class Web:
    """The server's port, its answers by path and the requests that came."""

    port: int
    answers: dict[str, Answer]
    requests: list[bytes] = field(default_factory=list)

    def url(self, path: str = "/", host: str = "media.test") -> str:
        return f"http://{host}:{self.port}{path}"


def http(body: bytes = b"", *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    """Return an answer; `length` is a false Content-Length."""
    lines = (f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers, "", "")
    return "\r\n".join(lines).encode() + body


def redirect(location: str) -> bytes:
    return http(b"", f"Location: {location}", status="302 Found")


@contextlib.contextmanager
def serve(answers: dict[str, Answer]) -> Iterator[Web]:
    """Run a server that answers each path with its bytes, or lets a function write to the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        web = Web(listener.getsockname()[1], answers)
        thread = threading.Thread(target=_accept, args=(listener, web), daemon=True)
        thread.start()
        yield web
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def _accept(listener: socket.socket, web: Web) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_answer, args=(connection, web), daemon=True).start()


def _answer(connection: socket.socket, web: Web) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(10)
        request = connection.recv(65536)
        web.requests.append(request)
        path = request.split(b" ", 2)[1].decode() if request.startswith(b"GET ") else "/"
        answer = web.answers.get(path, http(status="404 Not Found"))
        if callable(answer):
            answer(connection)
        else:
            connection.sendall(answer)
