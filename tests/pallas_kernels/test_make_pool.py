"""A pool is made cleared for XLA, and untouched for the CPU's kernel."""

import ctypes
import json
import mmap
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention import AttentionShape, PagedAttention

SHAPE = AttentionShape(4, 2, 64, 64, jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16))


def resident_part(array: jax.Array) -> float:
    """Return how much of an array lies in pages that hold memory, by what the operating system says of these pages."""
    start = array.unsafe_buffer_pointer()
    begin, end = start // mmap.PAGESIZE * mmap.PAGESIZE, start + array.nbytes
    pages = (ctypes.c_ubyte * -(-(end - begin) // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), pages) == 0
    return sum(page & 1 for page in pages) / len(pages)


def resident_parts(implementation: str) -> list[float]:
    """Return how much of each array of a new pool holds memory."""
    op = PagedAttention(SHAPE, implementation)
    spec = op.pool_spec(4, 2048)
    pool = jax.block_until_ready(jax.jit(lambda: op.make_pool(spec))())
    assert [(x.shape, x.dtype) for x in pool] == [(x.shape, x.dtype) for x in spec]
    assert type(pool) is type(spec)
    return [resident_part(array) for array in pool]


@pytest.mark.skipif(sys.platform != "linux", reason="needs mincore")
@pytest.mark.parametrize(("implementation", "is_touched"), [("xla", True), ("cpu", False)])
def test_a_pool_on_a_cpu_takes_memory_as_it_fills(implementation: str, is_touched: bool, repository: Path) -> None:
    """In a process of its own: where much was allocated before, new memory may be what others have given back."""
    code = (
        "import sys; from tests.pallas_kernels.test_make_pool import resident_parts; print(resident_parts(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, implementation], cwd=repository, capture_output=True, text=True, check=True
    )
    parts = json.loads(done.stdout)
    assert len(parts) == 2
    assert all(part > 0.9 if is_touched else part < 0.1 for part in parts), parts


def test_xla_gets_zeros() -> None:
    op = PagedAttention(SHAPE, "xla")
    assert not any(x.any() for x in op.make_pool(op.pool_spec(2, 3)))
