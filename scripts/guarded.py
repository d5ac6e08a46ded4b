#!/usr/bin/env python3
"""Say whether what a slow check guards has changed since the check last passed.

    scripts/guarded.py changed CHECK    exits with 0 if CHECK has to run, with 1 if it has passed on the same sources
    scripts/guarded.py record CHECK     keeps in tests/guarded.json that CHECK passed on the sources as they are

`scripts/test.sh` runs a slow check only when it has to, and records it when it passes: commit tests/guarded.json with
the change; `scripts/test.sh --all` runs every check. Python files count by syntax, without comments and docstrings.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Guarded:
    """What a check guards besides its tests: files by pattern, and packages by their version in requirements.lock."""

    sources: tuple[str, ...]
    packages: tuple[str, ...]


KERNELS = (
    "pallas_kernels/*.py",
    "pallas_kernels/[!n]*/*.py",  # all but native, which is of CPUs alone
    "pallas_kernels/recurrent_state/*_*/*.py",
    "pallas_kernels/*/gpu/**/*.py",
    "pallas_kernels/*/tpu/**/*.py",
)
"""Ops and their kernels of TPUs and GPUs, which are interpreted, without those of CPUs."""

CHECKS = {
    # Kernels in their interpreters, and in plain XLA.
    "kernels": Guarded(
        sources=(*KERNELS, "scripts/lib/workloads.py"),
        packages=("jax", "jaxlib", "ml_dtypes", "numpy"),
    ),
    # The same in the engine.
    "engine_kernels": Guarded(
        sources=(
            *KERNELS,
            "jaxllm/execution/options.py",
            "jaxllm/execution/step.py",
            "models/layers/*.py",
            "models/loop.py",
            "models/model.py",
        ),
        packages=("jax", "jaxlib", "ml_dtypes", "numpy"),
    ),
    # Kernels of CPUs.
    "cpu_kernels": Guarded(
        sources=("jaxllm/loading/gguf*.py", "jaxllm/loading/mapped_file.py", "pallas_kernels/**/*.py"),
        packages=("jax", "jaxlib", "llvmlite", "ml_dtypes", "numpy"),
    ),
    # Models by themselves, against HF's outputs and attention over held keys and values.
    "models": Guarded(
        sources=(
            "jaxllm/loading/**/*.py",
            "models/**/*.py",
            "pallas_kernels/**/*.py",
            "tests/data/heads/**/*",
            "tests/data/pooling/**/*",
            "tests/data/quantized/**/*",
            "tests/data/tiny/**/*",
        ),
        packages=("flax", "jax", "jaxlib", "llvmlite", "ml_dtypes", "numpy", "safetensors"),
    ),
    # Checkpoints as they are loaded: how much memory that takes, and what the formats' own tools wrote.
    "loading": Guarded(
        sources=(
            "jaxllm/config/*.py",
            "jaxllm/loading/**/*.py",
            "models/**/*.py",
            "pallas_kernels/**/*.py",
            "tests/data/quantized/**/*",
            "tests/data/tiny/**/*",
        ),
        packages=("flax", "jax", "jaxlib", "llvmlite", "ml_dtypes", "numpy", "safetensors", "transformers"),
    ),
    # What is drawn from logits, and the log-probabilities that are told.
    "sampling": Guarded(
        sources=("jaxllm/params/*.py", "jaxllm/sampling/*.py"),
        packages=("jax", "jaxlib", "numpy"),
    ),
    # Malformed outputs by the ten thousand.
    "parsers": Guarded(sources=("jaxllm/parsers/**/*.py",), packages=()),
    # Whole servers, engines in processes of their own, and loads upon them.
    "server": Guarded(
        sources=(
            "jaxllm/*.py",
            "jaxllm/cli/**/*.py",
            "jaxllm/config/*.py",
            "jaxllm/constraints/**/*.py",
            "jaxllm/engine/**/*.py",
            "jaxllm/entrypoints/**/*.py",
            "jaxllm/execution/*.py",
            "jaxllm/params/*.py",
            "jaxllm/parsers/**/*.py",
            "jaxllm/scheduling/*.py",
            "jaxllm/server/**/*",
            "jaxllm/text/*.py",
            "jaxllm/utils/*.py",
            "scripts/lib/front_end.py",
            "scripts/lib/servers.py",
            "scripts/check/soaking/*.py",
            "scripts/check/soak*.py",
            "tests/data/adapters/**/*",
            "tests/data/tiny/**/*",
        ),
        packages=(
            "fastapi",
            "grpcio",
            "jax",
            "jaxlib",
            "msgspec",
            "prometheus_client",
            "pydantic",
            "pyzmq",
            "starlette",
            "uvicorn",
            "uvloop",
        ),
    ),
    # What an engine makes of requests: parameters, grammars, drafts, adapters, company, preemption, aborts.
    "engine": Guarded(
        sources=(
            "jaxllm/*.py",
            "jaxllm/config/*.py",
            "jaxllm/constraints/**/*.py",
            "jaxllm/engine/**/*.py",
            "jaxllm/execution/*.py",
            "jaxllm/loading/**/*.py",
            "jaxllm/lora/*.py",
            "jaxllm/params/*.py",
            "jaxllm/sampling/*.py",
            "jaxllm/scheduling/*.py",
            "jaxllm/speculation/*.py",
            "jaxllm/text/*.py",
            "jaxllm/utils/*.py",
            "models/**/*.py",
            "pallas_kernels/**/*.py",
            "tests/data/adapters/**/*",
            "tests/data/pooling/**/*",
            "tests/data/schemas/**/*",
            "tests/data/tiny/**/*",
        ),
        packages=("flax", "jax", "jaxlib", "llguidance", "llvmlite", "ml_dtypes", "numpy", "safetensors", "tokenizers"),
    ),
    # More than SmolLM2 on one device: what the host does besides start-up and tokenizing is the same there.
    "device": Guarded(
        sources=(
            "jaxllm/config/resolve.py",
            "jaxllm/engine/core/kv_cache_size.py",
            "jaxllm/engine/core/startup.py",
            "jaxllm/engine/core/follower.py",
            "jaxllm/engine/hosts/*.py",
            "jaxllm/execution/*.py",
            "jaxllm/loading/*.py",
            "jaxllm/sampling/*.py",
            "jaxllm/text/tokenizer*.py",
            "models/*.py",
            "models/families/deepseek.py",
            "models/families/eagle3.py",
            "models/families/gemma*.py",
            "models/families/gpt_oss.py",
            "models/families/llama.py",
            "models/families/mtp.py",
            "models/families/qwen_moe.py",
            "models/layers/*.py",
            "pallas_kernels/**/*.py",
            "scripts/bench/step.py",
            "tests/data/goldens/*.json",
            "tests/data/heads/**/*",
            "tests/data/tiny/**/*",
        ),
        packages=("flax", "jax", "jaxlib", "llvmlite", "ml_dtypes", "numpy", "safetensors", "tokenizers"),
    ),
    # Every family in an engine, and draft heads: what is before and behind the engine is the same for all.
    "families": Guarded(
        sources=(
            "jaxllm/config/resolve*.py",
            "jaxllm/engine/core/*.py",
            "jaxllm/execution/*.py",
            "jaxllm/loading/*.py",
            "jaxllm/sampling/*.py",
            "jaxllm/scheduling/*.py",
            "jaxllm/speculation/*.py",
            "models/**/*.py",
            "pallas_kernels/**/*.py",
            "tests/data/configs/**/*",
            "tests/data/heads/**/*",
            "tests/data/tiny/**/*",
        ),
        packages=("flax", "jax", "jaxlib", "llvmlite", "ml_dtypes", "numpy", "safetensors"),
    ),
    "tpu_compiler": Guarded(
        sources=(
            "pallas_kernels/[!n]*/*.py",
            "pallas_kernels/*/tpu/**/*.py",
            "scripts/compile/tpu_grouped_matmul.py",
            "scripts/compile/tpu_kernels.py",
            "scripts/compile/tpu_compiler.py",
            "scripts/compile/tpu_listing.py",
            "scripts/lib.sh",
        ),
        packages=("jax", "jaxlib"),
    ),
    "goldens_notice": Guarded(sources=("tests/data/tiny/**/*", "tests/data/pooling/**/*"), packages=()),
}


def digest(check: str, root: Path = ROOT) -> str:
    """Return the digest of the files that a check guards and of its packages' versions."""
    total = hashlib.sha256()
    for path in sorted(files(check, root)):
        total.update(f"{path.relative_to(root).as_posix()}\n".encode() + content(path) + b"\n")
    lock = (root / "requirements.lock").read_text()
    for package in CHECKS[check].packages:
        pin = re.search(rf"(?mi)^{re.escape(package)}==\S+$", lock)
        if pin is None:
            raise LookupError(f"requirements.lock does not pin {package}")
        total.update(pin.group().encode() + b"\n")
    return total.hexdigest()


def files(check: str, root: Path = ROOT) -> set[Path]:
    """Return the files that a check guards: those of its tests, and its sources."""
    found = files_of_tests(check, root)
    for pattern in CHECKS[check].sources:
        sources = {path for path in root.glob(pattern) if path.is_file() and "__pycache__" not in path.parts}
        if not sources:
            raise FileNotFoundError(f"{pattern} matches no file under {root}")
        found |= sources
    return found


def files_of_tests(check: str, root: Path) -> set[Path]:
    """Return the files of the tests that are marked with a check's name, and all files of tests that they need."""
    mark = re.compile(rf"\bpytest\.mark\.{check}\b")
    found: set[Path] = set()
    waiting = [path for path in root.glob("tests/**/*.py") if mark.search(path.read_text())]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            modules = (root.joinpath(*name.split(".")).with_suffix(".py") for name in named_modules(path))
            conftests = (folder / "conftest.py" for folder in path.relative_to(root).parents[:-1])
            waiting += [each for each in (*modules, *(root / each for each in conftests)) if each.is_file()]
    return found


def named_modules(path: Path) -> set[str]:
    """Return the modules of tests that a file imports or names in a string, as it does to run them as programs."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=imported):
                names |= {each.name for each in imported}
            case ast.ImportFrom(module=str(module), names=imported):
                names |= {module, *(f"{module}.{each.name}" for each in imported)}
            case ast.Constant(value=str(text)):
                names.add(text)
    return {name for name in names if re.fullmatch(r"tests(\.\w+)+", name)}


def content(path: Path) -> bytes:
    """Return a file's bytes; of a Python file its syntax tree, without docstrings and comments."""
    if path.suffix != ".py":
        return path.read_bytes()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [each for each in node.body if not is_string(each)]
    return ast.dump(tree).encode()


def is_string(node: ast.stmt) -> bool:
    """Say whether a statement is a string by itself: a docstring of a module, class, function or attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def read_record(root: Path = ROOT) -> dict[str, str]:
    """Return each check's digest when it last passed."""
    path = root / "tests" / "guarded.json"
    return json.loads(path.read_text()) if path.exists() else {}


def has_changed(check: str, root: Path = ROOT) -> bool:
    """Say whether a check has to run."""
    return read_record(root).get(check) != digest(check, root)


def record(check: str, root: Path = ROOT) -> None:
    """Keep that a check passed on the sources as they are."""
    passed = read_record(root) | {check: digest(check, root)}
    (root / "tests" / "guarded.json").write_text(json.dumps(passed, indent=2, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["changed", "record"])
    parser.add_argument("check", choices=sorted(CHECKS))
    arguments = parser.parse_args()
    if arguments.action == "record":
        record(arguments.check)
        return 0
    return 0 if has_changed(arguments.check) else 1


if __name__ == "__main__":
    sys.exit(main())
