"""Send forms with sounds to a server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.server.support import Answer, Served

SPEECH = Path(__file__).parents[2] / "data/media/speech.ogg"
"""A voice of espeak-ng: "The quick brown fox jumps over the lazy dog. My phone number is five five five, one two three
four." It lasts 7.65 s."""
DATA = SPEECH.read_bytes()
SAID = re.compile(r"quick.*fox.*lazy dog.*phone number", re.IGNORECASE | re.DOTALL)
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
MOST_BYTES = 8 << 20
"""The most bytes of samples that the server decodes: more than 2 minutes."""
_BOUNDARY = "a5c3e7"


def make_form(fields: Mapping[str, str | list[str]], files: Mapping[str, bytes]) -> tuple[bytes, str]:
    """Return the body of a form, and its content type."""
    texts = [(name, each) for name, value in fields.items() for each in ([value] if isinstance(value, str) else value)]
    parts = [f'name="{name}"\r\n\r\n{text}'.encode() for name, text in texts]
    head = 'name="{}"; filename="sound"\r\nContent-Type: audio/ogg\r\n\r\n'
    parts += [head.format(name).encode() + data for name, data in files.items()]
    begin = f"--{_BOUNDARY}\r\nContent-Disposition: form-data; ".encode()
    body = b"".join(begin + part + b"\r\n" for part in parts) + f"--{_BOUNDARY}--\r\n".encode()
    return body, f"multipart/form-data; boundary={_BOUNDARY}"


def send(server: Served, data: bytes | None, path: str = TRANSCRIPTIONS, **fields: Any) -> Answer:
    """Send a file, and fields whose values are texts, numbers or lists of texts; times stands for granularities."""
    if "times" in fields:
        fields["timestamp_granularities[]"] = fields.pop("times")
    texts = {name: value if isinstance(value, list) else str(value) for name, value in fields.items()}
    body, kind = make_form(texts, {} if data is None else {"file": data})
    return server.ask("POST", path, body, {"content-type": kind}, seconds=120)
