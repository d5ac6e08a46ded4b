"""What the content of a block depends on is in its hash, and nothing else, so that a later engine finds it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxllm import EngineArgs
from jaxllm.core_messages import Clip
from jaxllm.engine.core import kv_tiers, startup
from jaxllm.execution.programs.cache import Folders
from jaxllm.scheduling.cache.kv_cache_manager import KVCacheManager
from jaxllm.scheduling.request import Request
from tests.models.tiny import folder
from tests.scheduling.pictures import PICTURES, make_prompt
from tests.scheduling.simulation import make_config, make_request

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "enforce_eager": True,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "num_gpu_blocks_override": 20,
    "kv_offloading_size": 0.01,
}
OTHERS: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "bfloat16"},
    "KV format": {"kv_cache_dtype": "fp8"},
    "block size": {"block_size": 32},
    "context": {"max_model_len": 112},
    "quantization": {"quantization": "int8"},
    "positions": {"hf_overrides": {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}},
    "batch invariance": {"batch_invariant": False},
}


def root_of(model: Path, kept: Path, **changes: Any) -> str:
    """Return the hash that an engine's blocks begin with; the engine computes nothing."""
    args = EngineArgs(str(model), kv_cache_folder=str(kept), **(SETTINGS | changes))
    prepared = startup.prepare(args.create_engine_config())
    try:
        root = kv_tiers.root_hash(prepared.config, prepared.compiler)
    finally:
        prepared.stop()
    assert root is not None
    return root.hex()


def roots(kept: Path) -> dict[str, str]:
    """Return the roots of engines that differ in one thing each."""
    model = folder("llama3_tied")
    return {name: root_of(model, kept, **changes) for name, changes in {"none": {}, **OTHERS}.items()}


@pytest.fixture(autouse=True)
def _keep_no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "use_cache", lambda *_, **__: Folders(None, None))


PRINTER = """
import json
import sys
from pathlib import Path
from tests.engine.test_kv_tiers import roots
print(json.dumps(roots(Path(sys.argv[1]))))
"""


def test_engines_have_the_same_root_after_a_restart_and_others_another(tmp_path: Path, repository: Path) -> None:
    expected = roots(tmp_path)
    assert len(set(expected.values())) == len(expected)
    command = [sys.executable, "-c", PRINTER, str(tmp_path / "another")]
    environment = os.environ | {"PYTHONHASHSEED": "11"}
    later = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(later.stdout.splitlines()[-1]) == expected


def test_other_weights_have_another_root(tmp_path: Path) -> None:
    model = shutil.copytree(folder("llama3_tied"), tmp_path / "model")
    first = root_of(model, tmp_path)
    assert root_of(model, tmp_path) == first
    os.utime(model / "model.safetensors", ns=(1, 1))
    second = root_of(model, tmp_path)
    assert len({first, second, root_of(folder("qwen3"), tmp_path)}) == 3


def hashes(manager: KVCacheManager, **changes: Any) -> list[bytes]:
    """Return the hashes of a request's blocks of four tokens."""
    prompt, media = make_prompt([[1, 2, 3], PICTURES[changes.pop("picture", 0)], [4] * 8])
    adapter = changes.pop("adapter", None)
    source = make_request("r", prompt, media=media, **changes)
    if adapter is not None:
        source = msgspec.structs.replace(source, adapter=adapter)
    request = Request(source, (0, 0), 0.0, None, frozenset(), 64)
    return [manager.hash_of(request, index) for index in range(len(prompt) // 4)]


def make_manager() -> KVCacheManager:
    return KVCacheManager(make_config(num_media_rows=64, num_host_blocks=(9,), root_hash=bytes(32)))


def test_blocks_have_the_same_hashes_after_a_restart_and_others_if_anything_differs() -> None:
    manager, later = make_manager(), make_manager()
    variants: dict[str, dict[str, Any]] = {
        "none": {},
        "salt": {"salt": "a user's"},
        "picture": {"picture": 1},
        "clip": {"clip": Clip(key=b"k" * 32, mels=b"", num_frames=4)},
        "adapter": {"adapter": 3},
        "another adapter": {"adapter": 4},
    }
    first = {name: hashes(manager, **changes) for name, changes in variants.items()}
    for (name, one), (other, two) in combinations(first.items(), 2):
        assert not set(one) & set(two), f"{name} and {other} share blocks"
    again = {name: hashes(later, **changes) for name, changes in variants.items()}
    for name, expected in first.items():
        # The number of an adapter is another one's in another process.
        assert (again[name] == expected) == ("adapter" not in name), name
