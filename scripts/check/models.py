"""Run `jaxllm check` for the shapes of well-known models on several topologies, and keep its output.

Writes benchmarks/results/check/MODEL-TOPOLOGY-tpN[-QUANTIZATION][-ep].txt. Needs the compilers:
pip install 'jaxllm[check]'.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lib.shapes import HUB_IDS, MODELS

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "benchmarks" / "results" / "check"
CASES = (
    ("llama-3.2-1b", "v5e:1x1", 1),
    ("llama-3.3-70b", "v6e:2x4", 8),
    ("llama-3.3-70b", "v5e:2x2", 4),
    ("qwen3-8b", "v5e:1x1", 1),
    ("qwen3-8b", "v5e:1x1", 1, "int8"),
    ("qwen3-32b", "v6e:2x4", 8),
    ("qwen3-8b", "h100", 1),
    ("qwen3-8b", "v5e:2x2", 4),
    ("llama-3.2-1b", "v5e:2x2", 4),
    ("llama-3.3-70b", "tpu7x:2x2x1", 8),
    ("llama-3.2-1b", "h100", 1),
    ("qwen3-8b", "h100:2", 2),
    ("qwen3-32b", "v5p:2x2x1", 4),
    ("qwen3-32b", "h100", 1),
    ("llama-3.3-70b", "h100:4", 4),
    ("gpt-oss-20b", "h100", 1),
    ("qwen3-30b-a3b", "v6e:2x2", 4),
    ("gemma-4-26b", "v6e:2x2", 4),
    ("mixtral-8x7b", "v6e:2x4", 8),
    ("gpt-oss-20b", "v5e:2x2", 4),
    ("qwen3-30b-a3b", "v6e:1x1", 1, "int8"),
    ("gemma-4-26b", "h100", 1),
    ("qwen3-32b-awq", "v5e:2x2", 4, "awq"),
    ("qwen3-32b-awq", "h100", 1, "awq"),
    ("qwen3-32b-awq", "h100:2", 2, "awq"),
    ("minilm-l6", "v5e:1x1", 1),
    ("qwen3-embedding-0.6b", "h100", 1),
    ("qwen3.6-27b", "h100", 1),
    ("qwen3.6-27b", "v6e:2x2", 4),
    ("qwen3.6-35b-a3b", "v6e:2x2", 4),
    ("deepseek-v2-lite", "v5e:2x2", 4),
    ("deepseek-v2-lite", "h100", 1),
    ("deepseek-v3", "tpu7x:2x2x2", 16),
    ("deepseek-v3", "h200:8", 8),
    ("deepseek-v3", "v5p:2x4x4", 32, "--enable-expert-parallel"),
    ("deepseek-v3", "h100:32", 32, "--enable-expert-parallel"),
    ("deepseek-v3.2", "h200:8", 8),
    ("deepseek-v3.2", "tpu7x:2x2x2", 16),
    ("glm-5", "h200:8", 8),
    ("glm-5", "tpu7x:2x2x2", 16),
    ("kimi-linear-48b", "v6e:2x4", 8),
    ("kimi-linear-48b", "h100:2", 2),
    ("mimo-v2-flash", "v5p:2x2x4", 16),
    ("mimo-v2-flash", "h200:8", 8),
    ("hy3", "v5p:2x2x4", 16),
    ("hy3", "h200:8", 8),
    ("llama-3.1-405b", "v5p:2x2x4", 16),
    ("llama-3.1-405b", "v6e:4x8", 32),
    ("llama-3.1-405b", "h100:16", 16),
)
SHORT = {"--enable-expert-parallel": "ep"}
"""Flags, and their short names in file names; any other option of a case is its quantization."""


def main() -> int:
    """Check all cases, or the ones named; returns 1 if one was neither "fits" nor "does not fit"."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name holds this")
    chosen = parser.parse_args().only
    OUT.mkdir(parents=True, exist_ok=True)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for model, topology, num_devices, *option in CASES:
            # Some models are named after their quantization.
            suffixes = [SHORT.get(each, each) for each in option if not model.endswith(each)]
            name = "-".join([model, topology.replace(":", "-"), f"tp{num_devices}", *suffixes])
            if chosen in name:
                flags = [f"--quantization={each}" if each not in SHORT else each for each in option]
                failed |= not check(Path(folder), name, model, topology, num_devices, flags)
    return int(failed)


def check(folder: Path, name: str, model: str, topology: str, num_devices: int, flags: list[str]) -> bool:
    """Check one case; the model's folder is named as on the hub."""
    started = time.monotonic()
    (folder / HUB_IDS[model]).mkdir(parents=True, exist_ok=True)
    (folder / HUB_IDS[model] / "config.json").write_text(json.dumps(MODELS[model]))
    command = [sys.executable, "-m", "jaxllm.cli", "check", HUB_IDS[model], "--topology", topology]
    command += ["--tensor-parallel-size", str(num_devices), *flags]
    modules = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(modules)}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    print(f"{name}: status {done.returncode}, {time.monotonic() - started:.0f} s", flush=True)
    if done.returncode not in (0, 1) or not done.stdout:
        return False
    (OUT / f"{name}.txt").write_text(done.stdout)
    return True


if __name__ == "__main__":
    sys.exit(main())
