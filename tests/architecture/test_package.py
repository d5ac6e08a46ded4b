"""The wheel holds what users import: jaxllm with its models, the kernels and their data, and the typing marker."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.architecture.sources import ROOT, product


def data_files() -> set[str]:
    """Return what users need beside modules: the packages' files of other kinds, but for their descriptions."""
    files = [file for folder in ("jaxllm", "pallas_kernels") for file in (ROOT / folder).rglob("*") if file.is_file()]
    data = {str(file.relative_to(ROOT)) for file in files if file.suffix not in (".py", ".pyc", ".md")}
    assert {"jaxllm/py.typed", "pallas_kernels/targets/h100.txtpb"} <= data
    return data


def test_wheel_contents(tmp_path: Path):
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for folder in ("jaxllm", "models", "pallas_kernels"):
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(tree),
    ]
    subprocess.run(command, check=True, capture_output=True)

    [wheel] = tmp_path.glob("jaxllm-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(source.path.relative_to(ROOT)) for source in product()}
    expected = {f"jaxllm/{name}" if name.startswith("models/") else name for name in expected}
    assert expected <= names
    assert data_files() <= names
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"jaxllm", "pallas_kernels"}
