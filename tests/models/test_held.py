"""Weights that stay quantized give the same outputs as their widened numbers, in the CPU's kernels and in XLA."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.loading.load import load_params
from jaxllm.loading.open import open_checkpoint
from jaxllm.models import LayerLoop, Model, ModelSpecs, get_family
from pallas_kernels.weights.held import Quantized
from tests.models.running import Runner
from tests.models.tiny import Golden

pytestmark = pytest.mark.models

ROOT = Path(__file__).parents[1] / "data" / "quantized"
CASES = sorted(path.name for path in ROOT.iterdir())
PROMPT = Golden(
    prompt=np.arange(3, 40, dtype=np.int32),
    tokens=np.array([5], np.int32),
    logprobs=np.zeros((1, 1)),
    prompt_logprobs=None,
)


def run(case: str, loop: LayerLoop, *, keeps: bool) -> tuple[np.ndarray, Any]:
    checkpoint = open_checkpoint(str(ROOT / case))
    names = checkpoint.tensors if keeps else ()
    formats = {name: form for name in names if (form := checkpoint.format_of(name)) is not None}
    config = get_family("LlamaForCausalLM").read_config(checkpoint.config, checkpoint.tensors)
    model = Model(ModelSpecs(config, "float32", loop, formats=formats))
    params = load_params(model.specs.param_specs(checkpoint.tensors), checkpoint, progress=False)
    held = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    return Runner(model, params).whole(PROMPT), [leaf.format for leaf in held if isinstance(leaf, Quantized)]


@cache
def widened(case: str) -> np.ndarray:
    """Return the log-probabilities of widened weights, which are the same in all loops (test_goldens.py)."""
    expected, formats = run(case, LayerLoop.SCAN, keeps=False)
    assert not formats
    return expected


@pytest.mark.parametrize("loop", [LayerLoop.SCAN, LayerLoop.IN_PLACE])
@pytest.mark.parametrize("case", CASES)
def test_equals_widened_weights(case: str, loop: LayerLoop) -> None:
    got, formats = run(case, loop, keeps=True)
    assert formats
    # Sums in another order: a log-probability of -28 moves by some of float32's steps there, which are 2e-6.
    np.testing.assert_allclose(got, widened(case), rtol=1e-6, atol=2e-5)
    assert abs(got).max() > 1
