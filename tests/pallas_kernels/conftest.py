"""What the tests of the kernels need of the process that they run in."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _enough_threads(request: pytest.FixtureRequest) -> None:
    """The interpreter of GPU kernels blocks a thread of XLA's pool per warpgroup: with too few it waits for ever."""
    num_threads = int(os.environ.get("NPROC") or os.cpu_count() or 1)
    if request.path.name.startswith("test_gpu_") and num_threads < 8:
        pytest.fail("set NPROC=8 in the environment, as scripts/test.sh does")
