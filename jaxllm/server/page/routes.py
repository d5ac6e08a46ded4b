"""The routes of the page at `/`, which shows the server's state and chats with its model."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from starlette.routing import Route

from jaxllm.server.http.endpoint import Call, Endpoint, Reply

TYPES: Mapping[str, bytes] = {
    "css": b"text/css; charset=utf-8",
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
PAGE_FILES: Mapping[str, str] = {
    "/": "index.html",
    **{
        f"/page/{name}": name
        for name in (
            "api.js",
            "chart.js",
            "chat.js",
            "icon.svg",
            "main.js",
            "metrics.js",
            "page.css",
            "pictures.js",
            "status.js",
            "text.js",
            "theme.js",
        )
    },
}
"""The files by their paths."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
"""The page runs only its own files and connects only to this server, whatever a model or a client wrote.

The pictures of messages are data: URLs.
"""
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),  # files of two server versions must not be mixed
)


def routes() -> list[Route]:
    """Return a route for each file. The OpenAPI document leaves them out."""
    folder = files("jaxllm.server.page")
    return [
        Route(path, _endpoint((folder / name).read_bytes(), name), methods=["GET"], include_in_schema=False)
        for path, name in PAGE_FILES.items()
    ]


def _endpoint(content: bytes, name: str) -> Endpoint[Reply]:
    reply = Reply(content, content_type=TYPES[name.rpartition(".")[2]], headers=HEADERS)
    return Endpoint(show_file, lambda: reply, takes_json=False)


async def show_file(file: Reply, _call: Call) -> Reply:
    """Show a file of the page."""
    return file
