"""The hub is reached over real HTTP, at a stand-in: what is fetched and when, and what errors say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.loading.files import gguf_bytes, gguf_f32, llama_metadata, safetensors_bytes
from tests.loading.gguf_vision_files import text_file, tower_file
from tests.loading.hub_server import COMMIT, HubServer, serving
from tests.loading.torch_writer import torch_bytes

pytestmark = pytest.mark.loading

CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}).encode()
BIG = {"a": np.arange(200_000, dtype=np.float32)}
SHARD_NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": {"a": SHARD_NAMES[0], "b": SHARD_NAMES[1]}}).encode()
EMBEDDING = gguf_f32({"token_embd.weight": np.ones((6, 8))})
GGUF = gguf_bytes(llama_metadata(), EMBEDDING)
CLUTTER = {
    "README.md": b"x",
    "pytorch_model.bin": b"x" * 1000,
    "modeling_evil.py": b"raise SystemExit",
    "original/consolidated.00.pth": b"x",
    "original/model.safetensors": b"x",
    "onnx/model.onnx": b"x",
}
_SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "norm_eps", "vocab_size")
PARAMS = json.dumps(dict.fromkeys(_SIZES, 4)).encode()
TORCH = torch_bytes({"a": np.arange(3, dtype=np.float32)})
REPOSITORIES: Mapping[str, Mapping[str, bytes]] = {
    "org/single": {
        "config.json": CONFIG,
        "tokenizer.json": b"{}",
        "model.safetensors": safetensors_bytes(BIG),
        **CLUTTER,
    },
    "org/sharded": {
        "config.json": CONFIG,
        "generation_config.json": b'{"eos_token_id": 7}',
        "model.safetensors.index.json": INDEX,
        SHARD_NAMES[0]: safetensors_bytes(BIG),
        SHARD_NAMES[1]: safetensors_bytes({"b": np.ones(3, np.float16)}),
        "consolidated.safetensors": b"x" * 10_000,
    },
    "org/bin": {"config.json": CONFIG, "pytorch_model.bin": TORCH},
    "org/mistral": {
        "params.json": PARAMS,
        "tekken.json": b"{}",
        "consolidated.safetensors": safetensors_bytes({"norm.weight": np.ones(4, np.float32)}),
    },
    "org/slices": {
        "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
        "model.safetensors.index.json": INDEX,
        **{
            f"model-rank-{rank}-part-0.safetensors": safetensors_bytes(
                {"model.norm.weight": np.full(4, 1 + rank, "f4")}
            )
            for rank in range(2)
        },
    },
    "org/flax": {"config.json": CONFIG, "flax_model.msgpack": b"x"},
    "org/bins": {
        "config.json": CONFIG,
        "pytorch_model.bin.index.json": b'{"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}',
        "pytorch_model-00001-of-00001.bin": TORCH,
        "pytorch_model.bin": b"x",
    },
    "org/gated": {"config.json": CONFIG, "model.safetensors": safetensors_bytes({"a": np.ones(2, np.float32)})},
    "org/gguf": {"m.Q4_K_M.gguf": GGUF, "m.Q8_0.gguf": GGUF[:50]},
    "org/parts": {
        "F16/m-00001-of-00002.gguf": gguf_bytes(llama_metadata() | {"split.no": 0, "split.count": 2}, {}),
        "F16/m-00002-of-00002.gguf": gguf_bytes({"split.no": 1, "split.count": 2}, EMBEDDING),
        "Q8_0/m-00001-of-00002.gguf": b"GGUF",
        "Q8_0/m-00002-of-00002.gguf": b"GGUF",
        "mmproj-F16.gguf": b"GGUF",
    },
    "org/sees": {
        "BF16/m.gguf": text_file("qwen3_vl").read_bytes(),
        "mmproj-F16.gguf": b"GGUF",
        "mmproj-BF16.gguf": tower_file("qwen3_vl").read_bytes(),
    },
}

CLIENT = """
import json, sys
from jaxllm.exceptions import VLLMValidationError
from jaxllm.loading.open import open_checkpoint, open_config
for model, options, fetch in json.loads(sys.argv[1]):
    opener = open_config if options.pop("config_only", False) else open_checkpoint
    try:
        checkpoint = opener(model, **options)
        infos = checkpoint.tensors.items()
        found = {
            "tensors": {name: [list(info.shape), info.dtype, info.num_bytes] for name, info in infos},
            "generation_config": checkpoint.generation_config,
            "dtype": checkpoint.dtype,
        }
        if fetch:
            found["is_local"] = [checkpoint.is_local]
            checkpoint.fetch()
            found["is_local"].append(checkpoint.is_local)
            found["sums"] = {name: float(checkpoint.read(name).sum()) for name in checkpoint.tensors}
    except VLLMValidationError as error:
        found = {"error": str(error), "parameter": error.parameter}
    print(json.dumps(found))
assert "jax" not in sys.modules and "transformers" not in sys.modules
"""
Call = tuple[str, dict[str, Any], bool]


def client(server: HubServer | None, home: Path, calls: list[Call], **environment: str) -> list[dict[str, Any]]:
    """Make the calls in a process of its own, and return what each gave."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING_FACE"))}
    endpoint = {"HF_ENDPOINT": server.url if server else "http://127.0.0.1:9"}
    result = subprocess.run(
        [sys.executable, "-c", CLIENT, json.dumps(calls)],
        cwd=Path(__file__).resolve().parents[2],
        env=kept | endpoint | {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def received(server: HubServer) -> dict[str, int]:
    """Return the bytes sent of each file of a repository."""
    totals: dict[str, int] = {}
    for _, path, size in server.requests:
        if f"/resolve/{COMMIT}/" in path and size:
            name = path.partition(f"/resolve/{COMMIT}/")[2]
            totals[name] = totals.get(name, 0) + size
    return totals


def test_opening_reads_headers_and_fetching_brings_the_weights(tmp_path: Path):
    with serving(REPOSITORIES) as server:
        (opened,) = client(server, tmp_path, [("org/sharded", {}, False)])
        assert opened["tensors"] == {"a": [[200_000], "float32", 800_000], "b": [[3], "float16", 6]}
        assert opened["generation_config"] == {"eos_token_id": 7}
        assert opened["dtype"] == "float32"
        before = received(server)
        assert set(before) == {"config.json", "generation_config.json", "model.safetensors.index.json", *SHARD_NAMES}
        assert before[SHARD_NAMES[0]] < 150_000  # a header's worth of 800,000
        (fetched,) = client(server, tmp_path, [("org/sharded", {}, True)])
        assert fetched["sums"] == {"a": float(BIG["a"].sum()), "b": 3.0}
        assert fetched["is_local"] == [False, True]
        assert "consolidated.safetensors" not in received(server)
        server.requests.clear()
        (again,) = client(server, tmp_path, [("org/sharded", {}, True)])
        assert (again["sums"], again["is_local"]) == (fetched["sums"], [True, True])
        assert received(server) == {}
    (offline,) = client(None, tmp_path, [("org/sharded", {}, True)], HF_HUB_OFFLINE="1")
    assert offline["sums"] == fetched["sums"]
    (unreachable,) = client(None, tmp_path, [("org/sharded", {}, True)])
    assert unreachable["sums"] == fetched["sums"]


def test_only_the_files_needed_are_fetched(tmp_path: Path):
    with serving(REPOSITORIES) as server:
        calls: list[Call] = [
            ("org/single", {"download_dir": str(tmp_path / "own")}, True),
            ("org/bin", {"load_format": "dummy"}, False),
        ]
        single, dummy = client(server, tmp_path / "home", calls)
        assert single["sums"] == {"a": float(BIG["a"].sum())}
        assert dummy["tensors"] == {}
        assert set(received(server)) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    assert list((tmp_path / "own").rglob("model.safetensors"))


def test_pytorch_files(tmp_path: Path):
    with serving(REPOSITORIES) as server:
        calls: list[Call] = [("org/bin", {}, True), ("org/bins", {}, True)]
        whole, indexed, none = client(server, tmp_path, [*calls, ("org/sharded", {"load_format": "pt"}, False)])
        assert whole["sums"] == indexed["sums"] == {"a": 3.0}
        assert "no pytorch_model.bin and no index of several; it has" in none["error"]
        server.requests.clear()
        assert client(server, tmp_path, calls) == [whole, indexed]
        assert received(server) == {}
    assert client(None, tmp_path, calls, HF_HUB_OFFLINE="1") == [whole, indexed]


def test_heads_beside_the_weights(tmp_path: Path):
    """BGE-M3's heads are known before the weights are fetched, in either format."""
    heads = {path.name: path.read_bytes() for path in (Path(__file__).parents[1] / "data/bge_m3").glob("*_linear.pt")}
    config = {"config.json": b'{"architectures": ["XLMRobertaModel"]}'}
    weights = {"org/new": {"model.safetensors": safetensors_bytes(BIG)}, "org/old": {"pytorch_model.bin": TORCH}}
    repositories = {name: config | heads | files for name, files in weights.items()}
    with serving(repositories) as server:
        calls: list[Call] = [("org/new", {}, False), ("org/new", {}, True), ("org/old", {}, True)]
        opened, *fetched = client(server, tmp_path, calls)
    names = {f"{head}_linear.{part}" for head in ("colbert", "sparse") for part in ("weight", "bias")}
    assert set(opened["tensors"]) == {"a", *names}
    assert opened["tensors"]["sparse_linear.weight"] == [[1, 32], "float16", 64]
    for checkpoint in fetched:
        assert set(checkpoint["sums"]) == {"a", *names}
        assert checkpoint["sums"]["sparse_linear.bias"] == pytest.approx(0.3, abs=1e-4)


def test_mistral_s_own_files(tmp_path: Path):
    calls: list[Call] = [("org/mistral", {}, True)]
    with serving(REPOSITORIES) as server:
        (opened,) = client(server, tmp_path, calls)
        assert opened["sums"] == {"model.norm.weight": 4.0}
        assert set(received(server)) == {"params.json", "tekken.json", "consolidated.safetensors"}
    assert client(None, tmp_path, calls, HF_HUB_OFFLINE="1") == [opened]


def test_slices_of_ranks(tmp_path: Path):
    calls: list[Call] = [("org/slices", {"load_format": "sharded_state"}, True)]
    with serving(REPOSITORIES) as server:
        (opened,) = client(server, tmp_path, calls)
        assert opened["sums"] == {"model.norm.weight": 4.0}
        assert {f"model-rank-{rank}-part-0.safetensors" for rank in range(2)} <= set(received(server))
    assert client(None, tmp_path, calls, HF_HUB_OFFLINE="1") == [opened]


def test_a_config_alone(tmp_path: Path):
    options = {"config_only": True}
    calls: list[Call] = [("org/single", options, False), ("org/gguf", options, False), ("org/absent", options, False)]
    with serving(REPOSITORIES) as server:
        single, gguf, absent = client(server, tmp_path, calls)
        assert set(received(server)) == {"config.json"}
    assert (single["tensors"], single["dtype"]) == ({}, "float32")
    assert "there is no config.json" in gguf["error"]
    assert "no such repository" in absent["error"]


def test_a_gguf_file_of_a_repository(tmp_path: Path):
    calls: list[Call] = [("org/gguf:q4_k_m", {}, True), ("org/gguf", {}, False)]
    with serving(REPOSITORIES) as server:
        chosen, several = client(server, tmp_path, calls)
        assert set(received(server)) == {"m.Q4_K_M.gguf"}
    assert chosen["sums"] == {"model.embed_tokens.weight": 48.0}
    for words in ("m.Q4_K_M.gguf, m.Q8_0.gguf", '"org/gguf:Q4_K_M"'):
        assert words in several["error"]


def test_a_gguf_model_of_several_parts(tmp_path: Path):
    with serving(REPOSITORIES) as server:
        chosen, several = client(server, tmp_path, [("org/parts:F16", {}, True), ("org/parts", {}, False)])
        assert set(received(server)) == {"F16/m-00001-of-00002.gguf", "F16/m-00002-of-00002.gguf"}
    assert chosen["sums"] == {"model.embed_tokens.weight": 48.0}
    assert "the repository has: F16/m-00001-of-00002.gguf, Q8_0/m-00001-of-00002.gguf;" in several["error"]


def test_the_vision_tower_of_a_gguf_model(tmp_path: Path):
    """The tower comes from the file with the precision of the original; a model that is not to see needs none."""
    with serving(REPOSITORIES) as server:
        (blind,) = client(server, tmp_path, [("org/sees:BF16", {"sees": False}, False)])
        assert set(received(server)) == {"BF16/m.gguf"}
        (seeing,) = client(server, tmp_path, [("org/sees:BF16", {}, True)])
        assert set(received(server)) == {"BF16/m.gguf", "mmproj-BF16.gguf"}
    towers = seeing["tensors"].keys() - blind["tensors"].keys()
    assert towers
    assert all(name.startswith("visual.") for name in towers)


def test_errors_say_what_to_do(tmp_path: Path):
    calls: list[Call] = [
        ("org/absent", {}, False),
        ("org/gated", {}, False),
        ("org/gated", {"token": "hf_wrong"}, False),
        ("org/single", {"revision": "nope"}, False),
        ("org/flax", {}, False),
        ("not a/hub id", {}, False),
        ("org/gated", {"token": HubServer.TOKEN}, True),
    ]
    with serving(REPOSITORIES, gated=frozenset({"org/gated"})) as server:
        absent, gated, wrong, revision, other, invalid, allowed = client(server, tmp_path, calls)
        page = server.url
    assert all(error["parameter"] == "model" for error in (absent, gated, wrong, other, invalid))
    for words in ("'org/absent'", "no such repository", f"{page}/org/absent", "HF_TOKEN"):
        assert words in absent["error"]
    for error in (gated, wrong):
        for words in ("'org/gated'", "is gated", f"{page}/org/gated", "hf_token="):
            assert words in error["error"]
    assert revision["parameter"] == "revision"
    assert "'nope'" in revision["error"]
    assert "flax_model.msgpack" in other["error"]
    assert "no hub id" in invalid["error"]
    assert allowed["sums"] == {"a": 2.0}


def test_offline_without_a_cache(tmp_path: Path):
    (offline,) = client(None, tmp_path, [("org/single", {}, False)], HF_HUB_OFFLINE="1")
    assert offline["parameter"] == "model"
    assert "HF_HUB_OFFLINE" in offline["error"]
    (unreachable,) = client(None, tmp_path, [("org/single", {}, False)])
    assert "cannot be reached" in unreachable["error"]
