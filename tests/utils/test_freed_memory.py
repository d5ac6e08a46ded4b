"""Memory that was freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, psutil
from jaxllm.utils.freed_memory import give_back

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
process = psutil.Process()
pieces = [libc.malloc(64 << 10) for _ in range(2000)]
for each in pieces:
    ctypes.memset(each, 1, 64 << 10)
for each in pieces[:-1]:  # the last one keeps the heap's end where it is
    libc.free(each)
before = process.memory_info().rss
give_back()
print((before - process.memory_info().rss) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc's allocator can be asked")
def test_free_memory_inside_a_heap_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True)
    assert int(done.stdout) > 100
