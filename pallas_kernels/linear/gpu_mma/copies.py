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
        index, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(WARPGROUP_LANES, index))
        per_row, stride_bytes = row_bytes // _CHUNK, stride * row_bytes // columns
        for first in range(0, rows * per_row, WARPGROUP_LANES):
            chunk = arith.addi(thread, mgpu.c(first, index))
            row, rest = (divide(chunk, mgpu.c(per_row, index)) for divide in (arith.divui, arith.remui))
            offset = arith.addi(arith.muli(row, mgpu.c(stride_bytes, index)), arith.muli(rest, mgpu.c(_CHUNK, index)))
            source_ptr = mgpu.utils.getelementptr(from_bytes, [offset], byte)
            target_ptr = mgpu.utils.getelementptr(to_bytes, [arith.muli(chunk, mgpu.c(_CHUNK, index))], byte)
            # The neighbouring bytes of a row are copied next.
            text = f"cp.async.cg.shared.global.L2::128B [$0], [$1], {_CHUNK};"
            llvm.inline_asm(None, [target_ptr, source_ptr], text, "r,l,~{memory}", has_side_effects=True)

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
