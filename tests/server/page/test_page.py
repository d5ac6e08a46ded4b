"""The page at / (R17): its routes, its headers, and what its files may not have. test_page_in_chromium.py uses it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import jaxllm.server
from jaxllm.cli.flags.sampling_flags import TALK_DEFAULTS
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.server.app import OPEN_PATHS
from jaxllm.server.page.routes import PAGE_FILES
from tests.server.support import Served, served

FOLDER = Path(jaxllm.server.__file__).parent / "page"
FILES = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir() if path.suffix not in {"", ".py"}}
SCRIPTS = [name for name in FILES if name.endswith(".js")]
NAMESPACE = "http://www.w3.org/2000/svg"  # a name, which nothing is fetched from
DEMANDS = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|cssText|setAttribute\(.style"


class Elements(HTMLParser):
    """This lists the elements of a document with their attributes, and the text within each kind."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.elements[-1][0] if self.elements else "", data))


@pytest.fixture(scope="module")
def closed(mock: AsyncLLM) -> Iterator[Served]:
    with served(mock, "--api-key", "secret-key", "--root-path", "/llm") as server:
        yield server


def test_every_file_has_a_route_and_every_route_a_file() -> None:
    assert sorted(PAGE_FILES.values()) == sorted(FILES)


@pytest.mark.parametrize("path", PAGE_FILES)
def test_files_are_served_with_headers_that_let_little_in(mock_server: Served, path: str) -> None:
    answer = mock_server.get(path)
    assert (answer.status, answer.body.decode()) == (200, FILES[PAGE_FILES[path]])
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(kinds[PAGE_FILES[path].rpartition(".")[2]])
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-cache"
    policy = dict(each.strip().split(" ", 1) for each in answer.headers["content-security-policy"].split(";"))
    nothing = ("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types")
    same_origin = ("script-src", "style-src", "connect-src")
    assert policy == {
        **dict.fromkeys(nothing, "'none'"),
        **dict.fromkeys(same_origin, "'self'"),
        "img-src": "'self' data:",
        "require-trusted-types-for": "'script'",
    }


def test_the_page_needs_no_key_and_has_none(closed: Served) -> None:
    assert set(PAGE_FILES) <= OPEN_PATHS
    for path, name in PAGE_FILES.items():
        for prefix in ("", "/llm"):
            answer = closed.get(prefix + path)
            assert (answer.status, answer.body.decode()) == (200, FILES[name])
    assert closed.get("/page/other.js").status == 401
    assert closed.ask("POST", "/", {}, {"authorization": "Bearer secret-key"}).status == 405


def test_the_page_can_be_left_out(mock: AsyncLLM) -> None:
    with served(mock, "--disable-page") as server:
        assert {server.get(path).status for path in PAGE_FILES} == {404}
        assert server.get("/v1/models").status == 200


@pytest.mark.parametrize("name", FILES)
def test_files_name_no_other_server(name: str) -> None:
    assert re.findall(r"(?:\w+:)?//[\w.-]+\.\w+[^\s\"']*", FILES[name].replace(NAMESPACE, "")) == []
    assert len(FILES[name].splitlines()) <= 400


def test_addresses_are_relative_so_that_a_proxy_may_have_a_path() -> None:
    document = Elements(FILES["index.html"])
    links = [attrs[name] for _, attrs in document.elements for name in ("src", "href") if name in attrs]
    assert len(links) >= 5
    assert {f"/{link}" for link in links} <= PAGE_FILES.keys()
    for name in SCRIPTS:
        imports = re.findall(r'(?:from|import) "(.*)"', FILES[name])
        assert {each.removeprefix("./") for each in imports} <= FILES.keys()
        asked = re.findall(r'(?:ask|fetch)\("(.*?)"', FILES[name])
        assert not [path for path in asked if path.startswith("/")]


def test_nothing_is_inline() -> None:
    document = Elements(FILES["index.html"])
    assert not [attrs for _, attrs in document.elements for name in attrs if name.startswith("on") or name == "style"]
    assert "style" not in {tag for tag, _ in document.elements}
    assert not [text for tag, text in document.texts if tag == "script" and text.strip()]
    assert all("src" in attrs for tag, attrs in document.elements if tag == "script")


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_make_no_markup_of_texts(name: str) -> None:
    assert re.findall(DEMANDS, FILES[name]) == []


def test_every_control_has_a_name() -> None:
    """An input is inside a label, or a label is for it."""
    document = Elements(FILES["index.html"])
    labelled = {attrs["for"] for tag, attrs in document.elements if tag == "label" and "for" in attrs}
    open_label = r"<label[^>]*>(?:(?!</label>).)*<(?:input|textarea) id=\"(\w+)\""
    labelled |= set(re.findall(open_label, FILES["index.html"], re.DOTALL))
    controls = [attrs["id"] for tag, attrs in document.elements if tag in ("input", "textarea")]
    assert len(controls) >= 6
    assert set(controls) <= labelled


def test_on_a_phone_the_chat_comes_before_the_charts() -> None:
    narrow = FILES["page.css"].partition("@media (max-width: 56rem)")[2].partition("@media")[0]
    assert re.search(r"\.chat \{[^}]*order: -1;", narrow)


def test_the_talks_sampling_is_that_of_the_command_line() -> None:
    for name, value in TALK_DEFAULTS.items():
        assert re.search(rf"given\.{name} (\?\?)?= {value};", FILES["chat.js"])
        assert f"{name} {value}" in FILES["index.html"]
