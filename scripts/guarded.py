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
    """What a check guards: files by pattern, and packages by the version that requirements.lock gives them."""

    files: tuple[str, ...]
    packages: tuple[str, ...]


KERNELS = (
    "pallas_kernels/causal_conv/*.py",
    "pallas_kernels/gated_delta/*.py",
    "pallas_kernels/grouped_matmul/*.py",
    "pallas_kernels/grouped_matmul/gpu/**/*.py",
    "pallas_kernels/grouped_matmul/tpu/**/*.py",
    "pallas_kernels/latent_attention/*.py",
    "pallas_kernels/paged_attention/*.py",
    "pallas_kernels/paged_attention/gpu/**/*.py",
    "pallas_kernels/paged_attention/tpu/**/*.py",
    "pallas_kernels/recurrent_state/*.py",
    "pallas_kernels/state_space/*.py",
)
"""Ops whose kernels of TPUs and GPUs are interpreted, without those of CPUs."""

CHECKS = {
    # Kernels in their interpreters, and in plain XLA.
    "kernels": Guarded(
        files=(*KERNELS, "scripts/workloads.py", "tests/pallas_kernels/*.py", "tests/scripts/test_workloads.py"),
        packages=("jax", "jaxlib", "ml_dtypes", "numpy"),
    ),
    # The same in the engine.
    "engine_kernels": Guarded(
        files=(
            *KERNELS,
            "jaxllm/execution/options.py",
            "jaxllm/execution/step.py",
            "models/layers/*.py",
            "models/loop.py",
            "models/model.py",
            "tests/e2e/test_kernels.py",
            "tests/e2e/kernel_runs.py",
            "tests/e2e/random_checkpoint.py",
        ),
        packages=("jax", "jaxlib", "ml_dtypes", "numpy"),
    ),
    # Kernels of CPUs that take long to check; those of attention always run.
    "cpu_kernels": Guarded(
        files=(
            "jaxllm/loading/gguf*.py",
            "jaxllm/loading/mapped_file.py",
            "pallas_kernels/**/*.py",
            "tests/pallas_kernels/*.py",
            "tests/utils/ownership.py",
        ),
        packages=("jax", "jaxlib", "llvmlite", "ml_dtypes", "numpy"),
    ),
    # Models by themselves, against HF's outputs and attention over held keys and values.
    "models": Guarded(
        files=(
            "jaxllm/loading/**/*.py",
            "models/**/*.py",
            "pallas_kernels/**/*.py",
            "tests/data/heads/**/*",
            "tests/data/pooling/**/*",
            "tests/data/quantized/**/*",
            "tests/data/tiny/**/*",
            "tests/models/*.py",
            "tests/quick.py",
        ),
        packages=("flax", "jax", "jaxlib", "llvmlite", "ml_dtypes", "numpy", "safetensors"),
    ),
    # What an engine makes of requests: parameters, grammars, drafts, adapters, company, preemption, aborts.
    "engine": Guarded(
        files=(
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
            "tests/conftest.py",
            "tests/constraints/*.py",
            "tests/data/adapters/**/*",
            "tests/data/pooling/**/*",
            "tests/data/schemas/**/*",
            "tests/data/tiny/**/*",
            "tests/e2e/adapter_data.py",
            "tests/e2e/inside.py",
            "tests/e2e/sampling_*.py",
            "tests/e2e/test_aborts.py",
            "tests/e2e/test_adapters.py",
            "tests/e2e/test_batch_invariance.py",
            "tests/e2e/test_beam_search.py",
            "tests/e2e/test_invariance.py",
            "tests/e2e/test_latents.py",
            "tests/e2e/test_pooling.py",
            "tests/e2e/test_sampling_fields.py",
            "tests/e2e/test_speculation.py",
            "tests/e2e/test_states.py",
            "tests/e2e/test_structured_outputs.py",
            "tests/e2e/tiny_*.py",
            "tests/engine/fake_core.py",
            "tests/engine/support.py",
            "tests/loading/files.py",
            "tests/models/pooled.py",
            "tests/models/running.py",
            "tests/models/tiny.py",
            "tests/quick.py",
            "tests/scheduling/simulation.py",
        ),
        packages=("flax", "jax", "jaxlib", "llguidance", "llvmlite", "ml_dtypes", "numpy", "safetensors", "tokenizers"),
    ),
    # More than SmolLM2 on one device: what the host does besides start-up and tokenizing is the same there.
    "device": Guarded(
        files=(
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
            "scripts/profile_step.py",
            "tests/data/goldens/*.json",
            "tests/data/heads/**/*",
            "tests/data/tiny/**/*",
            "tests/e2e/goldens.py",
            "tests/e2e/guessing.py",
            "tests/e2e/host_runs.py",
            "tests/e2e/inside.py",
            "tests/e2e/sampling_cases.py",
            "tests/e2e/tensor_parallel_runs.py",
            "tests/e2e/test_gemma3.py",
            "tests/e2e/test_hosts.py",
            "tests/e2e/test_quantization.py",
            "tests/e2e/test_smollm2.py",
            "tests/e2e/test_tensor_parallel.py",
            "tests/e2e/tiny_engine.py",
            "tests/e2e/tiny_tokenizer.py",
            "tests/execution/support.py",
            "tests/execution/test_step_program.py",
            "tests/loading/files.py",
            "tests/models/running.py",
            "tests/models/test_quantization.py",
            "tests/models/tiny.py",
            "tests/quick.py",
            "tests/scripts/test_profile_step.py",
        ),
        packages=("flax", "jax", "jaxlib", "llvmlite", "ml_dtypes", "numpy", "safetensors", "tokenizers"),
    ),
    # Every family in an engine, and draft heads: what is before and behind the engine is the same for all.
    "families": Guarded(
        files=(
            "jaxllm/config/resolve*.py",
            "jaxllm/engine/core/*.py",
            "jaxllm/execution/*.py",
            "jaxllm/loading/*.py",
            "jaxllm/sampling/*.py",
            "jaxllm/scheduling/*.py",
            "jaxllm/speculation/*.py",
            "models/**/*.py",
            "pallas_kernels/**/*.py",
            "tests/conftest.py",
            "tests/data/heads/**/*",
            "tests/data/tiny/**/*",
            "tests/e2e/guessing.py",
            "tests/e2e/inside.py",
            "tests/e2e/test_draft_heads.py",
            "tests/e2e/test_families.py",
            "tests/e2e/test_family_invariance.py",
            "tests/e2e/tiny_engine.py",
            "tests/models/heads.py",
            "tests/models/running.py",
            "tests/models/tiny.py",
            "tests/quick.py",
        ),
        packages=("flax", "jax", "jaxlib", "llvmlite", "ml_dtypes", "numpy", "safetensors"),
    ),
    "tpu_compiler": Guarded(
        files=(
            "pallas_kernels/grouped_matmul/*.py",
            "pallas_kernels/grouped_matmul/tpu/**/*.py",
            "pallas_kernels/latent_attention/*.py",
            "pallas_kernels/paged_attention/*.py",
            "pallas_kernels/paged_attention/tpu/**/*.py",
            "scripts/compile_tpu_grouped_matmul.py",
            "scripts/compile_tpu_kernels.py",
            "scripts/tpu_compiler.py",
            "scripts/tpu_listing.py",
            "scripts/lib.sh",
        ),
        packages=("jax", "jaxlib"),
    ),
    "goldens_notice": Guarded(
        files=(
            "tests/data/tiny/**/*",
            "tests/data/pooling/**/*",
            "tests/models/test_goldens_notice.py",
            "tests/models/test_pooling_goldens.py",
            "tests/models/pooled.py",
            "tests/models/tiny.py",
        ),
        packages=(),
    ),
}


def digest(guarded: Guarded, root: Path = ROOT) -> str:
    """Return the digest of the files that a check guards and of its packages' versions."""
    total = hashlib.sha256()
    for pattern in guarded.files:
        paths = sorted(path for path in root.glob(pattern) if path.is_file())
        if not paths:
            raise FileNotFoundError(f"{pattern} matches no file under {root}")
        for path in paths:
            total.update(f"{path.relative_to(root).as_posix()}\n".encode() + content(path) + b"\n")
    lock = (root / "requirements.lock").read_text()
    for package in guarded.packages:
        pin = re.search(rf"(?mi)^{re.escape(package)}==\S+$", lock)
        if pin is None:
            raise LookupError(f"requirements.lock does not pin {package}")
        total.update(pin.group().encode() + b"\n")
    return total.hexdigest()


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
    return read_record(root).get(check) != digest(CHECKS[check], root)


def record(check: str, root: Path = ROOT) -> None:
    """Keep that a check passed on the sources as they are."""
    passed = read_record(root) | {check: digest(CHECKS[check], root)}
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
