"""Making a pool: cleared for XLA, untouched for the CPU's kernel."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention import AttentionShape, PagedAttention

SHAPE = AttentionShape(4, 2, 64, 64, jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize(("implementation", "is_touched"), [("xla", True), ("cpu", False)])
def test_a_pool_on_a_cpu_takes_memory_as_it_fills(implementation: str, is_touched: bool) -> None:
    op = PagedAttention(SHAPE, implementation)
    spec = op.pool_spec(4, 2048)
    num_bytes = sum(x.size * x.dtype.itemsize for x in spec)
    program = jax.jit(lambda: op.make_pool(spec)).lower().compile()
    before = resident_bytes()
    pool = jax.block_until_ready(program())
    grown = resident_bytes() - before
    assert [(x.shape, x.dtype) for x in pool] == [(x.shape, x.dtype) for x in spec]
    assert type(pool) is type(spec)
    assert grown > 0.9 * num_bytes if is_touched else grown < 0.1 * num_bytes


def test_xla_gets_zeros() -> None:
    op = PagedAttention(SHAPE, "xla")
    assert not any(x.any() for x in op.make_pool(op.pool_spec(2, 3)))
