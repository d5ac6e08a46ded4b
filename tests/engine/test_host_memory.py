"""C's allocator keeps what a step frees."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from jaxllm.engine.core.host_memory import keep_freed_memory

PROGRAM = """
import resource
import jax, jax.numpy as jnp
from jaxllm.engine.core.host_memory import keep_freed_memory

x = jnp.ones((2560 * 256, 16))
step = jax.jit(lambda x: jnp.sort(x, axis=-1).sum())

def num_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step(x).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

num_faults()
before, kept = num_faults(), keep_freed_memory()
num_faults(), num_faults()  # each of XLA's threads has a heap of its own
print(before, kept, num_faults())
"""


@pytest.mark.engine
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's")
def test_a_step_takes_no_new_pages() -> None:
    environment = {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    before, kept, after = done.stdout.split()
    assert kept == "True"
    assert int(before) > 5 * 10_000, "40 MiB in pages of 4 KiB"
    assert int(after) < int(before) / 2


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "65536")
    assert not keep_freed_memory()
