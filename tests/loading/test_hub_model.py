"""A model on the hub goes from its id to tokens; of one whose weights do not fit, none are fetched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.loading.files import safetensors_bytes
from tests.loading.hub_server import HubServer, serving
from tests.models.tiny import folder, read_goldens, read_tensors

pytestmark = pytest.mark.loading

CASE = "llama3_tied"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
EXTRA = {"one.weight": np.ones(500_000, np.float32), "two.weight": np.ones((2, 3), np.float32)}

PROGRAM = """
import json, sys
from jaxllm import LLM, SamplingParams
from jaxllm.exceptions import VLLMValidationError
model, prompt, num_tokens = json.loads(sys.argv[1])
options = dict(dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_num_batched_tokens=8)
try:
    with LLM(model, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    print(json.dumps(output.outputs[0].token_ids))
except VLLMValidationError as error:
    print(json.dumps(str(error)))
"""


def repository(tensors: dict[str, np.ndarray]) -> dict[str, bytes]:
    """Return the files of a repository with its tensors in two shards."""
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    weight_map = {name: shard for shard, half in zip(SHARDS, halves, strict=True) for name in half}
    files = {
        shard: safetensors_bytes({name: tensors[name] for name in half})
        for shard, half in zip(SHARDS, halves, strict=True)
    }
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    return files | {"config.json": (folder(CASE) / "config.json").read_bytes()}


def run_llm(server: HubServer, home: Path, model: str) -> list[int] | str:
    """Generate in a process of its own; returns the tokens, or the error."""
    golden = read_goldens(CASE)[0]
    arguments = [model, golden.prompt.tolist(), len(golden.tokens)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(arguments)],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_hub_id_generates_what_hf_does(tmp_path: Path):
    with serving({"org/good": repository(read_tensors(CASE))}) as server:
        assert run_llm(server, tmp_path, "org/good") == read_goldens(CASE)[0].tokens.tolist()


def test_of_an_unknown_architecture_not_even_headers_are_fetched(tmp_path: Path):
    config = json.dumps({"architectures": ["LlamasForCausalLM"]}).encode()
    with serving({"org/unknown": repository(read_tensors(CASE)) | {"config.json": config}}) as server:
        error = run_llm(server, tmp_path, "org/unknown")
        assert not [path for _, path, _ in server.requests if path.endswith(".safetensors")]
    assert "'LlamasForCausalLM' is not supported; nearest to it is LlamaForCausalLM" in error


def test_weights_that_do_not_fit_are_not_fetched(tmp_path: Path):
    tensors = {name: tensor for name, tensor in read_tensors(CASE).items() if "down_proj" not in name}
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    with serving({"org/bad": repository(tensors | EXTRA)}) as server:
        error = run_llm(server, tmp_path, "org/bad")
        weight_bytes = sum(size for _, path, size in server.requests if path.endswith(".safetensors"))
    for words in (
        "org/bad",
        "unexpected: one.weight",
        "unexpected: two.weight",
        "missing: model.layers.{0-",
        ".mlp.down_proj.weight",
        "wrong: model.norm.weight has shape",
    ):
        assert words in error
    assert weight_bytes < 300_000 < EXTRA["one.weight"].nbytes  # the headers' worth
