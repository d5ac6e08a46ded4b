"""The page in a real Chromium: what its users see, and what they do with the keyboard."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from lib.browser import SHIFT, Browser, Page, find_chromium
from lib.mock_core import TEXT
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from tests.async_engine.support import mock_llm, tiny_args
from tests.e2e.media_goldens import folder as media_folder
from tests.e2e.media_goldens import picture
from tests.server.models.support import fields, several_served, use_mock_cores
from tests.server.support import Served, mock_served, served

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: on Debian, apt-get install chromium"),
]

RATE = 100
POLL_SECONDS = 2.0
POLL_NOW = "document.dispatchEvent(new Event('visibilitychange'))"
ANSWER = "article.assistant:last-of-type"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser.launch(CHROMIUM) as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tokenizer: str) -> Iterator[Served]:
    with mock_served(tokenizer, tokens_per_second=RATE) as server:
        yield server


@pytest.fixture(scope="module")
def seeing_server() -> Iterator[Served]:
    """Return a server whose model takes pictures; its core answers without looking at them."""
    args = AsyncEngineArgs(model=str(media_folder("qwen2_vl")), max_model_len=512, use_tqdm_on_load=False)
    with mock_llm(args, tokens_per_second=1000) as llm, served(llm) as server:
        yield server


@contextlib.contextmanager
def opened(browser: Browser, server: Served, path: str = "/", scheme: str = "light") -> Iterator[Page]:
    """Open the page; in the end it has asked no other server for anything."""
    with browser.page(server.url + path, scheme=scheme) as page:
        yield page
        assert [url for url in page.requests if not url.startswith((server.url + path, "data:"))] == []


def state(page: Page, wanted: str) -> None:
    page.wait(f"document.querySelector('#state').textContent === '{wanted}'")


def answered(page: Page) -> str:
    """Return the answer once it has ended."""
    page.wait(f"document.querySelector('{ANSWER}')?.ariaBusy === 'false'")
    return page.evaluate(f"document.querySelector('{ANSWER} .text').textContent")


def say(page: Page, text: str, *, max_tokens: int | None = None) -> None:
    page.evaluate(f"document.querySelector('#max_tokens').value = {json.dumps(max_tokens or '')}")
    page.evaluate("document.querySelector('#message').focus()")
    page.write(text)
    page.press("Enter")


def test_a_conversation_by_keyboard(browser: Browser, server: Served) -> None:
    markup = "<img src=x onerror=alert(1)>"
    with opened(browser, server) as page:
        state(page, "ready")
        page.wait("document.querySelector('#model').textContent === 'tiny'")
        assert page.evaluate("document.querySelector('#models').hidden") is True
        page.evaluate("document.activeElement.blur()")
        page.press("/")
        page.write(markup)
        page.press("Enter", SHIFT)
        page.write("and another line")
        assert page.evaluate("document.querySelector('#message').value") == f"{markup}\nand another line"
        page.evaluate("document.querySelector('#max_tokens').value = 60")
        page.press("Enter")
        page.wait(f"document.querySelector('{ANSWER} .text')?.textContent")
        length = page.evaluate(f"document.querySelector('{ANSWER} .text').textContent.length")
        page.wait(f"document.querySelector('{ANSWER} .text').textContent.length > {length + 5}")
        assert page.evaluate(f"document.querySelector('{ANSWER}').ariaBusy") == "true"
        assert answered(page) in TEXT.read_text()
        assert page.text("article.user .text") == f"{markup}\nand another line"
        assert page.evaluate("document.querySelectorAll('#transcript img').length") == 0
        figures = page.text(f"{ANSWER} .figures")
        assert "60 tokens · max tokens reached" in figures
        rate = float(figures.split(" tokens/s")[0].rpartition(" ")[2])
        assert RATE / 4 < rate < RATE * 1.5
        assert page.errors == []


def test_one_of_several_models_is_chosen_and_loads(
    browser: Browser, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list shows the states, and the chat goes to the model that is chosen, also after the next look."""
    use_mock_cores(monkeypatch)
    models = {name: fields(tokenizer) for name in ("a", "b")}
    labels = "[...document.querySelector('#models').options].map((each) => each.text).join()"
    with several_served(tmp_path / "models.yaml", models) as server, opened(browser, server) as page:
        page.wait(f"{labels} === 'a,b'")
        page.evaluate("document.querySelector('#models').value = 'b'")
        page.evaluate("document.querySelector('#models').dispatchEvent(new Event('change'))")
        say(page, "hello", max_tokens=3)
        assert answered(page) in TEXT.read_text()
        page.evaluate(POLL_NOW)
        page.wait(f"{labels} === 'a,b · ready'")
        assert page.text("#model") == page.evaluate("document.querySelector('#models').value") == "b"
        assert "context of" in page.text("#about")
        assert [card["status"] for card in server.get("/v1/models").json["data"]] == ["absent", "ready"]
        assert page.errors == []


def test_an_answer_is_stopped(browser: Browser, server: Served) -> None:
    with opened(browser, server) as page:
        state(page, "ready")
        say(page, "a")
        page.wait(f"document.querySelector('{ANSWER} .text').textContent.length > 5")
        assert server.get("/load").json == {"server_load": 1}
        page.press("Escape")
        text = answered(page)
        assert text in TEXT.read_text()
        assert page.text(f"{ANSWER} .figures").endswith("stopped")
        deadline = time.monotonic() + 5
        while server.get("/load").json != {"server_load": 0}:
            assert time.monotonic() < deadline
        assert page.evaluate("document.activeElement.id") == "message"
        page.click("#clear")
        assert page.evaluate("document.querySelectorAll('article').length") == 0
        assert page.errors == []


def test_the_chart_moves(browser: Browser, server: Served) -> None:
    with opened(browser, server) as page:
        state(page, "ready")
        page.wait("document.querySelector('#running').textContent === '0'")
        say(page, "a")
        page.wait("document.querySelector('#speed path.line')", 2 * POLL_SECONDS)
        first = page.evaluate("document.querySelector('#speed path.line').getAttribute('d')")
        page.wait("Number(document.querySelector('#speed output').textContent) > 0", 2 * POLL_SECONDS)
        assert page.text("#running") == "1"
        assert page.evaluate("document.querySelectorAll('#ttft circle').length") == 1
        assert "ms" in page.text("#ttft output")
        assert page.evaluate("document.querySelector('#speed svg').ariaLabel").startswith("Tokens per second, the last")
        page.evaluate("document.querySelector('#values').open = true")
        page.wait(
            f"document.querySelector('#speed path.line').getAttribute('d') !== {json.dumps(first)}", 2 * POLL_SECONDS
        )
        assert page.evaluate("document.querySelectorAll('#values tbody tr').length") >= 2
        page.press("Escape")
        assert page.errors == []


def test_nothing_is_asked_for_while_the_page_is_hidden(browser: Browser, server: Served) -> None:
    with opened(browser, server) as page:
        state(page, "ready")
        page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
        page.evaluate(POLL_NOW)
        page.evaluate("new Promise(done => setTimeout(done, 200))")
        before = len(page.requests)
        page.evaluate(f"new Promise(done => setTimeout(done, {POLL_SECONDS * 1000 + 200}))")
        assert len(page.requests) == before
        page.evaluate("delete document.hidden")
        page.evaluate(POLL_NOW)
        page.evaluate("new Promise(done => setTimeout(done, 200))")
        assert len(page.requests) > before


def test_dark_and_light(browser: Browser, server: Served) -> None:
    def lightness() -> float:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(", "))) / 3 / 255

    with opened(browser, server, scheme="dark") as page:
        assert lightness() < 0.2
        page.prefer("light")
        assert lightness() > 0.8
        page.click("#theme-button")
        assert lightness() < 0.2
        page.call("Page.reload")
        page.wait("document.readyState === 'complete' && document.querySelector('#theme-button').ariaLabel")
        assert lightness() < 0.2, "what was chosen is kept"
        page.click("#theme-button")
        assert lightness() > 0.8
        assert page.evaluate("localStorage.length") == 0, "what the system prefers need not be kept"
        assert page.errors == []


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser, tokenizer: str) -> None:
    words = ("--api-key", "right", "--root-path", "/llm", "--metrics-prefix", "own_")
    with mock_served(tokenizer, *words) as server, opened(browser, server, "/llm/") as page:
        page.wait("document.querySelector('#key-dialog').open")
        for key, shown in (("wrong", "This key is not one of the server's."), ("right", "")):
            page.evaluate("document.querySelector('#key').value = ''; document.querySelector('#key').focus()")
            page.write(key)
            page.press("Enter")
            page.wait(f"document.querySelector('#key-error').textContent === {json.dumps(shown)}" if shown else "true")
        page.wait("document.querySelector('#model').textContent === 'tiny'")
        page.wait("document.querySelector('#running').textContent === '0'")
        assert not page.evaluate("document.querySelector('#key-dialog').open")
        say(page, "a", max_tokens=8)
        assert answered(page) in TEXT.read_text()
        assert page.evaluate("[localStorage.length, document.cookie, Object.values(sessionStorage)]") == [
            *(0, ""),
            ["right"],
        ]
        assert [each for each in page.errors if "status of 401" not in each] == []


def test_a_model_without_chat_template_goes_on_with_the_text(browser: Browser, tokenizer: str) -> None:
    with (
        mock_llm(tiny_args(tokenizer), tokens_per_second=1000) as llm,
        served(llm) as server,
        opened(browser, server) as page,
    ):
        state(page, "ready")
        say(page, "a", max_tokens=8)
        assert answered(page) in TEXT.read_text()
        assert "no chat template" in page.text("#notice")
        assert "8 tokens" in page.text(f"{ANSWER} .figures")


def test_errors_and_states_are_shown_in_words(browser: Browser, tokenizer: str) -> None:
    with mock_served(tokenizer) as server, opened(browser, server) as page:
        state(page, "ready")
        say(page, "too long " * 300)
        assert answered(page) == ""
        assert "maximum context length is 512 tokens" in page.text(f"{ANSWER} .error")
        assert page.evaluate("document.querySelector('#message').value").startswith("too long"), "it may be shortened"
        asyncio.run_coroutine_threadsafe(server.llm.sleep(1), server.loop).result(10)
        page.evaluate(POLL_NOW)
        state(page, "asleep")
        asyncio.run_coroutine_threadsafe(server.llm.wake_up(), server.loop).result(10)
        server.app.state.load.is_draining = True
        page.evaluate(POLL_NOW)
        state(page, "draining")
        server.app.state.load.is_draining = False
        page.evaluate(POLL_NOW)
        state(page, "ready")
        page.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        page.evaluate(POLL_NOW)
        state(page, "unreachable")


@pytest.mark.parametrize("prefix", ["vllm:", "own_"])
def test_figures_are_those_of_the_metrics(browser: Browser, server: Served, prefix: str) -> None:
    """The oracle is Prometheus' own reader."""
    body = {"prompt": [5], "max_tokens": 4, "ignore_eos": True}
    assert server.post("/v1/completions", body).status == 200
    text = server.get("/metrics").body.decode().replace("vllm:", prefix)
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]

    def value(name: str) -> float:
        return math.fsum(each.value for each in samples if each.name == prefix + name)

    with opened(browser, server) as page:
        shown = page.evaluate(f"import('./page/metrics.js').then(metrics => metrics.read({json.dumps(text)}))")
    assert shown["generated"] == value("generation_tokens_total") > 0
    assert shown["prefixQueries"] == value("prefix_cache_queries_total")
    assert shown["running"] == value("num_requests_running")
    assert shown["kvUse"] == value("kv_cache_usage_perc")
    assert shown["ttft"]["sum"] == pytest.approx(value("time_to_first_token_seconds_sum"))
    assert shown["itl"]["count"] == value("inter_token_latency_seconds_count")
    [info] = [each for each in samples if each.name == f"{prefix}cache_config_info"]
    assert shown["kvTokens"] == int(info.labels["kv_cache_size_tokens"])


def test_code_blocks_are_shown_as_such(browser: Browser, server: Served) -> None:
    text = "Do this:\n```python\nif a < b:\n    <b>\n```\n\nand ```no``` more\n```\nopen"
    with opened(browser, server) as page:
        shown = page.evaluate(
            "import('./page/text.js').then(({showText}) => { const node = document.createElement('div');"
            f" const text = {json.dumps(text)};"
            " for (let i = 1; i <= text.length; i++) showText(node, text.slice(0, i));"
            " return [...node.children].map(each => [each.tagName, each.textContent]) })"
        )
    assert shown == [
        ["DIV", "Do this:"],
        ["PRE", "if a < b:\n    <b>"],
        ["DIV", "and ```no``` more"],
        ["PRE", "open"],
    ]


def test_pictures_are_dropped_shown_and_sent(browser: Browser, seeing_server: Served) -> None:
    """A file that is none is named, one picture is taken back, and the other is read by the server."""
    written = BytesIO()
    picture("qwen2_vl", 0).save(written, "PNG")
    data = base64.b64encode(written.getvalue()).decode()
    drop = (
        "const data = new DataTransfer(); const bytes = Uint8Array.from(atob(DATA), (c) => c.charCodeAt(0));"
        "for (const [name, type] of [['a.png', 'image/png'], ['b.png', 'image/png'], ['c.txt', 'text/plain']])"
        " data.items.add(new File([bytes], name, { type }));"
        "const how = { dataTransfer: data, bubbles: true, cancelable: true };"
        "for (const kind of ['dragover', 'drop']) document.querySelector('#transcript').dispatchEvent("
        "new DragEvent(kind, how))"
    ).replace("DATA", json.dumps(data))
    with opened(browser, seeing_server) as page:
        page.wait("!document.querySelector('#add-picture').hidden")
        page.evaluate(f"(() => {{ {drop} }})()")
        page.wait("document.querySelectorAll('#pictures img').length === 2")
        page.wait("document.querySelector('#pictures img').naturalWidth === 37")
        assert page.text("#notice") == "c.txt is no picture of a kind that models take."
        page.click("#pictures li:last-child button")
        page.wait("document.querySelectorAll('#pictures img').length === 1")
        say(page, "what?", max_tokens=8)
        assert answered(page)
        assert page.text("article.user .text") == "what?"
        assert page.evaluate("document.querySelector('article.user .pictures img').alt") == "a.png"
        assert page.evaluate("document.querySelector('#pictures').hidden")
        assert page.errors == []
    assert seeing_server.llm.front.inputs.media_counts == (1, 0)


def test_pictures_are_refused_by_a_model_that_reads_text(browser: Browser, server: Served) -> None:
    with opened(browser, server) as page:
        page.wait("document.querySelector('#model').textContent === 'tiny'")
        assert page.evaluate("document.querySelector('#add-picture').hidden")
        page.evaluate(
            "(() => { const data = new DataTransfer(); data.items.add(new File(['a'], 'a.png', {type: 'image/png'}));"
            " document.querySelector('.chat').dispatchEvent(new DragEvent('drop', { dataTransfer: data })) })()"
        )
        page.wait("document.querySelector('#notice').textContent === 'This model takes no pictures.'")
        assert page.evaluate("document.querySelector('#pictures').hidden")


def test_what_the_policy_forbids_is_noticed(browser: Browser, server: Served, tmp_path: Path) -> None:
    """The other tests see no violation because there is none: here are some."""
    with opened(browser, server) as page:
        page.evaluate("document.body.append(Object.assign(new Image(), {src: 'https://a.example/x.png'}))")
        page.wait("document.querySelector('#state').textContent === 'ready'")
        assert any("img-src" in each for each in page.errors)
        with pytest.raises(RuntimeError, match="TrustedHTML"):
            page.evaluate("document.body.innerHTML = '<b>a</b>'")
        page.evaluate("new Promise(done => setTimeout(done, 50))")
        assert any("require-trusted-types-for" in each for each in page.errors)
        page.requests[:] = [url for url in page.requests if "a.example" not in url]
        page.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
