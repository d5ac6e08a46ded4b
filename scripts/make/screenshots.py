"""Write pictures of the server's page, light and dark: a short chat beside the figures of a busy server.

    scripts/make.py screenshots [--seconds N] [--quick] [--url URL [--key KEY]] [--out FOLDER]

Without --url it starts a server of SmolLM2. It needs Chromium, and looks best where the font Inter is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from lib.browser import Browser, Page, find_chromium

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 300.0
WARM_SECONDS = 60.0
"""The first requests wait for the compiler; the charts do not show them."""
ANSWER_SECONDS = 240.0
NUM_CLIENTS = 6
SYSTEM = "You are a helpful assistant who answers in a few sentences."
TOPICS = ("tides", "volcanoes", "honey bees", "glass", "bridges", "bread", "comets", "rivers", "maps", "clocks")
QUESTIONS = ("Why does the sea have tides?", "Write a Python function that reverses a string.")


@contextlib.contextmanager
def serve() -> Iterator[str]:
    """Serve SmolLM2 on a free port; yields the address once it answers."""
    fetch = [sys.executable, str(ROOT / "scripts/fetch_models.py"), "smollm2"]
    model = subprocess.run(fetch, check=True, capture_output=True, text=True).stdout.strip()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = f"--host 127.0.0.1 --port {port} --served-model-name SmolLM2-135M-Instruct --max-model-len 2048"
    flags += " --block-size 16 --num-gpu-blocks-override 400 --disable-uvicorn-access-log"
    process = subprocess.Popen([sys.executable, "-m", "jaxllm.cli", "serve", model, *flags.split()], cwd=ROOT)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while not answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server has not started")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def load(url: str, key: str | None) -> Iterator[None]:
    """Let some clients ask for answers of many lengths, with pauses, until the end."""
    is_over = threading.Event()

    def ask(number: int) -> None:
        dice = random.Random(number)
        while not is_over.wait(dice.expovariate(1 / 3)):
            question = f"Tell me {dice.randint(2, 9)} things about {dice.choice(TOPICS)}."
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            body = {"messages": messages, "max_tokens": dice.randint(20, 150), "seed": dice.randint(0, 999)}
            headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
            request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                answer.read()

    clients = [threading.Thread(target=ask, args=(i,)) for i in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        is_over.set()
        for client in clients:
            client.join()


def chat(page: Page, questions: tuple[str, ...]) -> None:
    """Ask, one question after the other."""
    page.evaluate("document.querySelector('#temperature').value = 0; document.querySelector('#max_tokens').value = 110")
    for i, question in enumerate(questions, 1):
        page.evaluate("document.querySelector('#message').focus()")
        page.write(question)
        page.press("Enter")
        ended = (
            f"[...document.querySelectorAll('article.assistant')].filter(e => e.ariaBusy === 'false').length === {i}"
        )
        page.wait(ended, ANSWER_SECONDS)


def main() -> int:
    """Write the pictures; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180, help="how long the charts are filled (default: 180)")
    parser.add_argument("--quick", action="store_true", help="fill them for 6 seconds, to see that the script works")
    parser.add_argument("--url", help="address of a server that runs (default: serve SmolLM2)")
    parser.add_argument("--key", help="key of that server")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images", help="(default: docs/images)")
    args = parser.parse_args()
    chromium = find_chromium()
    if chromium is None:
        raise SystemExit("there is no Chromium: on Debian, apt-get install chromium")
    args.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        url = args.url.rstrip("/") if args.url else stack.enter_context(serve())
        stack.enter_context(load(url, args.key))
        time.sleep(0 if args.quick else WARM_SECONDS)
        page = stack.enter_context(stack.enter_context(Browser.launch(chromium)).page(f"{url}/"))
        if args.key:
            page.evaluate(f"sessionStorage.setItem('jaxllm-key', {json.dumps(args.key)}); location.reload()")
        page.wait("document.querySelector('#state')?.dataset.state === 'ready'")
        time.sleep(6 if args.quick else args.seconds)
        chat(page, QUESTIONS[:1] if args.quick else QUESTIONS)
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            page.screenshot(args.out / f"page-{scheme}.png")
            print(args.out / f"page-{scheme}.png")
        if page.errors:
            raise SystemExit(f"the page has errors: {page.errors}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
