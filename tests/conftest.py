"""Settings and fixtures of all tests: the CPU platform, caches inside the repository, paths of real models.

Environment variables are set before jax is first imported. Processes that tests start inherit them.
"""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import sys
from pathlib import Path

import hypothesis
import pytest
from fetch_models import MODELS, default_dir, is_present
from hypothesis.database import DirectoryBasedExampleDatabase

REPOSITORY = Path(__file__).resolve().parents[1]
CACHE = REPOSITORY / ".cache"
# Where scripts/test.sh puts the models: read before the next lines move jaxllm's cache, and kept for child processes.
MODEL_DIR = Path(os.environ.setdefault("TEST_MODELS", str(default_dir())))


def cpu_fingerprint() -> str:
    """Return an id of this machine's kind of CPU: programs compiled for another one must not be loaded."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return hashlib.sha256("\n".join([platform.machine(), *sorted(features)]).encode()).hexdigest()[:12]


# A shell lets what it runs in the background ignore Ctrl-C, which tests send to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAXLLM_CACHE"] = str(CACHE / "jaxllm")
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE / "jax" / cpu_fingerprint())
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

hypothesis.settings.register_profile(
    "jaxllm",
    deadline=None,  # a first example may compile
    print_blob=True,
    database=DirectoryBasedExampleDatabase(CACHE / "hypothesis"),
)
hypothesis.settings.load_profile("jaxllm")


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the repository's root."""
    return REPOSITORY


@pytest.fixture(scope="session")
def smollm2_path() -> str:
    """Return the path of SmolLM2-135M-Instruct as GGUF. Tests that need it fail without it."""
    model = MODELS["smollm2"]
    if not is_present(model, MODEL_DIR):
        pytest.fail(f"{model.name} is not in {MODEL_DIR}; run scripts/fetch_models.py smollm2")
    return str(MODEL_DIR / model.name)


@pytest.fixture(scope="session")
def gemma_path() -> str:
    """Return the path of Gemma 3 270M as GGUF. Tests that need it skip without it, but fail in CI."""
    model = MODELS["gemma"]
    if not is_present(model, MODEL_DIR):
        absent = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        absent(f"{model.name} is not in {MODEL_DIR}; run scripts/fetch_models.py gemma")
    return str(MODEL_DIR / model.name)


@pytest.fixture(scope="session")
def minilm_path() -> str:
    """Return the folder of all-MiniLM-L6-v2. Tests that need it fail without it."""
    model = MODELS["minilm"]
    if not is_present(model, MODEL_DIR):
        pytest.fail(f"{model.name} is not in {MODEL_DIR}; run scripts/fetch_models.py minilm")
    return str(MODEL_DIR / model.name)


@pytest.fixture(scope="session")
def whisper_path() -> str:
    """Return the folder of Whisper base. Tests that need it skip without it, but fail in CI."""
    model = MODELS["whisper"]
    if not is_present(model, MODEL_DIR):
        absent = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        absent(f"{model.name} is not in {MODEL_DIR}; run scripts/fetch_models.py whisper")
    return str(MODEL_DIR / model.name)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Fail the test after which torch is loaded: jaxllm never needs it at run time."""
    assert "torch" not in sys.modules, f"torch was imported during {item.nodeid}"
