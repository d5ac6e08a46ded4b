"""A pool is made cleared for XLA, and untouched for the CPU's kernel."""

import ast
import ctypes
import mmap
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.latent_attention import LatentAttention, LatentShape
from pallas_kernels.paged_attention import AttentionShape, PagedAttention

pytestmark = pytest.mark.cpu_kernels

SHAPE = AttentionShape(4, 2, 64, 64, jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16))
LATENT_SHAPE = LatentShape(4, 96, 32, 64, jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16))
"""A shape with a pool array as large as each of the two of the other shape."""


def resident_part(array: jax.Array) -> float:
    """Return the part of an array's pages that hold memory, as the operating system reports them."""
    start = array.unsafe_buffer_pointer()
    begin, end = start // mmap.PAGESIZE * mmap.PAGESIZE, start + array.nbytes
    pages = (ctypes.c_ubyte * -(-(end - begin) // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), pages) == 0
    return sum(page & 1 for page in pages) / len(pages)


def resident_parts(implementation: str) -> list[float]:
    """Return the part of each array of a new pool that holds memory."""
    op = PagedAttention(SHAPE, implementation)
    spec = op.pool_spec(4, 2048)
    pool = jax.block_until_ready(jax.jit(lambda: op.make_pool(spec))())
    assert [(x.shape, x.dtype) for x in pool] == [(x.shape, x.dtype) for x in spec]
    assert type(pool) is type(spec)
    return [resident_part(array) for array in pool]


def pools_of_huge_pages(num_blocks: str) -> list[bool]:
    """Return for each array of new pools whether the system is to use huge pages: keys, values and latents."""
    answers = []
    for op in (PagedAttention(SHAPE, "cpu"), LatentAttention(LATENT_SHAPE, "cpu")):
        pool = jax.jit(lambda op=op: op.make_pool(op.pool_spec(4, int(num_blocks))))()
        op.settle_pool(pool, 4)
        answers += [wants_huge_pages(array) for array in pool]
    return answers


def wants_huge_pages(array: jax.Array) -> bool:
    """Return whether the system was asked for huge pages in the middle of an array."""
    middle, here = array.unsafe_buffer_pointer() + array.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(match[1], 16) <= middle < int(match[2], 16)
        if here and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("nothing is mapped there")


def in_new_process(function: str, argument: str, repository: Path) -> list[Any]:
    """Call a function of this module in a new process, where no freed memory is used again."""
    code = f"import sys, tests.pallas_kernels.test_make_pool as own; print(own.{function}(sys.argv[1]))"
    command = [sys.executable, "-c", code, argument]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    return ast.literal_eval(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="needs mincore")
@pytest.mark.parametrize(("implementation", "is_touched"), [("xla", True), ("cpu", False)])
def test_a_pool_on_a_cpu_takes_memory_as_it_fills(implementation: str, is_touched: bool, repository: Path) -> None:
    parts = in_new_process("resident_parts", implementation, repository)
    assert len(parts) == 2
    assert all(part > 0.9 if is_touched else part < 0.1 for part in parts), parts


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
@pytest.mark.parametrize(("num_blocks", "is_large"), [("2048", True), ("256", False)])
def test_a_large_pool_gets_huge_pages(num_blocks: str, is_large: bool, repository: Path) -> None:
    """A small pool would take more memory than it fills."""
    assert in_new_process("pools_of_huge_pages", num_blocks, repository) == [is_large] * 3


def test_xla_gets_zeros() -> None:
    op = PagedAttention(SHAPE, "xla")
    assert not any(x.any() for x in op.make_pool(op.pool_spec(2, 3)))
