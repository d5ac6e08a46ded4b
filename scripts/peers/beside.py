"""Compare jaxllm with itself in turns: with a CPU's own kernels and in plain XLA, or with another revision."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peers.contestants import Contestant, jaxllm
from peers.prompts import Requests, Source
from peers.turns import take_turns
from peers.worker import SCRIPTS, BenchmarkError

LABELS = {"cpu": "own kernels", "xla": "xla"}
"""The backends of `attention_config`; in plain XLA the matmuls are XLA's too."""
STREAMS = 16
CONTEXT = 2000
ENGINE = {"max_model_len": 2304}
CALLS = 2
SECONDS = 6.0
"""A task's calls that count: at least as many, and for as long; a few short calls would differ by a tenth."""

Figures = dict[str, float]


def beside_xla(model: Path, dtype: str, *, rounds: int, quick: bool, scratch: Path) -> dict[str, Figures]:
    """Return each task's figures by both backends, and the median over the rounds of their ratio."""
    runs = [
        Run(
            replace(jaxllm(model, dtype, attention_config={"backend": backend}, **ENGINE), name=label, label=label),
            scratch / backend,
            quick,
        )
        for backend, label in LABELS.items()
    ]
    return _beside(runs, rounds)


def beside_revision(
    model: Path, dtype: str, revision: str, *, rounds: int, quick: bool, scratch: Path
) -> dict[str, Figures]:
    """Return each task's figures by this working tree and by a revision, and the median of their ratio.

    Both run in this environment, with the programs of this tree. Raises BenchmarkError for an unknown revision.
    """
    ours = jaxllm(model, dtype, **ENGINE)
    with _checked_out(revision, scratch / "tree") as tree:
        runs = [
            Run(replace(ours, name="this tree", label="this tree"), scratch / "ours", quick),
            Run(replace(ours, name=revision, label=revision, tree=tree), scratch / "theirs", quick),
        ]
        return _beside(runs, rounds)


@dataclass(frozen=True)
class Run:
    """One side of the comparison."""

    contestant: Contestant
    cache: Path
    quick: bool

    def cold(self) -> dict[str, Any]:
        """Start with empty caches, and fill them."""
        with self.contestant.start(self.cache) as worker:
            worker.call("warm_up")
        return {"rounds": []}

    def warm(self, _: Mapping[str, Any]) -> Figures:
        """Return the figures of each task, in a new process."""
        length = 8 if self.quick else 48
        context = CONTEXT // 10 if self.quick else CONTEXT
        with self.contestant.start(self.cache) as worker:
            source = Source(worker.call("shapes").value["vocab_size"])
            started = worker.seconds_to(worker.generate(source.equal(1, 32, 1)))
            worker.call("warm_up")

            def seconds(requests: Callable[[], Requests]) -> float:
                """Return the seconds of the median call, after a first one that does not count."""
                worker.generate(requests())
                times: list[float] = []
                while len(times) < CALLS or (sum(times) < SECONDS and not self.quick):
                    times.append(worker.generate(requests()).seconds)
                return statistics.median(times)

            # A repeated prompt is a prefix hit: only its last block is computed, and then decodes.
            known = source.equal(1, context, length)
            return {
                "one stream, output tokens/s": length / seconds(lambda: source.equal(1, 32, length)),
                f"{STREAMS} streams, output tokens/s": (
                    STREAMS * length / seconds(lambda: source.equal(STREAMS, 32, length))
                ),
                "a prompt of 512, tokens/s": 512 / seconds(lambda: source.equal(1, 512, 1)),
                f"a stream behind {context:,} tokens, tokens/s": length / seconds(lambda: known),
                "first tokens of 32, 1/s": 1 / seconds(lambda: source.equal(1, 32, 1)),
                "starts to a first token, 1/s": 1 / started,
            }


def _beside(runs: Sequence[Run], rounds: int) -> dict[str, Figures]:
    """Measure both sides in turns; returns the medians, and the median over the rounds of first by second."""
    first, second = (run.contestant.name for run in runs)
    results = take_turns(runs, Run.warm, rounds=rounds, compared="programs are compiled")
    pairs = list(zip(results[first]["rounds"], results[second]["rounds"], strict=True))
    return {
        task: {
            first: _significant(statistics.median(ours[task] for ours, _ in pairs)),
            second: _significant(statistics.median(theirs[task] for _, theirs in pairs)),
            "times": round(statistics.median(ours[task] / theirs[task] for ours, theirs in pairs), 3),
        }
        for task in pairs[0][0]
    }


def _significant(value: float) -> float:
    return float(f"{value:.4g}")


@contextmanager
def _checked_out(revision: str, tree: Path) -> Iterator[Path]:
    """Check a revision out into a folder, which is removed in the end."""
    git = ["git", "-C", str(SCRIPTS.parent), "worktree"]
    added = subprocess.run([*git, "add", "--detach", str(tree), revision], check=False, capture_output=True, text=True)
    if added.returncode:
        raise BenchmarkError(f"git cannot check out {revision!r}: {added.stderr.strip()}")
    try:
        yield tree
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], capture_output=True, check=False)
