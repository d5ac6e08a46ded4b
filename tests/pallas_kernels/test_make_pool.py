"""A pool is made cleared for XLA, and untouched for the CPU's kernel."""

import ctypes
import mmap
import sys

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


@pytest.mark.skipif(sys.platform != "linux", reason="needs mincore")
@pytest.mark.parametrize(("implementation", "is_touched"), [("xla", True), ("cpu", False)])
def test_a_pool_on_a_cpu_takes_memory_as_it_fills(implementation: str, is_touched: bool) -> None:
    op = PagedAttention(SHAPE, implementation)
    spec = op.pool_spec(4, 2048)
    pool = jax.block_until_ready(jax.jit(lambda: op.make_pool(spec))())
    assert [(x.shape, x.dtype) for x in pool] == [(x.shape, x.dtype) for x in spec]
    assert type(pool) is type(spec)
    for array in pool:
        assert resident_part(array) > 0.9 if is_touched else resident_part(array) < 0.1


def test_xla_gets_zeros() -> None:
    op = PagedAttention(SHAPE, "xla")
    assert not any(x.any() for x in op.make_pool(op.pool_spec(2, 3)))
