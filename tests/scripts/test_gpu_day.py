"""scripts/gpu_check.sh unpacks a pack, and the checks that it runs judge correctly."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from check import goldens as check_goldens
from check import kernels as check_kernels
from make import packages

pytestmark = pytest.mark.scripts

SCRIPTS = ("gpu_check.sh", "lib/stages.sh", "lib.sh")
PARTS = ("a.gguf.part0", "a.gguf.part1")


@pytest.fixture
def machine(repository: Path, tmp_path: Path) -> Path:
    """Return a folder with the scripts and a pack."""
    for name in SCRIPTS:
        (tmp_path / "scripts" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository / "scripts" / name, tmp_path / "scripts" / name)
    pack = tmp_path / "pack"
    pack.mkdir()
    (pack / "ptxas.gz").write_bytes(gzip.compress(b"an assembler"))
    for content, name in zip((b"one ", b"model"), PARTS, strict=True):
        (pack / name).write_bytes(content)
    with zipfile.ZipFile(pack / "b.whl", "w") as wheel:
        wheel.writestr("b.py", "")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(pack.iterdir())]
    (pack / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    return tmp_path


def unpack(machine: Path) -> str:
    """Run the script with a stage that does not exist, which ends it after unpacking; return its output."""
    command = ["bash", "scripts/gpu_check.sh", "--stage", "none"]
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable}
    done = subprocess.run(command, cwd=machine, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stdout + done.stderr


def test_a_pack_is_put_together(machine: Path) -> None:
    assert "there is no stage none" in unpack(machine)
    to = machine / ".cache/pack"
    assert (to / "bin/ptxas").read_bytes() == b"an assembler"
    assert os.access(to / "bin/ptxas", os.X_OK)
    assert (to / "models/a.gguf").read_bytes() == b"one model"
    assert (to / "site/b.py").exists()


def test_what_has_not_arrived_is_named(machine: Path) -> None:
    (machine / "pack" / PARTS[1]).unlink()
    assert f"pack/{PARTS[1]} is not here yet" in unpack(machine)
    assert not list((machine / ".cache/pack/models").iterdir())


def test_a_damaged_pack_is_refused(machine: Path) -> None:
    (machine / "pack/ptxas.gz").write_bytes(b"something else")
    assert "pack/ is damaged" in unpack(machine)
    assert not (machine / ".cache/pack/bin/ptxas").exists()


def test_packages_are_found_with_what_they_need() -> None:
    assert packages.needed(["Jinja2"]) == {"jinja2", "markupsafe"}
    assert {"msgspec", "flax", "jax", "numpy"} <= packages.needed(["jaxllm"])
    assert "msgspec" not in packages.needed(["jax", "transformers"])


@pytest.mark.parametrize(("doubt", "status"), [(None, 0), ("the ptxas that is found first is old", 1)])
def test_an_assembler_in_doubt_fails(
    doubt: str | None, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_kernels, "describe_device", lambda: {"ptxas_doubt": doubt})
    monkeypatch.setattr(check_kernels, "reference_rows", lambda _: [{"missed": []}])
    monkeypatch.setattr(sys, "argv", ["kernels"])
    assert check_kernels.main() == status
    assert doubt is None or doubt in capsys.readouterr().out


def answer(token_ids: list[int]) -> Any:
    """Return an output of these tokens, each with its own id the most likely and 5 to 8 behind it."""
    logprobs = [
        {i: SimpleNamespace(logprob=-0.1 * place) for place, i in enumerate((t, 5, 6, 7, 8))} for t in token_ids
    ]
    return SimpleNamespace(prompt_token_ids=[3], outputs=[SimpleNamespace(token_ids=token_ids, logprobs=logprobs)])


@pytest.mark.parametrize(
    ("token_ids", "same", "is_right"), [([1, 2], 2, True), ([1, 5], 1, False), ([1, 9], 1, False), ([9, 2], 0, False)]
)
def test_tokens_are_compared_with_hf(token_ids: list[int], same: int, is_right: bool) -> None:
    row = {"prompt_ids": [3], "token_ids": [1, 2], "top_ids": [[1, 5, 6, 7, 8], [2, 5, 6, 7, 8]]}
    compared = check_goldens.compare(answer(token_ids), row | {"top_logprobs": [[-0.25], [-0.5]]})
    assert compared["same"] == same
    assert (compared["missed"] == []) == is_right
    assert compared["first_error"] == (0.25 if token_ids[0] == 1 else None)
