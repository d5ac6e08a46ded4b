"""Serve three models and a broken one: 300 requests at random, none lost; swaps timed; a core killed while it loads.

    scripts/check.py served_models [MODEL ...] [--requests 300] [--swaps 5]

The models are SmolLM2, Gemma 3 270M and all-MiniLM-L6-v2 by default; the first is the one whose swaps are timed, and
one that embeds has no .gguf file. Answers are greedy, and each must be that of the first request with its prompt. One
server has two GiB of memory for its models, another loads two of them at once, and a third one. Requests for the broken
model must get 503, for an unknown one 404. In the third server the core of the first model is killed (kill -9) while it
loads: its request fails with the reason, other models answer, and the next request loads it. A swap is the time from a
request for the first model to its first token while another model is loaded. It must be under 3 s; --slow lets it be
longer, for a machine that others use.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lib.evidence import Evidence
from lib.machine import describe_machine

FOLDER = Path.home() / ".cache/jaxllm/models"
MODELS = [FOLDER / name for name in ("SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf", "all-MiniLM-L6-v2")]
FLAGS = ("--kv-cache-memory-bytes", "128M", "--max-model-len", "512", "--disable-uvicorn-access-log")
BUDGET = 2 * 2**30
SWAP_SECONDS = 3.0
WORDS = ("river", "stone", "cloud", "engine", "paper", "garden", "winter", "signal", "copper", "window", "bread")
CLIENTS = 6
BROKEN, UNKNOWN = "broken", "unknown"


def main() -> int:
    """Serve, ask and kill; return 0 if all checks passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, default=MODELS)
    parser.add_argument("--requests", type=int, default=300, help="requests to each of the first two servers")
    parser.add_argument("--swaps", type=int, default=5)
    parser.add_argument("--slow", action="store_true", help="a swap may take any time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    evidence = Evidence(args.json, describe_machine() | {"models": [path.name for path in args.models]})
    with tempfile.TemporaryDirectory() as folder:
        broken = Path(folder) / BROKEN
        broken.mkdir()
        (broken / "config.json").write_text("{}")
        models = [*args.models, broken]
        answers: dict[tuple[str, str], Any] = {}
        for flags in (("--models-memory", str(BUDGET)), ("--max-loaded-models", "2")):
            with Server(models, flags) as server:
                evidence.add(ask_at_random(server, args, answers, flags))
        with Server(models, ("--max-loaded-models", "1")) as server:
            evidence.add(time_swaps(server, args))
            evidence.add(kill_a_load(server))
    return evidence.finish()


class Server:
    """`jaxllm serve` with several models."""

    def __init__(self, models: Sequence[Path], flags: Sequence[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        words = ["--host", "127.0.0.1", "--port", str(self.port), *FLAGS, *flags]
        command = [sys.executable, "-m", "jaxllm.cli", "serve", *map(str, models), *words]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.generating = [path.stem for path in models if path.suffix == ".gguf"]
        self.names = [path.stem if path.suffix == ".gguf" else path.name for path in models if path.name != BROKEN]
        self.peak_bytes = 0
        self._is_over = threading.Event()

    def __enter__(self) -> Server:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self.get("/health")
                threading.Thread(target=self._watch, daemon=True).start()
                return self
            time.sleep(0.1)
        raise TimeoutError("the server has not started")

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)

    def _watch(self) -> None:
        while not self._is_over.wait(0.1):
            self.peak_bytes = max(self.peak_bytes, sum(map(_private_bytes, self.cores())))

    def cores(self) -> list[int]:
        """Return the ids of the cores' processes."""
        pid = self._process.pid
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children") if path.is_file()]
        return [int(child) for text in lists for child in text.split()]

    def get(self, path: str) -> Any:
        """Return the answer to a GET request, which is JSON or empty."""
        status, body = self._ask("GET", path)
        assert status == 200, (path, status)
        return json.loads(body) if body else None

    def ask(self, name: str, prompt: str, max_tokens: int = 12) -> tuple[int, Any]:
        """Return the status, and the text or the embedding of a prompt, or the error's message."""
        fields: dict[str, Any] = {"input": prompt} if name not in (*self.generating, BROKEN, UNKNOWN) else {}
        path = "/v1/embeddings" if fields else "/v1/completions"
        fields = fields or {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        status, body = self._ask("POST", path, {"model": name, **fields})
        answer = json.loads(body)
        if status != 200:
            return status, answer["error"]["message"]
        return status, answer["data"][0]["embedding"] if "data" in answer else answer["choices"][0]["text"]

    def state(self, name: str) -> str:
        """Return the state of a model."""
        return self.get(f"/v1/models/{name}")["status"]

    def loads(self) -> int:
        """Return how often models were loaded."""
        lines = self._ask("GET", "/metrics")[1].decode().splitlines()
        return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:model_loads_total{")))

    def _ask(self, method: str, path: str, fields: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        with contextlib.closing(connection):
            body = None if fields is None else json.dumps(fields)
            connection.request(method, path, body, {} if body is None else {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()


def _private_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    return 0


def ask_at_random(
    server: Server, args: argparse.Namespace, answers: dict[tuple[str, str], Any], flags: Sequence[str]
) -> dict[str, Any]:
    """Send requests for models at random, some of them for models that cannot answer."""
    rng = random.Random(args.seed)
    prompts = [" ".join(rng.choices(WORDS, k=8)) for _ in range(4)]
    jobs = [(rng.choice(server.names), rng.choice(prompts)) for _ in range(args.requests)]
    wrong = [(BROKEN, prompts[0]), (UNKNOWN, prompts[0])] * max(1, args.requests // 60)
    mixed = jobs + wrong
    rng.shuffle(mixed)
    lock, missed = threading.Lock(), []

    def one(job: tuple[str, str]) -> float:
        begun = time.perf_counter()
        status, answer = server.ask(*job)
        seconds = time.perf_counter() - begun
        with lock:
            expected = {BROKEN: 503, UNKNOWN: 404}.get(job[0], 200)
            if status != expected:
                missed.append(f"{job[0]}: {status} {answer}")
            elif status == 200 and answers.setdefault(job, answer) != answer:
                missed.append(f"{job[0]} answers otherwise: {answer!r:.80}")
            elif status == 404 and server.names[0] not in answer:
                missed.append(f"the known models are not told: {answer}")
        return seconds

    begun = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        seconds = list(pool.map(one, mixed))
    if "--models-memory" in flags and server.peak_bytes > BUDGET:
        missed.append("the models took more than their memory")
    return {
        "flags": " ".join(flags),
        "requests": len(jobs),
        "for_wrong_models": len(wrong),
        "seconds": round(time.perf_counter() - begun, 1),
        "median_s": round(statistics.median(seconds), 2),
        "longest_s": round(max(seconds), 2),
        "loads": server.loads(),
        "peak_gib_of_cores": round(server.peak_bytes / 2**30, 2),
        "missed": missed[:10],
    }


def time_swaps(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Ask for the first model while another one is loaded, and wait for its first token."""
    first, other = server.names[:2]
    swaps, back = [], []
    for _ in range(1 + args.swaps):
        for name, times in ((other, back), (first, swaps)):
            begun = time.perf_counter()
            status, answer = server.ask(name, "one two", max_tokens=1)
            times.append(round(time.perf_counter() - begun, 2))
            assert status == 200, answer
    missed = [] if args.slow or statistics.median(swaps[1:]) < SWAP_SECONDS else ["swaps are slow"]
    facts = {"to": first, "swap_s": swaps[1:], "median_s": statistics.median(swaps[1:])}
    load = round(os.getloadavg()[0], 1)
    return {**facts, "from": other, "back_s": back[1:], "load_average": load, "missed": missed}


def kill_a_load(server: Server) -> dict[str, Any]:
    """Kill the core of the first model while it loads."""
    first, other = server.names[:2]
    assert server.ask(other, "one two")[0] == 200
    before, missed = set(server.cores()), []
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(server.ask, first, "one two")
        pid = next(_new_cores(server, before))
        time.sleep(0.5)
        state = server.state(first)
        os.kill(pid, signal.SIGKILL)
        begun = time.perf_counter()
        status, answer = waiting.result()
    if state != "loading" or status != 503 or first not in answer:
        missed.append(f"{state}: {status} {answer}")
    if server.ask(other, "one two")[0] != 200:
        missed.append("the other model does not answer")
    while (result := server.ask(first, "one two"))[0] == 503 and time.perf_counter() - begun < 60:
        time.sleep(0.2)
    if result[0] != 200:
        missed.append(f"it is not loaded again: {result}")
    serves = round(time.perf_counter() - begun, 1)
    return {"killed_while": state, "told": answer, "serves_again_s": serves, "missed": missed}


def _new_cores(server: Server, before: set[int]) -> Iterator[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        yield from (pid for pid in server.cores() if pid not in before)
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
