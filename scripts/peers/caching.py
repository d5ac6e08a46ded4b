"""Measure workloads that repeat themselves, with prefix caching and without: system prompt, chats, long document."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers.contestants import Contestant, jaxllm
from peers.prompts import Requests, Source
from peers.worker import BenchmarkError, Worker

Outputs = list[list[int]]


class Session:
    """Counts a worker's seconds and tokens."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.seconds, self.prompt_tokens = 0.0, 0

    def generate(self, prompts: list[list[int]], length: int) -> Outputs:
        """Continue each prompt by a number of tokens."""
        answer = self._worker.generate(Requests(prompts, [length] * len(prompts)))
        self.seconds += answer.seconds
        self.prompt_tokens += sum(map(len, prompts))
        return answer.value


def shared_system_prompt(session: Session, source: Source, *, quick: bool) -> Outputs:
    """Ask 256 questions behind one system prompt of 512 tokens, all at once."""
    system = source.tokens(512)
    questions = source.mixed(8 if quick else 256, (16, 48), (16, 16))
    return session.generate([[*system, *question] for question in questions.prompts], 16)


def chat(session: Session, source: Source, *, quick: bool) -> Outputs:
    """Hold 8 conversations of 6 turns side by side: each turn 48 new tokens, each answer 32 tokens."""
    talks = [source.tokens(64) for _ in range(2 if quick else 8)]
    answers: Outputs = []
    for _ in range(2 if quick else 6):
        talks = [talk + source.tokens(48) for talk in talks]
        said = session.generate(talks, 32)
        answers += said
        talks = [talk + answer for talk, answer in zip(talks, said, strict=True)]
    return answers


def long_document(session: Session, source: Source, *, quick: bool) -> Outputs:
    """Ask 4 questions, one after the other, about a document of 8,000 tokens."""
    document = source.tokens(500 if quick else 8000)
    return [session.generate([document + source.tokens(32)], 32)[0] for _ in range(4)]


WORKLOADS: dict[str, Callable[..., Outputs]] = {
    "256 questions, one system prompt": shared_system_prompt,
    "8 chats of 6 turns": chat,
    "4 questions on 8,000 tokens": long_document,
}


def caching(
    model: Path, dtype: str, *, rounds: int, quick: bool, scratch: Path, **engine: Any
) -> dict[str, dict[str, Any]]:
    """Return each workload's median seconds with caching and without, by an engine with more arguments.

    Raises BenchmarkError if outputs differ.
    """
    figures: dict[str, dict[str, Any]] = {}
    outputs: dict[str, Outputs] = {}
    for number in range(rounds):
        for cached in (True, False):
            contestant = jaxllm(model, dtype, enable_prefix_caching=cached, batch_invariant=True, **engine)
            for name, (said, session) in _run_all(contestant, quick=quick, scratch=scratch).items():
                if outputs.setdefault(name, said) != said:
                    raise BenchmarkError(f"{name}: the outputs depend on what is in the prefix cache")
                row = figures.setdefault(name, {"prompt_tokens": session.prompt_tokens, "on_s": [], "off_s": []})
                row["on_s" if cached else "off_s"].append(session.seconds)
                side = "with" if cached else "without"
                print(
                    f"round {number + 1}: {name}, {side} caching: {session.seconds:.2f} s", file=sys.stderr, flush=True
                )
    for row in figures.values():
        row |= {side: round(statistics.median(row[side]), 3) for side in ("on_s", "off_s")}
        row["times_faster"] = round(row["off_s"] / row["on_s"], 2)
    return figures


def _run_all(contestant: Contestant, *, quick: bool, scratch: Path) -> dict[str, tuple[Outputs, Session]]:
    """Run each workload once in a new process, batch-invariant: outputs are equal to the bit."""
    results = {}
    with contestant.start(scratch) as worker:
        source = Source(worker.call("shapes").value["vocab_size"])
        worker.call("warm_up")
        for name, run in WORKLOADS.items():
            session = Session(worker)
            results[name] = run(session, source, quick=quick), session
    return results
