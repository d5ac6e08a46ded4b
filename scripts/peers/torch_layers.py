"""Run one layer's op as HF Transformers computes it, in a worker process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("workers") / "torch_layers.py"


class TorchLayers:
    """The worker, which holds the layers' inputs and states."""

    def __init__(self, worker: subprocess.Popen[str]) -> None:
        self._worker = worker
        self._wait_for("ready")

    def run(self) -> None:
        """Run all layers once."""
        assert self._worker.stdin is not None
        self._worker.stdin.write("\n")
        self._worker.stdin.flush()
        self._wait_for("done")

    def _wait_for(self, word: str) -> None:
        assert self._worker.stdout is not None
        if self._worker.stdout.readline().strip() != word:
            raise RuntimeError("the process with torch ended; its own output says why")


@contextmanager
def torch_layers(python: str, op: str, **sizes: Any) -> Iterator[TorchLayers]:
    """Start the worker by the Python of `scripts/peers.sh DIR hf`; `sizes` are the worker's arguments."""
    command = [python, str(WORKER), op, json.dumps(sizes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        try:
            yield TorchLayers(worker)
        finally:
            worker.kill()
