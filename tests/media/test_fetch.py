"""Media are fetched within limits: hosts, addresses, redirects, sizes and time."""

from __future__ import annotations

import base64
import contextlib
import copy
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError
from jaxllm.media.errors import MediaError, MediaFetchError
from jaxllm.media.fetching.connector import FetchLimits, MediaConnector
from tests.media.web import Answer, Web, http, redirect, serve

HOSTS = ("media.test", "other.test", "127.0.0.1")
LIMITS = {"image": FetchLimits(2.0, 1000), "video": FetchLimits(0.3, 1000)}


@pytest.fixture(scope="module")
def connector() -> MediaConnector:
    """Return a connector that may reach the loopback interface by three hosts."""
    return MediaConnector(allowed_media_domains=HOSTS, allow_private_addresses=True, limits=LIMITS)


class Names:
    """Answers lookups of names instead of DNS: one list of addresses after another, the last for all others."""

    def __init__(self) -> None:
        self.lookups: list[str] = []
        self.answers: dict[str, list[list[str]]] = {}

    def getaddrinfo(self, host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        self.lookups.append(host)
        answers = self.answers.get(host, [["127.0.0.1"]])
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Let every name be the loopback address, unless a test says otherwise."""
    made = Names()
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    return made


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    """Return a server whose answers are those of ANSWERS."""
    with serve(ANSWERS) as running:
        yield running


def drip(connection: socket.socket) -> None:
    """Send a byte of the headers now and then: no single wait is long."""
    for byte in http(b"x" * 400):
        connection.sendall(bytes([byte]))
        time.sleep(0.02)


def endless(connection: socket.socket, start: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> None:
    connection.sendall(start)
    while True:
        connection.sendall(b"x" * 500)


def endless_headers(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"A: " + b"x" * 500 + b"\r\n")


def endless_continue(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)


def chunked(*chunks: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(chunks)


ANSWERS: dict[str, Answer] = {
    "/plain": http(b"picture"),
    "/full": http(b"x" * 1000),
    "/large": http(b"x" * 1001),
    "/chunked": chunked(b"3\r\npic\r\n", b"4\r\nture\r\n", b"0\r\n\r\n"),
    "/chunked-short": chunked(b"3\r\npic\r\n"),
    "/chunked-large": chunked(*[b"64\r\n" + b"x" * 100 + b"\r\n"] * 11, b"0\r\n\r\n"),
    "/chunked-negative": lambda connection: endless(connection, chunked(b"-1\r\n")),
    "/unsized": b"HTTP/1.0 200 OK\r\n\r\npicture",
    "/short": http(b"pic", length=7),
    "/long": http(b"picture and more", length=7),
    "/gzip": http(b"picture", "Content-Encoding: gzip"),
    "/broken": b"not http at all\r\n\r\n",
    "/nothing": b"",
    "/error": http(b"secret", status="500 Internal Server Error"),
    "/drip": drip,
    "/endless": endless,
    "/endless-headers": endless_headers,
    "/endless-continue": endless_continue,
    "/silent": lambda connection: time.sleep(1),
    "/to-plain": redirect("/plain"),
    "/to-itself": redirect("/to-itself"),
    "/to-file": redirect("file:///etc/hostname"),
    "/to-data": redirect("data:image/png;base64,eA=="),
    "/to-backslash": redirect("http://other.test\\@127.0.0.1/plain"),
    "/to-nowhere": http(status="302 Found"),
    "/to-unlisted": redirect("http://unlisted.test/plain"),
    "/to-metadata": redirect("http://169.254.169.254/latest/meta-data"),
    "/to-other": redirect("http://other.test/plain"),
}


@pytest.mark.parametrize("path", ["/plain", "/chunked", "/unsized", "/to-plain", "/long"])
def test_a_body_is_returned(connector: MediaConnector, web: Web, path: str):
    assert connector.fetch(web.url(path)) == b"picture"
    assert connector.fetch(web.url("/full")) == b"x" * 1000


def test_the_request_names_the_host_and_asks_for_no_compression(connector: MediaConnector, web: Web):
    connector.fetch(web.url("/plain"))
    request = web.requests[-1].decode()
    assert request.startswith("GET /plain HTTP/1.1\r\n")
    assert f"Host: media.test:{web.port}\r\n" in request
    assert "Accept-Encoding: identity\r\n" in request


def test_proxies_of_the_environment_are_not_used(connector: MediaConnector, web: Web, monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert connector.fetch(web.url("/plain")) == b"picture"


@pytest.mark.parametrize("path", ["/large", "/chunked-large", "/endless"])
def test_a_body_that_is_too_large_is_refused(connector: MediaConnector, web: Web, path: str):
    with pytest.raises(MediaError):
        connector.fetch(web.url(path))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/missing", "HTTP 404"),
        ("/error", "HTTP 500"),
        ("/short", "before the body was complete"),
        ("/chunked-short", "failed"),
        ("/chunked-negative", "failed"),
        ("/gzip", "compressed"),
        ("/broken", "failed"),
        ("/nothing", "failed"),
        ("/endless-headers", "failed"),
        ("/endless-continue", "failed|longer"),
        ("/to-nowhere", "no Location"),
        ("/to-itself", "more than 5 times"),
    ],
)
def test_a_host_that_does_not_deliver(connector: MediaConnector, web: Web, path: str, words: str):
    with pytest.raises(MediaFetchError, match=words) as caught:
        connector.fetch(web.url(path))
    assert isinstance(caught.value, VLLMUnprocessableEntityError)
    assert caught.value.parameter == "image_url"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("path", ["/silent", "/drip"])
def test_the_timeout_is_for_the_whole_fetch(connector: MediaConnector, web: Web, path: str):
    start = time.monotonic()
    with pytest.raises(MediaFetchError, match=r"longer than 0\.3 s"):
        connector.fetch(web.url(path), "video")
    assert time.monotonic() - start < 1


def test_a_slow_lookup_ends_at_the_timeout(connector: MediaConnector, monkeypatch: pytest.MonkeyPatch):
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(10))
    start = time.monotonic()
    with pytest.raises(MediaFetchError, match="looked up"):
        connector.fetch("http://media.test/", "video")
    assert time.monotonic() - start < 1
    answered.set()


def test_lookups_that_hang_keep_no_others_waiting(web: Web, names: Names, monkeypatch: pytest.MonkeyPatch):
    answered = threading.Event()
    limits = {"image": FetchLimits(2.0, 1000), "video": FetchLimits(0.01, 1000)}
    made = MediaConnector(allowed_media_domains=HOSTS, allow_private_addresses=True, limits=limits)

    def hang(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        if host == "other.test":
            answered.wait(10)
        return names.getaddrinfo(host, port)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    for _ in range(63):
        with pytest.raises(MediaFetchError, match="could not be looked up"):
            made.fetch("http://other.test/", "video")
    assert made.fetch(web.url("/plain")) == b"picture"
    with pytest.raises(MediaFetchError, match="could not be looked up"):
        made.fetch("http://other.test/", "video")
    with pytest.raises(MediaFetchError, match="64 hosts of media URLs are being looked up"):
        made.fetch(web.url("/plain"))
    answered.set()


def test_a_refused_connection_and_an_unknown_name(connector: MediaConnector, names: Names):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(MediaFetchError, match=r"connection to 'media\.test' failed"):
        connector.fetch(f"http://media.test:{port}/")
    names.answers["media.test"] = [[]]
    with pytest.raises(MediaFetchError, match="looked up"):
        connector.fetch("http://media.test/")


def test_the_next_address_is_tried(connector: MediaConnector, web: Web, names: Names):
    names.answers["media.test"] = [["127.0.0.2", "127.0.0.1"]]
    assert connector.fetch(web.url("/plain")) == b"picture"


@pytest.mark.parametrize("path", ["/to-file", "/to-data", "/to-backslash", "/to-unlisted", "/to-metadata"])
def test_redirects_are_checked_as_urls_are(connector: MediaConnector, web: Web, path: str):
    seen = len(web.requests)
    with pytest.raises(MediaError) as caught:
        connector.fetch(web.url(path))
    assert not isinstance(caught.value, MediaFetchError)
    assert len(web.requests) == seen + 1


def test_a_redirect_to_a_listed_host_with_a_forbidden_address(connector: MediaConnector, web: Web, names: Names):
    names.answers["other.test"] = [["169.254.169.254"]]
    with pytest.raises(MediaError, match="not on the public internet"):
        connector.fetch(web.url("/to-other"))


def test_redirects_can_be_off(web: Web):
    strict = MediaConnector(
        allowed_media_domains=HOSTS, allow_private_addresses=True, allow_redirects=False, limits=LIMITS
    )
    assert strict.fetch(web.url("/plain")) == b"picture"
    with pytest.raises(MediaFetchError, match="not allowed"):
        strict.fetch(web.url("/to-plain"))


@pytest.mark.parametrize("host", ["media.test", "127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "localhost", "10.0.0.1"])
def test_private_addresses_are_refused_by_default(web: Web, host: str):
    seen = len(web.requests)
    default = MediaConnector()
    with pytest.raises(MediaError, match="not on the public internet") as caught:
        default.fetch(web.url("/plain", host))
    assert not isinstance(caught.value, MediaFetchError)
    assert len(web.requests) == seen


def test_a_listed_host_may_not_be_private_unless_that_is_allowed(web: Web):
    listed = MediaConnector(allowed_media_domains=["media.test"])
    with pytest.raises(MediaError, match="not on the public internet") as caught:
        listed.fetch(web.url("/plain"))
    assert "127.0.0.1" not in str(caught.value)


def test_one_private_address_among_public_ones_is_refused(names: Names):
    names.answers["mixed.test"] = [["8.8.8.8", "192.168.0.1"]]
    default = MediaConnector()
    with pytest.raises(MediaError, match="not on the public internet"):
        default.fetch("http://mixed.test/")


@pytest.mark.parametrize("address", ["169.254.169.254", "0.0.0.0", "224.0.0.1"])
def test_link_local_addresses_are_refused_for_listed_hosts_too(connector: MediaConnector, names: Names, address: str):
    names.answers["media.test"] = [[address]]
    with pytest.raises(MediaError, match="not on the public internet"):
        connector.fetch("http://media.test/")


def test_a_name_that_changes_its_address_is_looked_up_once(connector: MediaConnector, web: Web, names: Names):
    """DNS rebinding: what is connected to is the address that was checked."""
    names.answers["media.test"] = [["127.0.0.1"], ["169.254.169.254"]]
    assert connector.fetch(web.url("/plain")) == b"picture"
    assert names.lookups == ["media.test"]


def test_hosts_that_are_not_listed_are_refused_before_a_lookup(connector: MediaConnector, names: Names):
    for host in ("unlisted.test", "sub.media.test", "media.test.evil.test", "127.0.0.2"):
        with pytest.raises(MediaError, match="allowed_media_domains"):
            connector.fetch(f"http://{host}/")
    assert names.lookups == []


def test_hosts_are_compared_as_names(connector: MediaConnector, web: Web):
    assert connector.fetch(web.url("/plain", "MEDIA.Test.")) == b"picture"


def test_tls_names_the_host_and_goes_to_the_checked_address(connector: MediaConnector, names: Names):
    with serve({}) as web:
        with pytest.raises(MediaFetchError, match="failed"):
            connector.fetch(f"https://media.test:{web.port}/")
        assert b"media.test" in web.requests[0]
        assert web.requests[0][:2] == b"\x16\x03"
    assert names.lookups == ["media.test"]


@pytest.mark.parametrize(
    "url",
    ["ftp://media.test/", "gopher://media.test/", "media.test/a", "", "javascript:x", "HTTPX://a", "httpunix://a"],
)
def test_other_schemes_are_refused(connector: MediaConnector, url: str):
    with pytest.raises(MediaError, match="must begin with"):
        connector.fetch(url)


# data: URLs


@pytest.mark.parametrize(
    "header", ["data:image/png;base64,", "data:;base64,", "DATA:Image/PNG;Base64,", "data:audio/x;codec=1;base64,"]
)
def test_data_urls(connector: MediaConnector, header: str):
    data = bytes(range(256))
    assert connector.fetch(header + base64.b64encode(data).decode()) == data


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png,abc",
        "data:image/png;base64",
        "data:,abc",
        "data:image/png;base64,a",
        "data:image/png;base64,ab=c",
        "data:image/png;base64,QUJD\n",
        "data:image/png;base64,QU%4AD",
        "data:image/png;base64,ü",
        "data:" + "x" * 1_000_000,
    ],
)
def test_invalid_data_urls_are_refused(connector: MediaConnector, url: str):
    with pytest.raises(MediaError) as caught:
        connector.fetch(url)
    assert len(str(caught.value)) < 100


def test_the_size_of_a_data_url_is_limited(connector: MediaConnector):
    start = "data:;base64,"
    assert len(connector.fetch(start + base64.b64encode(b"x" * 1000).decode())) == 1000
    for size in (1001, 1003, 2000):
        with pytest.raises(MediaError, match="larger than the limit of 1,000 bytes"):
            connector.fetch(start + base64.b64encode(b"x" * size).decode())


# file: URLs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an allowed folder beside a secret file, with links that leave it."""
    allowed = tmp_path / "allowed"
    (allowed / "sub").mkdir(parents=True)
    (tmp_path / "allowed2").mkdir()
    for path in (tmp_path / "secret", tmp_path / "allowed2" / "secret"):
        path.write_bytes(b"secret")
    (allowed / "a b.png").write_bytes(b"picture")
    (allowed / "large").write_bytes(b"x" * 1001)
    (allowed / "link").symlink_to(tmp_path / "secret")
    (allowed / "sub" / "inside").symlink_to(allowed / "a b.png")
    (allowed / "out").symlink_to(tmp_path, target_is_directory=True)
    (allowed / "circle").symlink_to(allowed / "circle")
    os.mkfifo(allowed / "pipe")
    return allowed


def test_files_inside_the_allowed_folder(folder: Path):
    connector = MediaConnector(allowed_local_media_path=str(folder), limits=LIMITS)
    for url in (f"file://{folder}/a%20b.png", f"FILE://localhost{folder}/sub/inside", f"file:{folder}/sub/../a b.png"):
        assert connector.fetch(url) == b"picture"
    linked = folder.parent / "linked"
    linked.symlink_to(folder)
    assert MediaConnector(allowed_local_media_path=str(linked)).fetch(f"file://{folder}/a b.png") == b"picture"


@pytest.mark.parametrize(
    "path", ["/../secret", "/%2e%2e/secret", "/link", "/out/secret", "/out/allowed2/secret", "2/secret", "/../missing"]
)
def test_files_outside_the_allowed_folder_are_refused(folder: Path, path: str):
    connector = MediaConnector(allowed_local_media_path=str(folder), limits=LIMITS)
    with pytest.raises(MediaError, match="outside") as caught:
        connector.fetch(f"file://{folder}{path}")
    assert str(folder) not in str(caught.value)


@pytest.mark.parametrize(
    "path", ["", "/sub", "/missing", "/pipe", "/circle", "/a%00", "/large", "/a?x", "/a#x", "/a\nb"]
)
def test_unreadable_files_are_refused(folder: Path, path: str):
    connector = MediaConnector(allowed_local_media_path=str(folder), limits=LIMITS)
    with pytest.raises(MediaError) as caught:
        connector.fetch(f"file://{folder}{path}")
    assert str(folder) not in str(caught.value)


@pytest.mark.parametrize("url", ["file:relative", "file://host/share", "file:", "file:////host/share"])
def test_other_forms_of_file_urls_are_refused(folder: Path, url: str):
    with pytest.raises(MediaError):
        MediaConnector(allowed_local_media_path=str(folder)).fetch(url)


def test_files_are_refused_without_an_allowed_folder(folder: Path):
    with pytest.raises(MediaError, match="--allowed-local-media-path"):
        MediaConnector().fetch(f"file://{folder}/a%20b.png")


# Settings, threads, errors


@pytest.mark.parametrize(
    "setting",
    [
        {"allowed_local_media_path": "/does/not/exist"},
        {"allowed_local_media_path": __file__},
        {"allowed_media_domains": ["https://media.test"]},
        {"allowed_media_domains": ["*.media.test"]},
        {"allowed_media_domains": ["media.test:80"]},
        {"allow_private_addresses": True},
    ],
)
def test_unusable_settings_are_refused(setting: dict[str, Any]):
    with pytest.raises(VLLMValidationError) as caught:
        MediaConnector(**setting)
    assert caught.value.parameter == next(iter(setting))


def test_errors_can_be_copied_and_sent():
    error = copy.deepcopy(MediaFetchError("text", parameter="image_url"))
    assert (type(error), str(error), error.parameter) == (MediaFetchError, "text", "image_url")


@settings(max_examples=50)
@given(st.binary(max_size=200) | st.binary(max_size=200).map(b"HTTP/1.1 200 OK\r\n".__add__))
def test_any_answer_is_read_or_refused(answer: bytes):
    with serve({"/": answer}) as web:
        made = MediaConnector(allowed_media_domains=HOSTS, allow_private_addresses=True, limits=LIMITS)
        with contextlib.suppress(MediaError):
            assert isinstance(made.fetch(web.url("/", "127.0.0.1")), bytes)
