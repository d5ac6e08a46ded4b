"""Asynchronous copies to shared memory as all GPUs from Ampere on have them: each thread copies 16 bytes at a time.

jax copies so on GPUs before Hopper only, and by TMA on later ones.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.fragmented_array import arith, ir, llvm, nvvm
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.common import WARPGROUP_LANES

_CHUNK = 16
"""The bytes that a thread copies at a time."""
_GLOBAL = 1
"""The number of global memory's address space."""


def copy_steps(num_bytes: int) -> list[tuple[int, int]]:
    """Return the first chunk of each step of a copy, and the number of threads that copy a chunk in it."""
    num_chunks = num_bytes // _CHUNK
    starts = range(0, num_chunks, WARPGROUP_LANES)
    return [(first, min(WARPGROUP_LANES, num_chunks - first)) for first in starts]


def start_copy(source: Any, target: Any) -> None:
    """Start the copy of a matrix to shared memory; rows of the source may lie apart."""
    rows, columns = target.shape
    row_bytes = columns * target.dtype.itemsize
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))

    @inline
    def copy(_: Any, source: Any, target: Any) -> None:
        (stride, _), _ = ir.MemRefType(source.type).get_strides_and_offset()
        from_bytes = llvm.addrspacecast(llvm.PointerType.get(address_space=_GLOBAL), mgpu.utils.memref_ptr(source))
        to_bytes = mgpu.utils.memref_ptr(target)
        i32, i8 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(WARPGROUP_LANES, i32))
        per_row, stride_bytes = row_bytes // _CHUNK, stride * row_bytes // columns
        for first, num_threads in copy_steps(rows * row_bytes):
            chunk = arith.addi(thread, mgpu.c(first, i32))
            row, rest = (divide(chunk, mgpu.c(per_row, i32)) for divide in (arith.divui, arith.remui))
            offset = arith.addi(arith.muli(row, mgpu.c(stride_bytes, i32)), arith.muli(rest, mgpu.c(_CHUNK, i32)))
            source_ptr = mgpu.utils.getelementptr(from_bytes, [offset], i8)
            target_ptr = mgpu.utils.getelementptr(to_bytes, [arith.muli(chunk, mgpu.c(_CHUNK, i32))], i8)
            # The neighbouring bytes of a row are copied next.
            text = f"cp.async.cg.shared.global.L2::128B [$0], [$1], {_CHUNK};"
            operands, constraints = [target_ptr, source_ptr], "r,l,~{memory}"
            if num_threads < WARPGROUP_LANES:
                copies = arith.cmpi(arith.CmpIPredicate.ult, thread, mgpu.c(num_threads, i32))
                operands, text, constraints = [*operands, copies], f"@$2 {text}", "r,l,b,~{memory}"
            llvm.inline_asm(None, operands, text, constraints, has_side_effects=True)

    copy(source, target)


def end_group() -> None:
    """Make the copies since the last call a group, which may be empty."""
    inline: Any = plgpu.inline_mgpu()

    @inline
    def commit(_: Any) -> None:
        nvvm.cp_async_commit_group()

    commit()


def wait_for_groups(num_pending: int) -> None:
    """Wait for all groups of this thread's copies but the last `num_pending`."""
    inline: Any = plgpu.inline_mgpu()

    @inline
    def wait(_: Any) -> None:
        nvvm.cp_async_wait_group(num_pending)

    wait()
