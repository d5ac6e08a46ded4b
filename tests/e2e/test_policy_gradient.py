"""The loop of docs/examples/policy_gradient.py: its engine runs the trainer's weights, and nothing more is compiled."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

from jaxllm import LLM
from tests.e2e.inside import core_of
from tests.e2e.test_sleep import SETTINGS, counting_compilations, live_bytes
from tests.e2e.test_weight_update import answers, expected_of, saved
from tests.e2e.tiny_engine import tiny_llm
from tests.models.tiny import folder

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("no_garbage")]

CASE = "llama3_tied"
PROMPT = list(range(3, 19))
NUM_UPDATES = 20
BOUNDS = {"float32": 1e-4, "bfloat16": 0.5}
"""The most by which a token's log-probability differs between engine and trainer, whose forward is in float32."""


@pytest.fixture(scope="module")
def example(repository: Path) -> ModuleType:
    path = repository / "docs" / "examples" / "policy_gradient.py"
    spec = importlib.util.spec_from_file_location("policy_gradient", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stacks(llm: LLM) -> list[int]:
    """Return the addresses of the engine's stacked arrays."""
    updates = core_of(llm)._weights
    assert updates is not None
    layers = updates._main.launcher.weights()["layers"]
    return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(layers)]


def test_twenty_updates(example: ModuleType, tmp_path: Path) -> None:
    settings = SETTINGS | {"max_num_seqs": 16}
    with tiny_llm(CASE, **settings) as (llm, _):
        updates = example.train(llm, folder(CASE), PROMPT, NUM_UPDATES, 3e-3)
        seen = [next(updates)[0], next(updates)[0]]  # these compile
        addresses, num_bytes, num_programs = stacks(llm), live_bytes(), core_of(llm).num_compiled
        last = {}
        with counting_compilations() as compiled:
            for update, tensors in updates:
                seen.append(update)
                last = tensors
                assert stacks(llm) == addresses, "an array was not written in place"
                assert live_bytes() == pytest.approx(num_bytes, rel=0.01)
        assert (compiled, core_of(llm).num_compiled) == ([], num_programs)
        assert [update.version for update in seen] == ["default", *range(1, NUM_UPDATES)]
        assert llm.get_weight_version() == NUM_UPDATES
        assert max(update.difference for update in seen) < BOUNDS["float32"]
        assert seen[-1].reward > seen[0].reward + 0.2
        trained = answers(llm)
    path = saved(CASE, {name: np.asarray(tensor) for name, tensor in last.items()}, tmp_path / "trained")
    assert trained == expected_of(path)


def test_bfloat16(example: ModuleType) -> None:
    with tiny_llm(CASE, **SETTINGS | {"dtype": "bfloat16", "max_num_seqs": 16}) as (llm, _):
        seen = [update for update, _ in example.train(llm, folder(CASE), PROMPT, 5, 3e-3)]
    assert 1e-3 < max(update.difference for update in seen) < BOUNDS["bfloat16"]
