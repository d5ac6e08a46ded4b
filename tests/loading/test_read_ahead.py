"""Reading ahead: in order, no further than its bound, for every kind of checkpoint, and never in the way of a load."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.loading import read_ahead
from jaxllm.loading.load import load_params
from jaxllm.loading.mapped_file import FileSpan
from jaxllm.loading.open import open_checkpoint
from jaxllm.loading.read_ahead import ReadAhead
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.resolve.model import checked_model
from tests.loading.test_halves import configured
from tests.loading.test_sharded_state import write
from tests.loading.torch_writer import torch_bytes
from tests.models.tiny import folder

DATA = Path(__file__).resolve().parents[1] / "data"


class Reads:
    """Records what is read ahead, instead of os.preadv."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans: list[tuple[int, int]] = []
        self.changed = threading.Condition()
        monkeypatch.setattr(os, "preadv", self._read)

    def _read(self, file: int, buffers: list[memoryview], start: int) -> int:
        del file
        with self.changed:
            self.spans.append((start, len(buffers[0])))
            self.changed.notify_all()
        return len(buffers[0])

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.spans) == count, timeout=30)


def test_blocks_are_read_in_order_and_no_further_than_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reads = Reads(monkeypatch)
    monkeypatch.setattr(read_ahead, "MOST_BYTES_AHEAD", 100)
    path = tmp_path / "x"
    path.write_bytes(bytes(500))
    with ReadAhead(1, 40).running([FileSpan(path, 7, 90), FileSpan(path, 0, 0), FileSpan(path, 200, 80)]) as advance:
        reads.wait_for(4)
        assert reads.spans == [(7, 40), (47, 40), (87, 10), (200, 40)]
        advance(30)  # 130 bytes less 30 are not below the bound
        advance(1)
        reads.wait_for(5)
    assert reads.spans[4:] == [(240, 40)]


def test_a_load_that_ends_early_ends_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(read_ahead, "MOST_BYTES_AHEAD", 1)
    path = tmp_path / "x"
    path.write_bytes(bytes(100))
    with pytest.raises(KeyError), ReadAhead(4, 10).running([FileSpan(path, 0, 100)] * 9):
        raise KeyError
    with ReadAhead(2, 10).running([FileSpan(tmp_path / "absent", 0, 100)]):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def write_torch(path: Path) -> Path:
    checkpoint = open_checkpoint(str(folder("qwen2")))
    tensors = {name: checkpoint.read(name).astype(np.float32) for name in checkpoint.tensors}
    path.mkdir()
    (path / "config.json").write_text((folder("qwen2") / "config.json").read_text())
    (path / "pytorch_model.bin").write_bytes(torch_bytes(tensors))
    return path


def test_what_is_read_ahead_is_what_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Safetensors, PyTorch's files and slices of ranks: the bytes of each tensor are in its spans."""
    write(tmp_path / "slices", "qwen2", 4)
    checkpoints = [
        open_checkpoint(str(folder("qwen2"))),
        open_checkpoint(str(write_torch(tmp_path / "torch"))),
        open_checkpoint(str(tmp_path / "slices"), load_format="sharded_state"),
    ]
    for checkpoint in checkpoints:
        for name in checkpoint.tensors:
            spans = checkpoint.spans(name)
            data = b"".join(p.path.read_bytes()[p.start : p.start + p.num_bytes] for p in spans)
            rows = checkpoint.read(name).reshape(len(checkpoint.read(name)), -1)
            assert all(row[: max(1, len(row) // 4)].tobytes() in data for row in rows), name
            assert len(data) < 3 * rows.nbytes + 4096
    reads, checkpoint = Reads(monkeypatch), checkpoints[0]
    _, specs = checked_model(configured(folder("qwen2")))
    plain, ahead = (load_params(specs, checkpoint, read_ahead=ReadAhead(number, 1 << 20)) for number in (0, 3))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), plain, ahead))
    spans = {span for name in checkpoint.tensors for span in checkpoint.spans(name)}
    assert {(span.start, span.num_bytes) for span in spans} >= set(reads.spans)


def test_of_quantized_matrices_all_parts_are_read():
    checkpoint = open_checkpoint(str(next((DATA / "quantized").glob("awq"))))
    for name, info in checkpoint.tensors.items():
        assert sum(span.num_bytes for span in checkpoint.spans(name)) == info.num_bytes


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        ({}, 0),
        ({"safetensors_load_strategy": "lazy", "safetensors_prefetch_num_threads": 3}, 0),
        ({"safetensors_load_strategy": "prefetch"}, 8),
        ({"safetensors_load_strategy": "prefetch", "safetensors_prefetch_num_threads": 3}, 3),
        ({"model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 5}}, 5),
        ({"model_loader_extra_config": {"num_threads": 5}}, 0),
    ],
)
def test_the_arguments_are_vllms(arguments: dict[str, Any], number: int):
    assert EngineArgs("x", **arguments).num_reading_threads == number
