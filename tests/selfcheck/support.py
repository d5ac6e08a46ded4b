"""A tiny model, and a CPU that stands for a device that is new to kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxllm.selfcheck import process, start
from jaxllm.selfcheck.device import Accelerators
from jaxllm.selfcheck.process import Limits
from tests.e2e.random_checkpoint import save_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
LIMITS = Limits(start=120.0, compile=30.0, run=5.0)
NAME = "Made-up 9000"


def make_model(folder: Path) -> str:
    """Write the model, and return its folder."""
    save_model(folder, CONFIG)
    return str(folder)


def plant(monkeypatch: pytest.MonkeyPatch, limits: Limits = LIMITS, **faults: str) -> None:
    """Let children run with faults of the CPU's kernels, by op; see `faulty.py`."""
    monkeypatch.setattr(process, "_MODULE", "tests.selfcheck.faulty")
    monkeypatch.setattr(process, "LIMITS", limits)
    monkeypatch.setenv("PLANTED", json.dumps(faults))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine's CPU stand for a device that is new to kernels."""
    monkeypatch.setattr(start, "find_accelerators", lambda: Accelerators((NAME,), "1.2.3"))
    monkeypatch.setattr(start, "_is_for_cpu", lambda: False)
    monkeypatch.setattr(start, "_obstacle", lambda *_: None)
