"""Tests that compile with what is here get a kind of hardware that is this CPU."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jaxllm.check import compilers
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.resolve.hardware import HARDWARE, Hardware
from tests.models.tiny import folder

MODEL = str(folder("llama3_tied"))
TOY = Hardware(
    name="toy", platform="cpu", device_kind="cpu", memory_bytes=1_400_000, usable_bytes=1_400_000,
    bytes_per_second=1e9, flops_per_second=1e12, devices_per_host=1, layouts=("1x1", "2x2"),
)  # fmt: skip


def engine_args(**changes: Any) -> EngineArgs:
    """Return arguments of a tiny engine, in float32, whose programs compile in a second each."""
    settings = {
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "block_size": 16,
        "skip_tokenizer_init": True,
    }
    return EngineArgs(**({"model": MODEL, "max_model_len": 256} | settings | changes))


def add_toy(monkeypatch: pytest.MonkeyPatch, hardware: Hardware = TOY) -> None:
    """Make "toy:1x1" a topology, whose device is the CPU."""
    monkeypatch.setitem(HARDWARE, hardware.name, hardware)
    monkeypatch.setattr(compilers, "describe_devices", lambda *_: jax.devices()[:1])
    monkeypatch.setattr(compilers, "compiler_versions", lambda _: {"jax": jax.__version__})
