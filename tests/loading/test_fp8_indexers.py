"""Checkpoints with indexers in float8 blocks of 128 x 128, as DeepSeek V3.2 and GLM-5 come.

The oracle is the model of the same numbers, widened: greedy tokens are equal, and log-probabilities to rounding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxllm import RequestOutput, SamplingParams
from pallas_kernels.weights.held import Quantized
from tests.e2e.inside import core_of
from tests.e2e.tiny_engine import Job, differences, run_together, tiny_llm
from tests.models.tiny import read_hf_config, read_tensors

pytestmark = pytest.mark.loading

E4M3, BLOCK, LARGEST = ml_dtypes.float8_e4m3fn, 128, 448.0
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "indexer.weights_proj")
"""Parts of the names of matrices that the published checkpoints leave in bfloat16."""
LENGTHS = (5, 20, 40)
"""Lengths of prompts. The indexers choose 12 positions."""
type Tensors = dict[str, np.ndarray]


def rounded(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and the scales of blocks, float32, with each block's largest number at float8's largest."""
    numbers = matrix.astype(np.float32)
    rows, columns = (-(-size // BLOCK) for size in numbers.shape)
    padded = np.zeros((rows * BLOCK, columns * BLOCK), np.float32)
    padded[: numbers.shape[0], : numbers.shape[1]] = numbers
    scales = np.abs(padded.reshape(rows, BLOCK, columns, BLOCK)).max((1, 3)) / LARGEST
    return (numbers / spread(scales, numbers.shape)).astype(E4M3), scales


def spread(scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return each number's scale."""
    return np.kron(scales, np.ones((BLOCK, BLOCK), np.float32))[: shape[0], : shape[1]]


def is_quantized(name: str, tensor: np.ndarray) -> bool:
    return tensor.ndim == 2 and not any(part in name for part in KEPT)


def in_blocks(tensors: Mapping[str, np.ndarray]) -> tuple[Tensors, Tensors]:
    """Return a checkpoint's tensors with float8 codes and scales, and with the numbers that they stand for."""
    codes_and_scales, widened = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if is_quantized(name, tensor):
            codes, scales = rounded(tensor)
            codes_and_scales |= {name: codes, f"{name}_scale_inv": scales}
            widened[name] = codes.astype(np.float32) * spread(scales, codes.shape)
    return codes_and_scales, widened


def write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def generate(folder: Path) -> tuple[list[RequestOutput], set[str]]:
    """Return outputs, and the names of the weights that are held quantized."""
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True, detokenize=False)
    jobs = [Job(np.random.default_rng(n).integers(6, 256, n).tolist(), params) for n in LENGTHS]
    sizes = {"max_num_batched_tokens": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 32}
    with tiny_llm(folder, cudagraph_capture_sizes=[4], **sizes) as (llm, _):
        runner = core_of(llm)._runner
        assert runner is not None
        weights = jax.tree.leaves_with_path(runner.launcher.params, is_leaf=lambda x: isinstance(x, Quantized))
        held = {jax.tree_util.keystr(path) for path, weight in weights if isinstance(weight, Quantized)}
        return run_together(llm, jobs), held


@pytest.mark.parametrize(("case", "is_listed"), [("deepseek_v32", False), ("glm_moe_dsa", True)])
def test_codes_and_scales_are_the_model_of_their_numbers(tmp_path: Path, case: str, is_listed: bool) -> None:
    """A config.json may list the modules that stay, or only the tensors tell."""
    config, tensors = read_hf_config(case), read_tensors(case)
    assert tensors["model.layers.0.self_attn.indexer.wq_b.weight"].shape[0] > BLOCK, "a matrix has more than one block"
    quantization: dict[str, Any] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    if is_listed:
        kept = [name for name, tensor in tensors.items() if tensor.ndim == 2 and not is_quantized(name, tensor)]
        quantization["modules_to_not_convert"] = [name.removesuffix(".weight") for name in kept]
    codes_and_scales, widened = in_blocks(tensors)
    expected, wide = generate(write(tmp_path / "widened", config, widened))
    got, held = generate(write(tmp_path / "blocks", config | {"quantization_config": quantization}, codes_and_scales))
    assert differences(expected, got) == {}
    [of_indexers, *others] = ({name.split("'")[-2] for name in names if "indexer" in name} for names in (held, wide))
    assert of_indexers == {"q", "k"}, "of queries and keys, not the heads' weights"
    assert others == [set()]
