"""Read the tiny checkpoints of tests/data, and HF's goldens for those that generate."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

TINY = Path(__file__).parents[1] / "data" / "tiny"
CASES = tuple(sorted(path.name for path in TINY.iterdir()))
POOLING = Path(__file__).parents[1] / "data" / "pooling"
POOLING_CASES = tuple(sorted(path.name for path in POOLING.iterdir()))
BLOCK_SIZE = 16
"""The goldens' longest prompt is over three blocks of this size."""


@dataclass(frozen=True)
class Golden:
    """One prompt and HF's outputs for it: greedy tokens, and log-probabilities in float32."""

    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    """[decodes, v]: row i is the distribution that tokens[i] was taken from."""
    prompt_logprobs: np.ndarray | None
    """[prompt, v], for the shorter prompts."""

    @property
    def sequence(self) -> np.ndarray:
        """Return prompt and tokens, without the last token, which nothing follows."""
        return np.concatenate((self.prompt, self.tokens[:-1]))


def folder(case: str) -> Path:
    """Return a case's checkpoint folder."""
    return (TINY if case in CASES else POOLING) / case


def read_goldens(case: str) -> list[Golden]:
    """Return a case's goldens, one per prompt."""
    with np.load(folder(case) / "golden.npz") as arrays:
        count = sum(name.startswith("tokens_") for name in arrays)
        return [
            Golden(
                prompt=arrays[f"prompt_{index}"],
                tokens=arrays[f"tokens_{index}"],
                logprobs=arrays[f"logprobs_{index}"],
                prompt_logprobs=arrays.get(f"prompt_logprobs_{index}"),
            )
            for index in range(count)
        ]


def read_hf_config(case: str) -> dict[str, Any]:
    """Return a case's config.json."""
    return json.loads((folder(case) / "config.json").read_text())


def read_tensors(case: str) -> dict[str, np.ndarray]:
    """Return a case's tensors by HF name, bfloat16."""
    data = (folder(case) / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        assert entry["dtype"] == "BF16"
        begin, end = entry["data_offsets"]
        values = np.frombuffer(data[start + begin : start + end], ml_dtypes.bfloat16)
        tensors[name] = values.reshape(entry["shape"])
    return tensors
