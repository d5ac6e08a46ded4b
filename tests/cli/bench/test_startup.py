"""`jaxllm bench startup`: two real processes; the second finds everything in the first one's compile cache."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxllm.cli.main import main
from jaxllm.execution.programs.shapes import Upkeep
from jaxllm.utils import child_process
from tests.models.tiny import folder
from tests.quick import QUICK_FLAGS

pytestmark = pytest.mark.server

FLAGS = ["--max-num-batched-tokens", "16", "--max-num-seqs", "8", "--max-model-len", "64", "--dtype", "float32"]
OF_MEDIA = (Upkeep.MAKE_MEDIA, Upkeep.WRITE_MEDIA)
PARTS = ["imports", "configuration", "shapes", "tokenizer", "weights, KV cache", "engine", "first step"]


def test_the_second_start_compiles_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", QUICK_FLAGS)  # for the processes that start
    assert main(["bench", "startup", str(folder("llama3_tied")), "--skip-tokenizer-init", "--json", *FLAGS]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    upkeep = [each.value for each in Upkeep if not each.is_of_adapters and each not in OF_MEDIA]
    # Rare ones are on disk by then, and not loaded before a step wants one.
    for start, kinds in ((document["cold"], ("plain", "truncated", "full")), (document["warm"], ("plain",))):
        assert [part["name"] for part in start["parts"]] == PARTS
        assert all(part["seconds"] >= 0 for part in start["parts"])
        assert sum(part["seconds"] for part in start["parts"]) == pytest.approx(start["first_token"], abs=0.1)
        steps = [f"{n} tokens of 8 sequences, {kind}" for n in (8, 16) for kind in kinds]
        # The order is the compiler's, but for the one that the first step could not wait for.
        assert sorted(part["name"] for part in start["programs"]) == sorted([*steps, *upkeep])
        assert start["first_token"] < start["all_programs"]
    assert document["cold"]["num_compilations"] >= 6 + len(upkeep)
    assert document["warm"]["num_compilations"] == 0


def test_what_the_engine_refuses(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "startup", str(folder("llama3_tied")), "--max-model-len", "100000000"]) == 2
    assert "max_model_len" in capsys.readouterr().err


def test_no_model(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "startup"]) == 2
    assert "MODEL" in capsys.readouterr().err


def test_a_start_that_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(child_process.sys, "executable", "false")
    assert main(["bench", "startup", "any"]) == 3
    assert "the engine did not start: jaxllm.cli.bench.startup_probe ended with status 1" in capsys.readouterr().err
