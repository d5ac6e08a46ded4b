"""Measure the gain from drafts: single streams of more or less repetitive texts, and many requests at once."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peers.contestants import Contestant
from peers.prompts import Requests
from peers.worker import BenchmarkError

CODE = '''\
def moving_average(values, window):
    """Return the mean of each window of values."""
    total = 0.0
    averages = []
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        if index >= window - 1:
            averages.append(total / window)
    return averages


def running_max(values, window):
    """Return the largest value of each window."""
    largest = []
    for index in range(len(values) - window + 1):
        largest.append(max(values[index : index + window]))
    return largest
'''
SENTENCE = "The quick brown fox jumps over the lazy dog.\n"


class Text(NamedTuple):
    """A prompt and its settings."""

    prompt: str
    temperature: float


TEXTS: Mapping[str, Text] = {
    "repeated text": Text(SENTENCE * 4, 0.0),
    "code edit": Text(f"# The code:\n{CODE}\n\n# The same, with `values` renamed to `numbers`:\ndef moving", 0.0),
    "prose": Text("The fisherman found a strange shell on the beach and took it home. That night,", 0.8),
    "random text": Text("Words:", 2.0),
}
LENGTH = 200
"""The number of tokens that continue each text."""
NUM_REQUESTS, REQUEST_LENGTH = 64, 100
METHODS: Mapping[str, Mapping[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram"},
    # The texts repeat in each round: a cache would hold whole answers.
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
}
COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def speculation(
    model: Path,
    dtype: str,
    *,
    rounds: int,
    quick: bool,
    scratch: Path,
    keep: Callable[[Mapping[str, Any]], object],
    others: Mapping[str, tuple[Contestant, Contestant]],
    draft_model: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """Return each text's tokens/s by every method, in turns, and the median of the ratios to none.

    `keep` gets the rows as they come; `others` are libraries without and with prompt lookup, for the greedy texts only.
    `draft_model` is one more method. Raises BenchmarkError if outputs differ.
    """
    from jaxllm import LLM

    settings = {"model": str(model), "dtype": dtype, "max_model_len": 1024, "enable_prefix_caching": False}
    methods = dict(METHODS) | ({} if draft_model is None else {"draft_model": {"model": str(draft_model)}})
    engines = {name: LLM(**settings, speculative_config=config) for name, config in methods.items()}
    try:
        for engine in engines.values():
            engine.llm_engine.warm_up()
        prompts = {name: _encoded(engines["none"], text.prompt) for name, text in TEXTS.items()}
        length = 20 if quick else LENGTH
        figures = {}
        for name, text in TEXTS.items():
            jobs = [(prompts[name], text.temperature, length)]
            figures[f"one stream, {name}"] = _compare(engines, jobs, rounds)
            keep(figures)
        requests = [(ids, 0.8, 10 if quick else REQUEST_LENGTH) for ids in prompts.values()]
        jobs = [requests[index % len(requests)] for index in range(8 if quick else NUM_REQUESTS)]
        figures[f"{len(jobs)} requests at once"] = _compare(engines, jobs, max(2, rounds // 2))
    finally:
        for engine in engines.values():
            engine.shutdown()
    greedy = {name: prompts[name] for name in TEXTS if not TEXTS[name].temperature}
    for other, contestants in others.items():
        for name, row in _of_other(other, contestants, greedy, length, rounds, scratch).items():
            figures[f"one stream, {name}"] |= row
        keep(figures)
    return figures


def _encoded(engine: Any, text: str) -> list[int]:
    return list(engine.get_tokenizer().encode(text))


def _compare(engines: Mapping[str, Any], jobs: Sequence[tuple[list[int], float, int]], rounds: int) -> dict[str, Any]:
    """Return tokens/s of each engine and how many drafts it made, all engines in turns."""
    from jaxllm import SamplingParams

    inputs: Any = [{"prompt_token_ids": ids} for ids, _, _ in jobs]
    params = [
        SamplingParams(temperature=temperature, seed=index, max_tokens=length, ignore_eos=True)
        for index, (_, temperature, length) in enumerate(jobs)
    ]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    said: list[list[int]] = []
    before = {name: _counts(engine) for name, engine in engines.items()}
    for _ in range(rounds):
        for name, engine in engines.items():
            start = time.perf_counter()
            outputs = engine.generate(inputs, params, use_tqdm=False)
            seconds[name].append(time.perf_counter() - start)
            tokens = [list(output.outputs[0].token_ids) for output in outputs]
            said = said or tokens
            if tokens != said:
                raise BenchmarkError(f"{name}: drafts have changed the output")
    total = sum(length for _, _, length in jobs)
    row: dict[str, Any] = {"none_tokens_s": _rate(total, seconds["none"])}
    for name, engine in engines.items():
        if name == "none":
            continue
        num_steps, num_drafts, num_right = (
            (now - then) / rounds for now, then in zip(_counts(engine), before[name], strict=True)
        )
        row |= {
            f"{name}_tokens_s": _rate(total, seconds[name]),
            f"{name}_times": _ratio(seconds["none"], seconds[name]),
        }
        row |= {f"{name}_drafts": round(num_drafts), f"{name}_right": round(num_right)}
        row[f"{name}_steps"] = round(num_steps)
    print(row, file=sys.stderr, flush=True)
    return row


def _of_other(
    other: str,
    contestants: tuple[Contestant, Contestant],
    prompts: Mapping[str, list[int]],
    length: int,
    rounds: int,
    scratch: Path,
) -> dict[str, dict[str, Any]]:
    """Return the same for another library, without and with prompt lookup, one process after the other."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in prompts}
    for contestant in contestants:
        with contestant.start(scratch) as worker:
            for name, ids in prompts.items():
                worker.generate(Requests([ids], [8]))
                count = max(2, rounds // 2)
                seconds[name].append([worker.generate(Requests([ids], [length])).seconds for _ in range(count)])
    rows = {}
    for name, (plain, lookup) in seconds.items():
        rows[name] = {f"{other}_tokens_s": _rate(length, plain), f"{other}_lookup_tokens_s": _rate(length, lookup)}
        rows[name][f"{other}_lookup_times"] = _ratio([statistics.median(plain)], [statistics.median(lookup)])
    return rows


def _counts(engine: Any) -> list[int]:
    values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return [int(values.get(f"vllm:spec_decode_{name}", 0)) for name in COUNTS]


def _rate(num_tokens: int, seconds: Sequence[float]) -> float:
    return round(num_tokens / statistics.median(seconds), 1)


def _ratio(without: Sequence[float], with_drafts: Sequence[float]) -> float:
    """Return the speed-up by drafts: the median of the rounds."""
    return round(statistics.median(a / b for a, b in zip(without, with_drafts, strict=True)), 2)
