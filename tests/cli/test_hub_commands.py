"""`jaxllm pull`, `list` and `rm`, over a cache in the hub library's layout and a stand-in for the hub."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.cli.main import main
from tests.loading.files import gguf_bytes, gguf_f32, llama_metadata, safetensors_bytes
from tests.loading.hub_server import COMMIT, HubServer, serving

OLD = "fedcba9876543210fedcba9876543210fedcba98"
LLAMA = b'{"architectures": ["LlamaForCausalLM"]}'
ALIEN = b'{"architectures": ["AlienForCausalLM"]}'
WEIGHTS = safetensors_bytes({"a": np.arange(3, dtype=np.float32)})
GGUF = gguf_bytes(llama_metadata(), gguf_f32({"token_embd.weight": np.ones((6, 8))}))
REPOSITORIES: Mapping[str, Mapping[str, bytes]] = {
    "org/llama": {
        "config.json": LLAMA,
        "tokenizer.json": b"{}",
        "model.safetensors": WEIGHTS,
        "README.md": b"x",
        "pytorch_model.bin": b"x",
    },
    "org/alien": {"config.json": ALIEN, "model.safetensors": WEIGHTS},
    "org/gguf": {"m.Q4_K_M.gguf": GGUF, "m.Q8_0.gguf": GGUF},
}


def put(cache: Path, name: str, commit: str, files: Mapping[str, bytes], ref: str | None = "main") -> Path:
    """Write a revision in the hub library's layout and return the repository's folder."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    snapshot.mkdir(parents=True)
    for path, data in files.items():
        blob = folder / "blobs" / f"{hash(data):x}"
        blob.write_bytes(data)
        (snapshot / path).symlink_to(blob)
        os.utime(blob, (1_700_000_000, 1_700_000_000))
    if ref is not None:
        (folder / "refs" / ref).write_text(commit)
    return folder


def listed(capsys: pytest.CaptureFixture[str], cache: Path) -> list[dict[str, Any]]:
    """Return what `jaxllm list --json` prints."""
    assert main(["list", "--json", "--download-dir", str(cache)]) == 0
    return json.loads(capsys.readouterr().out)


def run(server: HubServer | None, home: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process, in whose environment is the hub."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING_FACE"))}
    endpoint = {"HF_ENDPOINT": server.url if server else "http://127.0.0.1:9"}
    return subprocess.run(
        [sys.executable, "-m", "jaxllm.cli", *words],
        cwd=Path(__file__).resolve().parents[2],
        env=kept | endpoint | {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def files_in(home: Path, name: str) -> set[str]:
    """Return the files of a repository's only revision in the cache."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.loading
def test_what_was_pulled_needs_no_hub(tmp_path: Path):
    with serving(REPOSITORIES) as server:
        pulled = run(server, tmp_path, "pull", "org/llama")
    assert pulled.returncode == 0, pulled.stderr
    assert pulled.stdout.startswith(f"org/llama: 0.00 GiB, revision {COMMIT}, in {tmp_path}")
    assert files_in(tmp_path, "org/llama") == {"config.json", "tokenizer.json", "model.safetensors"}
    again = run(None, tmp_path, "pull", "org/llama", HF_HUB_OFFLINE="1")
    assert (again.returncode, again.stdout) == (0, pulled.stdout)
    shown = run(None, tmp_path, "list")
    assert shown.returncode == 0, shown.stderr
    head, row = shown.stdout.splitlines()
    assert head.split() == ["NAME", "REVISION", "GiB", "LAST", "USED", "RUNS"]
    assert row.split()[:4] == ["org/llama", COMMIT[:8], "main", "0.00"]
    assert row.endswith(" yes")
    assert main(["rm", "org/llama", "-y", "--download-dir", str(tmp_path / "hub")]) == 0
    assert not list((tmp_path / "hub").glob("models--*"))


@pytest.mark.loading
def test_one_gguf_file_of_several(tmp_path: Path):
    with serving(REPOSITORIES) as server:
        several = run(server, tmp_path, "pull", "org/gguf")
        assert several.returncode == 2
        assert '"org/gguf:Q4_K_M"' in several.stderr
        pulled = run(server, tmp_path, "pull", "org/gguf:q4_k_m", "--revision", COMMIT)
    assert pulled.returncode == 0, pulled.stderr
    assert pulled.stdout.startswith(f"org/gguf:q4_k_m: 0.00 GiB, revision {COMMIT}")
    assert files_in(tmp_path, "org/gguf") == {"m.Q4_K_M.gguf"}


@pytest.mark.loading
def test_an_architecture_that_cannot_run_is_refused_before_its_weights(tmp_path: Path):
    with serving(REPOSITORIES) as server:
        refused = run(server, tmp_path, "pull", "org/alien")
    assert refused.returncode == 2
    assert "'AlienForCausalLM' is not supported" in refused.stderr
    assert files_in(tmp_path, "org/alien") == {"config.json"}


def test_a_local_folder_is_not_pulled(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["pull", str(tmp_path)]) == 2
    assert "there is nothing to download" in capsys.readouterr().err


def test_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    index = b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    folder = put(tmp_path, "org/llama", COMMIT, {"config.json": LLAMA, "model.safetensors": WEIGHTS})
    put(tmp_path, "org/llama", OLD, {"config.json": LLAMA}, ref=None)
    put(tmp_path, "org/alien", COMMIT, {"config.json": ALIEN, "model.safetensors": WEIGHTS})
    put(tmp_path, "org/gguf", COMMIT, {"m.Q4_K_M.gguf": GGUF})
    put(
        tmp_path,
        "org/half",
        COMMIT,
        {"config.json": LLAMA, "model.safetensors.index.json": index, "model-1.safetensors": WEIGHTS},
    )
    put(tmp_path, "org/lora", COMMIT, {"adapter_config.json": b"{}"})
    put(tmp_path, "org/empty", COMMIT, {"README.md": b"x"})
    put(tmp_path, "org/odd", COMMIT, {"config.json": b'{"architectures": 7, "quantization_config": [1]}'})
    (tmp_path / "datasets--org--data" / "snapshots").mkdir(parents=True)
    listed(capsys, tmp_path)  # which is no use of a model
    entries = {f"{entry['name']}@{entry['revision'][:2]}": entry for entry in listed(capsys, tmp_path)}
    assert {entry["last_used"] for entry in entries.values()} == {"2023-11-14T22:13:20+00:00"}
    assert {name: (entry["architecture"], entry["runs"]) for name, entry in entries.items()} == {
        "org/alien@01": ("AlienForCausalLM", False),
        "org/empty@01": (None, False),
        "org/gguf@01": ("LlamaForCausalLM", True),
        "org/half@01": ("LlamaForCausalLM", False),
        "org/llama@01": ("LlamaForCausalLM", True),
        "org/llama@fe": ("LlamaForCausalLM", False),
        "org/lora@01": (None, False),
        "org/odd@01": (None, False),
    }
    first = entries["org/llama@01"]
    assert first["num_bytes"] == len(LLAMA) + len(WEIGHTS)
    assert (first["refs"], first["path"]) == (["main"], str(folder / "snapshots" / COMMIT))
    assert entries["org/llama@fe"]["reason"] == "its weights are not here yet"
    assert "model-2.safetensors" in entries["org/half@01"]["reason"]
    assert "LoRA" in entries["org/lora@01"]["reason"]
    assert "is not supported" in entries["org/alien@01"]["reason"]


def test_list_tells_of_damage_and_unfinished_downloads(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = put(tmp_path, "org/llama", COMMIT, {"config.json": LLAMA})
    (folder / "blobs" / "abc.incomplete").write_bytes(bytes(20_000_000))
    (tmp_path / "models--org--broken").mkdir()
    assert main(["list", "--download-dir", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "org/llama" in out
    assert "org/llama: 0.02 GiB of unfinished downloads" in err
    assert "left out: " in err
    assert main(["rm", "org/llama", "-y", "--download-dir", str(tmp_path)]) == 0
    assert "freed 0.02 GiB" in capsys.readouterr().out


def test_an_empty_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    missing = str(tmp_path / "missing")
    assert main(["list", "--download-dir", missing]) == 0
    out, err = capsys.readouterr()
    assert (out, missing in err) == ("", True)
    assert listed(capsys, tmp_path) == []
    (tmp_path / "file").touch()
    assert main(["list", "--download-dir", str(tmp_path / "file")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/lama", "near it are org/llama, org/llama-chat."),
        ("LLAMA", "near it are org/llama, org/llama-chat."),
        ("org/lama:Q4_K_M", "near it are org/llama, org/llama-chat."),
        ("zzzzzz", "`jaxllm list` shows what there is"),
    ],
)
def test_rm_names_near_models(name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for known in ("org/llama", "org/llama-chat", "else/qwen"):
        put(tmp_path, known, COMMIT, {"config.json": LLAMA})
    assert main(["rm", name, "-y", "--download-dir", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert f"there is no model {name.partition(':')[0]!r}" in err
    assert words in err
    assert len(listed(capsys, tmp_path)) == 3


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ("y\n", 0, ""),
        ("YES\n", 0, ""),
        ("n\n", 1, "nothing is deleted"),
        ("\n", 1, "nothing is deleted"),
        ("", 2, "--yes"),
    ],
)
def test_rm_asks(
    answer: str,
    status: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    folder = put(tmp_path, "org/llama", COMMIT, {"config.json": LLAMA, "model.safetensors": bytes(30_000_000)})
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    assert main(["rm", "org/llama", "--download-dir", str(tmp_path)]) == status
    out, err = capsys.readouterr()
    assert f"delete org/llama ({COMMIT}) and free 0.03 GiB? [y/N]" in err
    assert words in err
    assert out == (f"deleted org/llama ({COMMIT}): freed 0.03 GiB\n" if status == 0 else "")
    assert folder.exists() == (status != 0)


def test_rm_of_one_revision(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A copy under another name has the same commits, and stays."""
    for name in ("org/llama", "else/llama"):
        put(tmp_path, name, COMMIT, {"config.json": LLAMA, "model.safetensors": WEIGHTS})
        put(tmp_path, name, OLD, {"config.json": LLAMA, "model.safetensors": bytes(30_000_000)}, ref="v1")
    words = ["rm", "org/llama", "-y", "--download-dir", str(tmp_path), "--revision"]
    for unknown in ("v2", OLD[:3]):
        assert main([*words, unknown]) == 2
        assert f"has no revision {unknown!r}" in capsys.readouterr().err
    assert main([*words, OLD[:8]]) == 0
    assert "freed 0.03 GiB" in capsys.readouterr().out
    left = [(entry["name"], entry["revision"]) for entry in listed(capsys, tmp_path)]
    assert left == [("else/llama", COMMIT), ("else/llama", OLD), ("org/llama", COMMIT)]
    assert (tmp_path / "models--org--llama" / "snapshots" / COMMIT / "model.safetensors").read_bytes() == WEIGHTS
    assert main([*words, "main"]) == 0
    assert not (tmp_path / "models--org--llama").exists()
    assert (tmp_path / "models--else--llama" / "snapshots" / OLD / "config.json").is_file()


def test_rm_of_one_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    parts = {f"big.Q2_K-0000{number}-of-00002.gguf": bytes([number]) for number in (1, 2)}
    files = {"m.Q4_K_M.gguf": b"four", "m.Q8_0.gguf": b"eight", "mmproj.gguf": b"sight", **parts}
    folder = put(tmp_path, "org/gguf", COMMIT, files)
    put(tmp_path, "org/llama", COMMIT, {"config.json": LLAMA})
    words = ["-y", "--download-dir", str(tmp_path)]
    for name, problem in (
        ("org/gguf:m.Q", "expected one GGUF file, the cache has: big.Q2_K-00001-of-00002.gguf, m.Q4_K_M.gguf"),
        ("org/gguf:Q5", "expected one GGUF file"),
        ("org/llama:Q4", "has no GGUF file"),
    ):
        assert main(["rm", name, *words]) == 2
        assert problem in capsys.readouterr().err
    assert main(["rm", "org/gguf:q4_k_m", *words]) == 0
    assert capsys.readouterr().out.startswith(f"deleted org/gguf:q4_k_m ({COMMIT}): freed 0.00 GiB")
    assert main(["rm", "org/gguf:q2_k", *words]) == 0
    assert {path.name for path in (folder / "snapshots" / COMMIT).iterdir()} == {"m.Q8_0.gguf", "mmproj.gguf"}
    assert sorted(path.read_bytes() for path in (folder / "blobs").iterdir()) == [b"eight", b"sight"]


def test_rm_of_a_gguf_file_that_another_revision_has(tmp_path: Path):
    for commit, ref in ((COMMIT, "main"), (OLD, "v1")):
        folder = put(tmp_path, "org/gguf", commit, {"m.Q4_K_M.gguf": b"four", "m.Q8_0.gguf": b"eight"}, ref)

    def left(commit: str) -> set[bytes]:
        snapshot = folder / "snapshots" / commit
        return {path.read_bytes() for path in snapshot.iterdir()} if snapshot.exists() else set()

    words = ["-y", "--download-dir", str(tmp_path), "--revision"]
    assert main(["rm", "org/gguf:Q4_K_M", *words, "v1"]) == 0
    assert (left(COMMIT), left(OLD)) == ({b"four", b"eight"}, {b"eight"})
    assert main(["rm", "org/gguf:Q4_K_M", *words, "main"]) == 0
    assert main(["rm", "org/gguf:Q8_0", *words, "main"]) == 0
    assert (left(COMMIT), left(OLD)) == (set(), {b"eight"})
    assert not (folder / "snapshots" / COMMIT).exists()
    assert [path.read_bytes() for path in (folder / "blobs").iterdir()] == [b"eight"]


def test_the_commands_load_the_hub_s_library_late():
    code = "import sys, jaxllm.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"huggingface_hub", "jax", "transformers"}.isdisjoint(done.stdout.split())
