"""Draw the panels of docs/grafana.json after some minutes of load, into docs/images/dashboard.png.

    .venv/bin/pip install -e '.[serve,benchmark]' && apt-get install prometheus
    scripts/make.py dashboard [--minutes 4] [--quick]

`jaxllm serve` serves SmolLM2 with a small KV cache and a short queue, a real Prometheus scrapes it, and clients send
requests that move every panel: streams with a common prefix, bursts, grammars, mistakes, and clients that disconnect.
Then Prometheus evaluates each panel's own expression, and matplotlib draws the answers, instead of Grafana. --quick
takes one minute and keeps no picture, to test all this.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from fetch_models import MODELS, FetchError, default_dir, fetch
from lib.machine import ROOT
from lib.servers import HOST, ServerError, server_process
from peers.charts import require_matplotlib
from peers.worker import BenchmarkError

from jaxllm.version import __version__
from make.panels import Span, ask, draw, read_panels

DASHBOARD, PICTURE = ROOT / "docs/grafana.json", ROOT / "docs/images/dashboard.png"
NAME = "SmolLM2-135M"
FLAGS = (
    *("--served-model-name", NAME, "--max-model-len", "1024", "--max-num-seqs", "16"),
    *("--block-size", "16", "--num-gpu-blocks-override", "96", "--max-num-queued-reqs", "40"),
    *("--cudagraph-capture-sizes", "16", "256", "--disable-uvicorn-access-log"),
)
SCRAPE_SECONDS, WARM_SECONDS = 5, 300.0
SYSTEM = "You are a patient teacher. You answer in plain words, with one example, and you never make up facts. " * 4
WORDS = ["rivers", "clouds", "engines", "violins", "bridges", "volcanoes", "bees", "glaciers", "lighthouses", "maps"]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}
BUSY, BURST = 1.0, 60
"""Streams that begin per second at the peak of the load, and those of a burst."""


@contextlib.contextmanager
def prometheus(port: int, folder: Path) -> Iterator[str]:
    """Run a Prometheus that scrapes the server at a port; yield its URL once it is ready."""
    config = folder / "prometheus.yml"
    job = {"job_name": "jaxllm", "static_configs": [{"targets": [f"{HOST}:{port}"]}]}
    config.write_text(json.dumps({"global": {"scrape_interval": f"{SCRAPE_SECONDS}s"}, "scrape_configs": [job]}))
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        address = f"{HOST}:{probe.getsockname()[1]}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        url, deadline = f"http://{address}", time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=5):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkError(f"Prometheus has not started: {(folder / 'prometheus.log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


class Load:
    """Many kinds of clients of a server."""

    def __init__(self, session: aiohttp.ClientSession, seconds: float) -> None:
        self._session, self._seconds = session, seconds
        self._random = random.Random(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Send more and more requests, then bursts, then fewer and fewer."""
        began, bursts = time.monotonic(), [0.45, 0.65]
        while (part := (time.monotonic() - began) / self._seconds) < 1:
            if bursts and part > bursts[0]:
                bursts.pop(0)
                for _ in range(BURST):
                    self._begin(self._stream())
            self._begin(self._stream())
            if self._random.random() < 0.3:
                self._begin(self._random.choice((self._mistake, self._stray, self._leave, self._schema))())
            height = max(0.15, 1 - abs(part - 0.5) * 2)
            await asyncio.sleep(self._random.expovariate(BUSY * height))
        await asyncio.gather(*self._tasks)

    def _begin(self, client: Any) -> None:
        task = asyncio.create_task(client)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _question(self, **fields: Any) -> dict[str, Any]:
        question = f"Tell me about {' and '.join(self._random.sample(WORDS, 3))}."
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        tokens = self._random.randint(16, 160)
        return {"messages": messages, "max_tokens": tokens, "stream": True, "ignore_eos": True, **fields}

    async def _post(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.post(path, json=body) as answer:
                async for _ in answer.content:
                    pass

    async def _stream(self) -> None:
        await self._post(self._question())

    async def _schema(self) -> None:
        schema = SCHEMA | {"title": f"{self._random.random()}"}  # each is compiled anew
        format_ = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        await self._post(self._question(response_format=format_, ignore_eos=False))

    async def _mistake(self) -> None:
        await self._post(self._question(temperature=-1))

    async def _stray(self) -> None:
        await self._post({}, "/v1/embeddings")

    async def _leave(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._post(self._question(max_tokens=400)), 2)


async def load(port: int, seconds: float) -> None:
    """Load the server at a port for some seconds."""
    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://{HOST}:{port}", timeout=timeout, connector=connector) as session:
        await Load(session, seconds).run()


def wait_warm(port: int) -> None:
    """Wait until every program is compiled by the server's metrics, at most some minutes."""
    deadline = time.monotonic() + WARM_SECONDS
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=30) as page:
            if re.search(rb"^vllm:engine_is_warm\{.*\} 1", page.read(), re.MULTILINE):
                return
        time.sleep(1)


def measure(model: Path, minutes: float, path: Path) -> None:
    """Serve, load, ask and draw."""
    command = [sys.executable, "-m", "jaxllm.cli", "serve", str(model), *FLAGS]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with server_process(command, folder / "server.log") as server, prometheus(server.port, folder) as url:
            asyncio.run(load(server.port, 1))
            wait_warm(server.port)
            began = time.time()
            asyncio.run(load(server.port, minutes * 60))
            time.sleep(2 * SCRAPE_SECONDS)
            span = Span(began, time.time(), SCRAPE_SECONDS, f"{4 * SCRAPE_SECONDS}s")
            panels = read_panels(DASHBOARD)
            lines = {panel["id"]: ask(url, panel, span) for panel in panels if panel["type"] != "row"}
    title = (
        f"docs/grafana.json, {NAME}, jaxllm {__version__}: each panel's expression evaluated by Prometheus, "
        "drawn by scripts/make.py dashboard (not by Grafana); minutes"
    )
    draw(panels, lines, title, path)
    for panel in panels:
        if not lines.get(panel["id"], True):
            print(f"nothing to draw: {panel['title']}")
    print(path)


def main() -> int:
    """Draw; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0, help="how long the load lasts")
    parser.add_argument("--quick", action="store_true", help="one minute, and the picture is not kept")
    parser.add_argument("--out", type=Path, default=PICTURE)
    args = parser.parse_args()
    try:
        require_matplotlib()
        if shutil.which("prometheus") is None:
            raise BenchmarkError("there is no Prometheus: it is in Debian's package prometheus")
        model = fetch(MODELS["smollm2"], default_dir())
        with tempfile.TemporaryDirectory() as scratch:
            measure(model, 1.0 if args.quick else args.minutes, Path(scratch, "x.png") if args.quick else args.out)
    except (BenchmarkError, FetchError, ServerError) as error:
        print(f"draw_dashboard: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
