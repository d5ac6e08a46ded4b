"""Hostile files and forms come while others' sounds are transcribed: each is refused by name, and hurts nobody."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
import socket
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.media.forged import box, forged_mov, forged_vorbis
from tests.media.sounds import contain, encode, film, tones, wav
from tests.server.speech.support import DATA, MOST_BYTES, SAID, TRANSCRIPTIONS, TRANSLATIONS, make_form, send
from tests.server.support import Answer, Served

pytestmark = pytest.mark.server

RATE = 16_000
MOST_GROWTH = 300 << 20
"""The most bytes by which the process may grow meanwhile. Two sounds at the limit are decoded at once, and
samples exist as bytes, as an array and in clips."""
NO_FORMAT = "is not a WAV, FLAC, Ogg, MP3"
DAMAGED = r"damaged|ends before its header says"
TOO_LONG = f"more than {MOST_BYTES:,} bytes"


def silence(seconds: int, channels: int = 1) -> bytes:
    """Return a FLAC file of silence, whose samples are many more bytes than it has."""
    return encode(np.broadcast_to(np.zeros((1, channels), np.int16), (seconds * RATE, channels)), RATE, "FLAC")


def with_length(flac: bytes, num_samples: int) -> bytes:
    """Return a FLAC file whose header announces a number of samples."""
    fields = int.from_bytes(flac[18:26], "big")
    return flac[:18] + ((fields >> 36 << 36) | num_samples).to_bytes(8, "big") + flac[26:]


def elsewhere(path: str) -> bytes:
    """Return a MOV file whose samples are in another file."""
    name = path.encode()
    alias = bytes(10) + bytes([min(27, len(name))]) + name[:27].ljust(27, b"\0") + bytes(112)
    alias += struct.pack(">HH", 2, len(name)) + name + struct.pack(">HH", 0xFFFF, 0)
    reference = box("alis", bytes(4), alias)
    plain = box("url ", b"\0\0\0\1")
    data = forged_mov()
    grown = len(reference) - len(plain)
    for parent in ("dref", "dinf", "minf", "mdia", "trak", "moov"):
        at = data.index(parent.encode()) - 4
        size = int.from_bytes(data[at : at + 4], "big") + grown
        data = data[:at] + size.to_bytes(4, "big") + data[at + 4 :]
    return data.replace(plain, reference)


def not_finite(value: float) -> bytes:
    """Return a file whose last sample is `value`."""
    samples = np.zeros((RATE, 1), np.float32)
    samples[-1] = value
    return encode(samples, RATE, "WAV", "FLOAT")


def zipped(data: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("speech.ogg", data)
    return stream.getvalue()


def hostile_files(url: str) -> dict[str, tuple[bytes, str]]:
    """Return files, each with what its refusal says; some name `url`."""
    floats = np.zeros((RATE, 1), np.float32)
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\n{url}/a.ts\n#EXT-X-ENDLIST\n"
    deep = b""
    for _ in range(2000):
        deep = struct.pack(">I4s", 8 + len(deep), b"moov") + deep
    return {
        "no bytes": (b"", "not a WAV|is missing|no samples|empty"),
        "one byte": (b"\0", NO_FORMAT),
        "an hour of silence": (silence(3600), TOO_LONG),
        "silence in eight channels": (silence(150, 8), TOO_LONG),
        "minutes of Opus": (contain(np.zeros((48_000, 1), np.float32), 48_000, "webm", "libopus", times=150), TOO_LONG),
        "a WAV header of hours": (wav(bytes(4000), size=2**30), DAMAGED),
        "a FLAC header of weeks": (with_length(silence(1), 2**36 - 1), DAMAGED),
        "a MOV header of billions": (forged_mov(num_samples=170_000_000, chunk=170_000_000), "announce more"),
        "a MOV fragment of billions": (forged_mov(extra=box("trun", b"\0\0\0\0\xff\0\0\0")), "announce more"),
        "a MOV of many tracks in fragments": (forged_mov(num_tracks=900, extra=box("moof") * 60_000), "announce more"),
        "a MOV edited 100,000 times": (forged_mov(num_edits=100_000), "announce more"),
        "a MOV header that is compressed": (forged_mov(extra=box("cmov", bytes(20))), "compressed"),
        "an Ogg file of large codebooks": (forged_vorbis(8, 20), "codebooks are too large"),
        "the same after a tag": (b"ID3\4\0\0\0\0\0\0" + forged_vorbis(256, 22), "codebooks are too large"),
        "a MOV of a million boxes": (box("ftyp", b"qt  ") + box("free") * 1_000_000, "more than 100,000 boxes"),
        "boxes 2,000 deep": (box("ftyp", b"qt  ") + deep, DAMAGED),
        "a WAV file of very many chunks": (wav(b"")[:12] + b"note\0\0\0\0" * 300_000, "more than 1,000 chunks"),
        "very many tags": (b"ID3\4\0\0\0\0\0\0" * 1_000_000, "more than 100 ID3 tags"),
        "a tag that is too long": (b"ID3\4\0\0\x7f\x7f\x7f\x7f" + bytes(100_000), NO_FORMAT),
        "very many blocks of metadata": (silence(1)[:42] + b"\1\0\0\0" * 300_000, DAMAGED),
        "very many frames of nothing": (b"\xff\xfb\x90\x44" * 300_000, DAMAGED),
        "a cut WAV file": (encode(floats, RATE)[:-1000], DAMAGED),
        "a cut FLAC file": (encode(tones(1, RATE), RATE, "FLAC")[:-1000], DAMAGED),
        "a cut Ogg file": (DATA[:60], DAMAGED),
        "a cut MP4 file": (contain(tones(1, RATE), RATE, "mp4", "aac")[:-500], DAMAGED),
        **{f"{value}": (not_finite(value), "infinite or not a number") for value in (np.nan, np.inf, -np.inf)},
        "one sample": (encode(floats[:1], RATE), "less than 0.01 s"),
        "no samples": (encode(floats[:0], RATE), "no samples"),
        "no channels": (wav(bytes(400), channels=0), "channels|damaged"),
        "64 channels": (wav(bytes(4 * 64 * 10), channels=64), "64 channels"),
        "65,535 channels": (wav(bytes(4 * 65_535), channels=65_535), "channels|damaged"),
        **{f"{rate} a second": (wav(bytes(400), rate), "a second|damaged") for rate in (0, 1, 999, 655_350, 2**32 - 1)},
        "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(1000), NO_FORMAT),
        "a page": (b"<!doctype html><audio src=/a.mp3>", NO_FORMAT),
        "an archive": (zipped(DATA), NO_FORMAT),
        "a file in gzip": (gzip.compress(DATA), NO_FORMAT),
        "a file in base64": (base64.b64encode(DATA), NO_FORMAT),
        "AIFF": (encode(floats, RATE, "AIFF"), NO_FORMAT),
        "a file in RIFF": (b"RIFF" + struct.pack("<I", len(DATA)) + DATA, DAMAGED),
        "a RIFF in RIFF": (b"RIFF\xff\xff\xff\x7fWAVE" + encode(floats, RATE), DAMAGED),
        "a picture in a tag": (b"ID3\4\0\0\0\0\0\x0a" + bytes(10) + b"\x89PNG\r\n\x1a\n" + bytes(1000), NO_FORMAT),
        "a film without sound": (film(), "no audio in it"),
        "a playlist": (playlist.encode(), NO_FORMAT),
        "a list of files": (f"ffconcat version 1.0\nfile '{url}/a.wav'\nfile /etc/passwd\n".encode(), NO_FORMAT),
        "a URL": (f"{url}/a.wav".encode(), NO_FORMAT),
        "a session's description": (f"v=0\no=- 0 0 IN IP4 0.0.0.0\nm=audio {url[-5:]} RTP/AVP 0\n".encode(), NO_FORMAT),
        "a manifest": (f"<?xml version='1.0'?><MPD><BaseURL>{url}/</BaseURL></MPD>".encode(), NO_FORMAT),
        "a playlist in a box": (box("ftyp", b"isom") + playlist.encode(), DAMAGED),
        "a MOV that names a file": (elsewhere("/etc/passwd"), "no samples"),
        "a MOV that names a URL": (elsewhere(f"{url}/a.mov"), "no samples"),
        "noise": (np.random.default_rng().bytes(1_000_000), f"{NO_FORMAT}|{DAMAGED}"),
        "noise in Ogg": (b"OggS" + np.random.default_rng().bytes(1_000_000), DAMAGED),
        "noise in Matroska": (b"\x1aE\xdf\xa3" + np.random.default_rng().bytes(1_000_000), f"{DAMAGED}|no audio"),
    }  # fmt: skip


def hostile_forms(good: bytes, kind: str) -> dict[str, tuple[bytes, str, str]]:
    """Return bodies with their content types, each with what its refusal says. `good` is a form that is right."""
    field = b'--a5c3e7\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'

    def with_field(name: bytes, value: bytes) -> bytes:
        return field % (name, value) + good

    return {
        "very many fields": (field % (b"a", b"") * 300_000 + good, kind, "more than 100 parts"),
        "a long name of a file": (good.replace(b"sound", b"a" * 1_000_000, 1), kind, "too long headers"),
        "many headers": (good.replace(b"\r\n\r\n", b"\r\nx: y" * 100_000 + b"\r\n\r\n", 1), kind, "too many or"),
        "a long name of a field": (with_field(b"a" * 3000, b"b"), kind, "name has more than 100"),
        "a long field": (with_field(b"prompt", b"a" * 2_000_000), kind, "prompt: a field of a form has at most"),
        "another boundary": (good, "multipart/form-data; boundary=other", "not a form"),
        "no boundary": (good, "multipart/form-data", "no boundary"),
        "a boundary that never ends": (good[:-20], kind, "ends early"),
        "two files": (good.replace(b"--a5c3e7--\r\n", b"") + good, kind, "send one file|not a form"),
        "deep arguments": (with_field(b"vllm_xargs", b"[" * 60_000), kind, "vllm_xargs"),
        "a file in place of a field": (good.replace(b'name="file"', b'name="prompt"'), kind, "file is missing"),
        "a URL in place of a file": (field % (b"file", b"http://a.b/c") + b"--a5c3e7--\r\n", kind, "file is text"),
        "file_url": (field % (b"file_url", b"file:///etc/passwd") + b"--a5c3e7--\r\n", kind, "file is missing"),
        "a number that is too long": (with_field(b"seed", b"9" * 60_000), kind, "seed"),
        "a special token": (with_field(b"prompt", b"<|endoftext|>"), kind, "prompt"),
    }  # fmt: skip


def hostile_chats(url: str) -> list[dict[str, Any]]:
    """Return bodies of chats with sounds, which a Whisper has no use for."""
    sound = {"data": base64.b64encode(DATA).decode(), "format": "ogg"}
    parts: list[dict[str, Any]] = [
        {"type": "audio_url", "audio_url": {"url": f"{url}/a.wav"}},
        {"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}},
        {"type": "input_audio", "input_audio": sound},
    ]
    return [{"messages": [{"role": "user", "content": [part]}]} for part in parts]


@pytest.fixture
def listener() -> Iterator[tuple[str, Callable[[], int]]]:
    """Return the URL of a server that nobody should ask, and a function that counts its connections."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.setblocking(False)

        def count() -> int:
            try:
                sock.accept()[0].close()
            except BlockingIOError:
                return 0
            return 1

        yield f"http://127.0.0.1:{sock.getsockname()[1]}", count


GOOD: list[Callable[[Served], Any]] = [
    lambda server: send(server, DATA, language="en").json,
    lambda server: send(server, DATA, TRANSLATIONS, language="de").json,
    lambda server: send(server, DATA, response_format="srt").body,
    lambda server: text_of(send(server, DATA, stream="true")),
]
"""Requests that others send, the last for a stream; each returns its answer."""


def text_of(stream: Answer) -> str:
    return "".join(event["choices"][0]["delta"]["content"] for event in stream.events)


class Crowd:
    """Sends the good requests again and again until it is left."""

    def __init__(self, server: Served) -> None:
        self._server, self._is_over = server, threading.Event()
        self._threads = ThreadPoolExecutor(len(GOOD))
        self.answers: list[list[Any]] = []

    def __enter__(self) -> None:
        self._running = [self._threads.submit(self._repeat, request) for request in GOOD]

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.answers = [each.result() for each in self._running]
        self._threads.shutdown()

    def _repeat(self, request: Callable[[Served], Any]) -> list[Any]:
        answers = [request(self._server)]
        while not self._is_over.is_set():
            answers.append(request(self._server))
        return answers


def peak_bytes(*, reset: bool = False) -> int:
    """Return the most memory that the process has had since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    shown = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert shown is not None
    return int(shown[1]) << 10


def check_refused(answer: Answer, message: str) -> str:
    """Return what is wrong with the answer to a hostile request; "" if it is as it should be."""
    error = answer.json["error"] if answer.status >= 400 else {"message": answer.body.decode()}
    is_refused = answer.status == 400 and re.search(message, error["message"])
    is_clean = len(answer.body) <= 4096 and not re.search(r"0x|Traceback|\.py|passwd", error["message"])
    return "" if is_refused and is_clean else f"{answer.status}: {error['message'][:300]}"


def test_hostile_sounds_hurt_nobody(server: Served, listener: tuple[str, Callable[[], int]]) -> None:
    url, count_connections = listener
    files = hostile_files(url)
    body, kind = make_form({"model": "tiny"}, {"file": DATA})
    forms = hostile_forms(body, kind)
    alone = [request(server) for request in GOOD]
    assert SAID.search(alone[0]["text"])

    def send_file(name: str) -> str:
        data, message = files[name]
        answer = send(server, data, TRANSLATIONS if len(name) % 2 else TRANSCRIPTIONS, stream=len(name) % 3 == 0)
        if answer.status == 400 and answer.json["error"]["param"] != "file":
            return f"{name}: param is {answer.json['error']['param']}"
        wrong = check_refused(answer, message)
        return f"{name}: {wrong}" if wrong else ""

    def send_form(name: str) -> str:
        data, content_type, message = forms[name]
        answer = server.ask("POST", TRANSCRIPTIONS, data, {"content-type": content_type}, seconds=60)
        wrong = check_refused(answer, message)
        return f"{name}: {wrong}" if wrong else ""

    def send_chat(chat: dict[str, Any]) -> str:
        return check_refused(server.post("/v1/chat/completions", chat), "does not support Chat Completions")

    crowd = Crowd(server)
    before = peak_bytes(reset=True)
    with crowd, ThreadPoolExecutor(2) as threads:
        sent = [*threads.map(send_file, files), *threads.map(send_form, forms)]
        sent += threads.map(send_chat, hostile_chats(url))
    growth = peak_bytes() - before
    assert not [wrong for wrong in sent if wrong]
    for answers, expected in zip(crowd.answers, alone, strict=True):
        assert all(answer == expected for answer in answers), json.dumps(answers, default=repr)[:2000]
    assert growth < MOST_GROWTH, f"{growth >> 20} MiB"
    assert count_connections() == 0
    assert server.llm.front.outputs.num_unfinished_requests == 0
    assert [request(server) for request in GOOD] == alone
    assert server.get("/load").json == {"server_load": 0}
