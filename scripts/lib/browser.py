"""Chromium without a window, driven by its own protocol (https://chromedevtools.github.io/devtools-protocol).

The browser is the system's, and the protocol's pipes need no package: tests and screenshots run wherever `chromium` is
installed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    *("--disable-extensions", "--disable-default-apps", "--mute-audio", "--remote-debugging-pipe"),
)
START_SECONDS = 30.0
CALL_SECONDS = 10.0
POLL_SECONDS = 0.02
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "/": 191}
"""Keys that can be pressed, with their codes."""
SHIFT = 8
LISTEN = (
    "document.addEventListener('securitypolicyviolation', event => console.error('CSP: ' + event.violatedDirective))"
)
"""The console's message when a page's policy forbids something."""


def find_chromium() -> str | None:
    """Return the path of Chromium, or None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser with a temporary profile."""

    def __init__(self, process: subprocess.Popen[bytes], sent: int, received: int) -> None:
        self._process, self._sent, self._received = process, sent, received
        self._rest = b""
        self._number = 0
        self._pages: dict[str, Page] = {}

    @classmethod
    @contextlib.contextmanager
    def launch(cls, executable: str) -> Iterator[Self]:
        """Start a browser, and end it."""
        with contextlib.ExitStack() as stack:
            profile = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            command_out, command_in = _pipe(stack)
            answer_out, answer_in = _pipe(stack)
            # The protocol uses the descriptors 3 and 4, which a shell can open without running Python in a fork.
            script = f'exec "$0" "$@" 3<&{command_out} 4>&{answer_in}'
            process = subprocess.Popen(
                ["bash", "-c", script, executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
                pass_fds=(command_out, answer_in),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            browser = cls(process, command_in, answer_out)
            try:
                browser.call("Browser.getVersion", seconds=START_SECONDS)
                yield browser
            finally:
                browser._end()

    def _end(self) -> None:
        with contextlib.suppress(OSError, RuntimeError, TimeoutError, subprocess.TimeoutExpired):
            self.call("Browser.close")
            self._process.wait(CALL_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @contextlib.contextmanager
    def page(self, url: str, *, scheme: str = "light", width: int = 1200, height: int = 800) -> Iterator[Page]:
        """Open a page in a new context with empty storage; `scheme` is "light" or "dark"."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.call(f"{domain}.enable")
            page.call("Page.addScriptToEvaluateOnNewDocument", source=LISTEN)
            page.call("Emulation.setFocusEmulationEnabled", enabled=True)
            page.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
            )
            page.prefer(scheme)
            page.call("Page.navigate", url=url)
            page.wait("document.readyState === 'complete'")
            yield page
        finally:
            del self._pages[session]
            self.call("Target.disposeBrowserContext", browserContextId=context)

    def call(self, method: str, session: str | None = None, seconds: float = CALL_SECONDS, **params: Any) -> Any:
        """Return the browser's answer. Raises RuntimeError for an error, and TimeoutError."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._sent, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + seconds
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            if (page := self._pages.get(answer.get("sessionId", ""))) is not None:
                page.note(answer["method"], answer["params"])

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._received], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            piece = os.read(self._received, 1 << 16)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


class Page:
    """A page, with the errors and the requests that it has made, as of the last call of the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.errors: list[str] = []
        """Exceptions, violations of the content security policy, and what the console shows as errors and warnings."""
        self.requests: list[str] = []
        """The addresses that the page has requested."""

    def call(self, method: str, **params: Any) -> Any:
        """Return the browser's answer for this page."""
        return self._browser.call(method, self._session, **params)

    def note(self, event: str, params: dict[str, Any]) -> None:
        """Record an event of this page."""
        match event:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(" ".join(str(each.get("value")) for each in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}".rstrip())

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = CALL_SECONDS) -> None:
        """Wait until an expression is true in JavaScript. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"it has not come about: {expression}; errors: {self.errors}")
            time.sleep(POLL_SECONDS)

    def text(self, selector: str) -> str:
        """Return the visible text of an element."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector: str) -> None:
        """Click the middle of an element."""
        box = self.evaluate(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        point = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **point)

    def write(self, text: str) -> None:
        """Write a text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press and release a key of KEYS."""
        common = {"key": key, "modifiers": modifiers, "windowsVirtualKeyCode": KEYS[key]}
        text = {"Enter": "\r", "/": "/"}.get(key)
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def prefer(self, scheme: str) -> None:
        """Make the system prefer "light" or "dark" colours."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        """Write a screenshot as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        stack.callback(os.close, end)
    return ends
