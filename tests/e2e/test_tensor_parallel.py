"""One model on 1, 2, 4 and 8 devices: the same tokens, parts of equal size, and no more exchanged than need be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.models import ModelSpecs, get_family
from tests.e2e.adapter_data import CASES as ADAPTED
from tests.e2e.tensor_parallel_runs import DEALT, EMBEDS_CASES, FAMILIES, HEAD_CASES, MEDIA_CASES, QUANTIZED
from tests.e2e.tiny_engine import TOLERANCE
from tests.e2e.tiny_tokenizer import save_tokenizer
from tests.loading.files import write_folder
from tests.quick import QUICK_FLAGS

pytestmark = [pytest.mark.device, pytest.mark.timeout(1200)]  # one process makes dozens of engines

SIZES = ("1", "2", "4", "8")
SPREAD = SIZES[1:]
NUM_LAYERS = 3
# 31.25 tiles of 256 ids: no device's part is in whole tiles.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8000, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "attention_bias": True,
    "mlp_bias": True, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def write_checkpoint(folder: Path, hf: dict[str, Any]) -> Path:
    """Write random weights whose outputs vary, and whose few likely ids are far from equally likely.

    Where thousands are, a draw turns on the last bits of their sums.
    """
    rng = np.random.default_rng(0)
    specs = ModelSpecs(get_family(hf["architectures"][0]).read_config(hf), "float32").param_specs()
    sources = sorted((source, spec.hf_shape) for spec in specs.values() for source in spec.sources)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) * 0.15 for name, shape in sources}
    tensors |= {name: 1 + tensor for name, tensor in tensors.items() if "norm" in name}
    tensors["lm_head.weight"] *= 3
    return write_folder(folder, tensors, hf)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("spread") / "llama", LLAMA))


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: str, smollm2_path: str, repository: Path
) -> dict[str, Any]:
    """Return what tensor_parallel_runs.py writes of everything but families."""
    folder = tmp_path_factory.mktemp("runs")
    tokenizer = save_tokenizer(folder / "tokenizer")
    return run_apart(folder, repository, checkpoint, tokenizer, smollm2_path)


@pytest.fixture(scope="module")
def of_families(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, Any]:
    """Return what it writes of families."""
    return run_apart(tmp_path_factory.mktemp("families"), repository)


def run_apart(folder: Path, repository: Path, *arguments: str) -> dict[str, Any]:
    """Run tensor_parallel_runs.py in a process of its own; return what it writes."""
    out = folder / "found.json"
    command = [sys.executable, "-m", "tests.e2e.tensor_parallel_runs", str(out), *arguments]
    environment = os.environ | {
        "XLA_FLAGS": QUICK_FLAGS,
        "PYTHONPATH": f"{repository}{os.pathsep}{repository / 'scripts'}",
    }
    result = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def runs(results: dict[str, Any]) -> dict[str, Any]:
    return results["runs"]


def test_the_runs_do_what_they_claim_to(runs: dict[str, Any]) -> None:
    for size in SIZES:
        for kind in ("plain", "features"):
            run = runs[size][kind]
            assert (run["num_preemptions"] > 0, run["most_chunks"] > 1, max(run["cached"]) > 0) == (True, True, True)
        tokens = [each["outputs"][0]["token_ids"] for each in runs[size]["plain"]["outputs"]]
        assert all(len(set(each)) > 8 for each in tokens), "outputs that hardly vary prove little"


@pytest.mark.parametrize("kind", ["plain", "truncated", "features"])
@pytest.mark.parametrize("size", SPREAD)
def test_tokens_equal_those_of_one_device(runs: dict[str, Any], size: str, kind: str) -> None:
    expected, got = runs["1"][kind]["outputs"], runs[size][kind]["outputs"]
    assert len(expected) == len(got) > 7
    for left, right in zip(expected, got, strict=True):
        for name in ("token_ids", "ended", "text"):
            assert [each[name] for each in left["outputs"]] == [each[name] for each in right["outputs"]]


@pytest.mark.parametrize("size", SPREAD)
def test_logprobs_equal_those_of_one_device(runs: dict[str, Any], size: str) -> None:
    pairs = list(zip(*(list(positions(runs[each]["features"]["outputs"])) for each in ("1", size)), strict=True))
    assert len(pairs) > 500
    for expected, got in pairs:
        # Of ids that are equally likely, one side may list the one and the other side the other.
        least = min(expected.values())
        assert len(expected) == len(got)
        for token in expected.keys() | got.keys():
            np.testing.assert_allclose(got.get(token, least), expected.get(token, least), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", FAMILIES)
def test_families_equal_hf(of_families: dict[str, Any], case: str) -> None:
    assert len(of_families[case]) == 3
    for pair in of_families[case]:
        assert pair["got"] == pair["expected"]


@pytest.mark.parametrize("case", DEALT)
def test_whole_experts_on_each_device_equal_hf(results: dict[str, Any], case: str) -> None:
    assert len(results["experts"][case]["golden"]) == 3
    for pair in results["experts"][case]["golden"]:
        assert pair["got"] == pair["expected"]
    if "int8" in results["experts"][case]:
        check_quantized(*results["experts"][case]["int8"])


@pytest.mark.parametrize("case", HEAD_CASES)
def test_draft_heads_guess_as_hf_does(results: dict[str, Any], case: str) -> None:
    assert len(results["heads"][case]) == 3
    for pair in results["heads"][case]:
        assert pair["got"] == pair["expected"]


@pytest.mark.parametrize("case", EMBEDS_CASES)
def test_prompts_of_embeddings_equal_hf(results: dict[str, Any], case: str) -> None:
    output = results["embeds"][case]
    assert output["got"] == output["expected"]
    assert output["error"] < TOLERANCE
    assert output["is_same"]


@pytest.mark.parametrize("case", MEDIA_CASES)
def test_prompts_with_pictures_equal_hf(results: dict[str, Any], case: str) -> None:
    assert len(results["pictures"][case]) == 3
    for output in results["pictures"][case]:
        assert output["got"] == output["expected"]
        assert output["error"] < TOLERANCE


def test_prompts_with_clips_equal_hf(results: dict[str, Any]) -> None:
    assert len(results["clips"]) == 3
    for output in results["clips"]:
        assert output["got"] == output["expected"]
        assert output["error"] < TOLERANCE


@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_equal_hf(results: dict[str, Any], case: str) -> None:
    adapted = results["adapters"][case]
    assert adapted["got"] == adapted["expected"]
    assert adapted["error"] < TOLERANCE


def test_adapters_beside_whole_experts_equal_hf(results: dict[str, Any]) -> None:
    adapted = results["experts with adapters"]
    assert adapted["got"] == adapted["expected"]
    assert adapted["error"] < TOLERANCE


def test_packed_experts_whole_on_each_device_equal_those_of_one(results: dict[str, Any]) -> None:
    check_quantized(*results["packed experts"])


def test_tokens_in_int8_equal_those_of_one_device(results: dict[str, Any], runs: dict[str, Any]) -> None:
    def tokens(outputs: list[dict[str, Any]]) -> list[list[int]]:
        return [each["token_ids"] for output in outputs for each in output["outputs"]]

    expected, got = (tokens(results["int8"][size]) for size in ("1", "4"))
    assert got == expected
    assert expected != tokens(runs["1"]["plain"]["outputs"])[: len(expected)]


@pytest.mark.parametrize("case", QUANTIZED)
def test_quantized_checkpoints_equal_those_of_one_device(results: dict[str, Any], case: str) -> None:
    check_quantized(*(results["quantized"][case][size] for size in ("1", "2")))


def check_quantized(alone: list[Any], spread: list[Any]) -> None:
    (kept, *expected), (kept_apart, *got) = alone, spread
    assert min(kept, kept_apart) > 0, "weights were widened"
    for left, right in zip(expected, got, strict=True):
        assert [each["token_ids"] for each in right["outputs"]] == [each["token_ids"] for each in left["outputs"]]
    for left, right in zip(positions(expected), positions(got), strict=True):
        assert left.keys() == right.keys()
        np.testing.assert_allclose(list(right.values()), [left[token] for token in right], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("quantization", ["None", "int8"])
def test_company_changes_no_bit(results: dict[str, Any], quantization: str) -> None:
    alone, together = results["invariance"][quantization]
    assert alone == together
    assert len({json.dumps(output) for output in alone}) == len(alone)


def positions(outputs: list[dict[str, Any]]) -> Iterator[dict[int, float]]:
    """Yield the log-probabilities of every position, of prompts and outputs."""
    for output in outputs:
        for shown in (output["prompt_logprobs"], *(each["logprobs"] for each in output["outputs"])):
            yield from (dict(map(tuple, position)) for position in shown or () if position)


def test_would_notice_another_log_probability(runs: dict[str, Any]) -> None:
    expected = next(positions(runs["1"]["features"]["outputs"]))
    token = next(iter(expected))
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(expected[token] + 2 * TOLERANCE, expected[token], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("size", SPREAD)
def test_each_device_holds_its_part_of_the_parameters(runs: dict[str, Any], size: str) -> None:
    params, whole = runs[size]["params"], runs["1"]["params"]
    assert whole["by_device"] == [whole["total"]]
    assert params["total"] == whole["total"]
    assert len(params["by_device"]) == int(size)
    names = ("attn_norm.scale", "mlp_norm.scale", "attn.o_bias", "mlp.down_bias")
    assert params["replicated"].keys() == {"final_norm.scale", *(f"layers.0.{name}" for name in names)}
    kv = {f"layers.0.attn.{name}" for name in ("k", "v", "k_bias", "v_bias")}
    assert params["repeated"].keys() == (kv if int(size) > LLAMA["num_key_value_heads"] else set())
    everywhere = sum(params["replicated"].values()) + sum(params["repeated"].values())
    for held in params["by_device"]:
        assert held - everywhere <= 1.02 / int(size) * whole["total"]


@pytest.mark.parametrize("size", SPREAD)
def test_each_device_holds_its_heads_of_the_pool(runs: dict[str, Any], size: str) -> None:
    heads = max(LLAMA["num_key_value_heads"], int(size))
    for kind in ("plain", "features"):
        for shape in runs[size][kind]["pool"]:
            assert shape[1] == heads // int(size)


@pytest.mark.parametrize("size", SIZES)
def test_two_sums_a_layer_are_exchanged(runs: dict[str, Any], size: str) -> None:
    """The embedding takes one more; sampling exchanges what each tile comes to, or all logits once."""
    sums = 2 * NUM_LAYERS + 1
    plain = {"all-reduce": sums + 2, "all-gather": 2, "collective-permute": 1}
    full = {"all-reduce": sums, "all-gather": 1}
    steps = [step for kind in ("plain", "features") for step in runs[size][kind]["collectives"]]
    assert {step["sampling"] for step in steps} == {"plain", "truncated", "full"}
    for step in steps:
        expected = plain if step["sampling"] == "plain" else full
        assert step["counts"] == (expected if int(size) > 1 else {})


@pytest.mark.parametrize(
    ("name", "parameter", "message"),
    [
        ("heads", "tensor_parallel_size", "9 query heads do not divide. It runs on 1, 3"),
        ("too few", "tensor_parallel_size", "there are 8"),
        ("axes", "mesh", "others of size 1 only"),
        ("no model axis", "mesh", "an axis 'model'"),
        ("both", "tensor_parallel_size", "contradicts mesh, of 2 devices"),
        ("not a mesh", "mesh", "must be a Mesh"),
    ],
)
def test_what_cannot_work_is_refused_by_name(results: dict[str, Any], name: str, parameter: str, message: str) -> None:
    assert results["refusals"][name]["parameter"] == parameter
    assert message in results["refusals"][name]["message"]


def test_more_devices_than_there_are(checkpoint: str) -> None:
    with pytest.raises(VLLMValidationError, match="there are 1") as caught:
        LLM(checkpoint, tensor_parallel_size=2)
    assert caught.value.parameter == "tensor_parallel_size"
