"""Measure how jaxllm's cost grows with the batch, the context, the number of prompts, and the model's size."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.shapes import MODELS

from peers.contestants import jaxllm
from peers.prompts import Source
from peers.worker import Worker

SHAPE = MODELS["smollm2-135m"]
POINTS = {
    "batch": (1, 2, 4, 8, 16, 32, 64, 128),
    "context": (128, 256, 512, 1024, 2048, 4096, 8192),
    "prompts": (10, 100, 1000, 10_000),
    "depth": (2, 4, 8, 16, 32, 64),
    "width": (256, 512, 1024, 2048),
}
QUICK_POINTS = {"batch": (1, 4), "context": (128, 256), "prompts": (10,), "depth": (2,), "width": (256,)}
REPEATS = 3
WIDTH_LAYERS = 4
"""The number of layers of models of different widths."""
ENGINE = {"enable_prefix_caching": False}
Row = dict[str, float]


def sweep(
    model: Path, dtype: str, *, quick: bool, scratch: Path, keep: Callable[[dict[str, list[Row]]], object]
) -> dict[str, list[Row]]:
    """Return rows for each dimension; times are in milliseconds, unless a name ends in s.

    The run is long: `keep` gets the rows so far after each row.
    """
    points = QUICK_POINTS if quick else POINTS
    vocab_size = SHAPE["vocab_size"]
    rows: dict[str, list[Row]] = {}
    for name, measure in (("prompts", queued_prompts), ("batch", batch), ("context", context)):
        # Each runs in a new process, because a process's memory only grows.
        with jaxllm(model, dtype, **ENGINE).start(scratch) as worker:
            worker.call("warm_up")
            source = Source(vocab_size)
            for value in points[name]:
                rows.setdefault(name, []).append(_row(name, value, measure(worker, source, value)))
                keep(rows)
    for name, config in (("depth", deeper), ("width", wider)):
        for value in points[name]:
            rows.setdefault(name, []).append(_row(name, value, dummy_model(config(value), dtype, scratch)))
            keep(rows)
    return rows


def queued_prompts(worker: Worker, source: Source, num: int) -> Row:
    """Measure a number of short prompts, all queued at once."""
    requests = source.equal(num, 16, 8)
    answer = worker.generate(requests)
    return {
        "s": answer.seconds,
        "output_tokens_per_s": requests.output_tokens / answer.seconds,
        "peak_gib": answer.peak_bytes / 2**30,
    }


def batch(worker: Worker, source: Source, num: int) -> Row:
    """Measure a decode step of a number of sequences."""
    _, step = decode(worker, source, num, 8, 64)
    return {"step_ms": step * 1e3, "output_tokens_per_s": num / step}


def context(worker: Worker, source: Source, length: int) -> Row:
    """Measure one sequence of a length: the prompt, and the last 32 tokens."""
    prefill, step = decode(worker, source, 1, length - 32, 32)
    return {"prefill_ms": prefill * 1e3, "step_ms": step * 1e3}


def decode(worker: Worker, source: Source, num: int, prompt: int, output: int) -> tuple[float, float]:
    """Return the median seconds of prompts with one output token each, and of each further step."""

    def seconds(length: int) -> float:
        return worker.generate(source.equal(num, prompt, length)).seconds

    times = [(seconds(1), seconds(output)) for _ in range(1 + REPEATS)][1:]  # the first may compile
    return (
        statistics.median(first for first, _ in times),
        statistics.median((all_of_it - first) / (output - 1) for first, all_of_it in times),
    )


def deeper(num_layers: int) -> dict[str, Any]:
    """Return SmolLM2's configuration with another number of layers."""
    return SHAPE | {"num_hidden_layers": num_layers}


def wider(width: int) -> dict[str, Any]:
    """Return a configuration of SmolLM2's proportions with another width, and few layers."""
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 256}
    return (
        SHAPE | heads | {"num_hidden_layers": WIDTH_LAYERS, "hidden_size": width, "intermediate_size": width * 8 // 3}
    )


def dummy_model(config: dict[str, Any], dtype: str, scratch: Path) -> Row:
    """Measure a model of random weights: its start with empty caches, a prompt of 512 tokens, a decode step of 8."""
    size = f"{config['num_hidden_layers']}x{config['hidden_size']}"
    folder = scratch / size
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    # Eager: only programs that run are compiled, and none in the background during the first token.
    engine = {"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True}
    contestant = jaxllm(folder, dtype, **engine, **ENGINE)
    source = Source(config["vocab_size"])
    with contestant.start(folder) as worker:
        start = worker.seconds_to(worker.generate(source.equal(1, 32, 1)))
        prefill, _ = decode(worker, source, 1, 512, 2)
        _, step = decode(worker, source, 8, 16, 32)
    return {"cold_s": start, "prefill_ms": prefill * 1e3, "step_ms": step * 1e3}


def _row(name: str, value: int, figures: Row) -> Row:
    row = {name: value} | {key: round(figure, 4) for key, figure in figures.items()}
    print("  ".join(f"{key} {figure:g}" for key, figure in row.items()), file=sys.stderr, flush=True)
    return row
