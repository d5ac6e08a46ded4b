"""Start workers, processes in a library's own environment, and call them by lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from peers.prompts import Requests

SCRIPTS = Path(__file__).resolve().parents[1]
PROGRAMS = Path(__file__).resolve().parent / "workers"
OF_THIS_SHELL = (
    "JAXLLM_CACHE",
    "JAX_COMPILATION_CACHE_DIR",
    "PYTHONPATH",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "VLLM_CACHE_ROOT",
)
"""Variables that would point a worker to other caches or modules."""
END_SECONDS = 60
LOG_LINES = 25
READ_BYTES = 1 << 24


class BenchmarkError(Exception):
    """The benchmark cannot continue; the message has the reason."""


@dataclass(frozen=True)
class Answer:
    """A call's result, its seconds, and its end on the machine's monotonic clock."""

    value: Any
    seconds: float
    ended: float
    peak_bytes: int


def read_files(*paths: Path) -> None:
    """Read files and folders into the page cache: some machines soon drop unread pages."""
    for top in paths:
        for path in top.rglob("*") if top.is_dir() else [top]:
            if path.is_file():
                with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
                    while file.read(READ_BYTES):
                        pass


def environment(python: str, cache: Path, tree: Path = SCRIPTS.parent) -> dict[str, str]:
    """Return the environment of a process of a library, with its caches in the folder `cache`, which is made.

    With this environment's Python, jaxllm is imported from the checkout `tree`.
    """
    temp = cache / "tmp"
    temp.mkdir(parents=True, exist_ok=True)
    env = {name: value for name, value in os.environ.items() if name not in OF_THIS_SHELL}
    env |= {"XDG_CACHE_HOME": str(cache), "TMPDIR": str(temp), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if python == sys.executable:
        env["PYTHONPATH"] = str(tree)
    return env


class Worker:
    """A running process. `with` ends it and its descendants."""

    def __init__(
        self, program: str, python: str, settings: dict[str, Any], cache: Path, tree: Path = SCRIPTS.parent
    ) -> None:
        """Start a program of `workers/`, with the environment that `environment` describes."""
        self._name = f"{program} ({settings})"
        self._log = cache / "log.txt"
        env = environment(python, cache, tree)
        read_files(
            Path(python).parent.parent, cache, *(Path(settings[name]) for name in ("model", "gguf") if name in settings)
        )
        self.spawned = time.monotonic()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, str(PROGRAMS / f"{program}.py")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, text=True, start_new_session=True,
            )  # fmt: skip
        self._send(settings)

    def call(self, method: str, *arguments: Any) -> Answer:
        """Call a method of the worker's object and wait for its end. Raises BenchmarkError if the worker has died."""
        self._send([method, *arguments])
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        return Answer(**json.loads(line))

    def generate(self, requests: Requests) -> Answer:
        """Continue prompts; the value is each one's tokens. Raises BenchmarkError unless all are as many as asked."""
        answer = self.call("generate", requests.prompts, requests.lengths)
        lengths = list(map(len, answer.value))
        if lengths != list(requests.lengths):
            raise BenchmarkError(f"{self._name} gave {lengths} tokens, not {list(requests.lengths)}")
        return answer

    def seconds_to(self, answer: Answer) -> float:
        """Return the seconds from the process' start to the end of a call."""
        return answer.ended - self.spawned

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if error[0] is None:
                self._process.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def _fail(self) -> None:
        said = "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise BenchmarkError(f"{self._name} has died. It said:\n{said}")
