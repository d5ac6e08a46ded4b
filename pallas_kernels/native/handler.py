"""XLA calls a handler of its foreign function interface (xla/ffi/api/c_api.h) around a kernel.

A kernel is two functions of the addresses of its buffers and of their dimensions:

    i64 prepare(ptr buffers, ptr dims)          does what must come first; returns how many units of work there are
    void run(ptr buffers, ptr dims, i64 unit)   does one; units may run at the same time, in any order

and optionally a third, which the calling thread calls after all units are done:

    void finish(ptr buffers, ptr dims)

Buffer i, of arguments and then of results, is at buffers[i], its dimensions (int64) at dims[i]. `prepare` may leave an
address for `run` and `finish` in the entry behind the last buffer's. The calling thread and idle threads of XLA's pool
take the units one by one, so that no thread waits for one that has not begun.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from . import processor
from .emitter import I32, I64, NULL, POINTER, VOID, Emitter

_MAX_BUFFERS = 25
"""The number of addresses that there is room for: those of a call's buffers, and the one that `prepare` leaves."""
VERSION = (0, 1)
"""The interface's version; nothing newer is used."""
_MAX_PAUSES = 2048
"""How often a thread checks whether the others are done before it offers its core: for 50 to 100 us."""
METADATA = 1
"""The type of the extension by which XLA asks for the version."""


class Fields:
    """Byte offsets in the interface's structs, which only ever grow at their ends."""

    # XLA_FFI_CallFrame
    EXTENSION, API, CONTEXT, ARGS, RETS = 8, 16, 24, 40, 80
    # XLA_FFI_Args, XLA_FFI_Rets
    COUNT, BUFFERS = 16, 32
    # XLA_FFI_Buffer
    DATA, DIMS = 24, 40
    # XLA_FFI_InternalExtension, XLA_FFI_Metadata_Extension; XLA_FFI_Metadata with XLA_FFI_Api_Version in it
    EXTENSION_TYPE, METADATA, MAJOR, MINOR = 8, 24, 24, 28
    # XLA_FFI_Api: after its version, 4 * 8 + 16 bytes in, a pointer per function
    SCHEDULE, NUM_THREADS = 48 + 11 * 8, 48 + 12 * 8
    # XLA_FFI_ThreadPool_Schedule_Args, XLA_FFI_ThreadPool_NumThreads_Args: size, extension, then
    POOL_CONTEXT, TASK, TASK_DATA, THREADS = 16, 24, 32, 24
    SCHEDULE_SIZE, NUM_THREADS_SIZE = 40, 32


class _Job:
    """Byte offsets in the memory that threads share during a call; the last thread that leaves frees it."""

    NEXT, COUNT, DONE, USERS, BUFFERS, DIMS, SIZE = 0, 8, 64, 128, 136, 144, 192


def add_handler(
    module: ir.Module, name: str, prepare: ir.Function, run: ir.Function, finish: ir.Function | None = None
) -> None:
    """Define the function `name` that XLA calls."""
    take = _add_take(module, f"{name}.take", run)
    function = ir.Function(module, ir.FunctionType(POINTER, [POINTER]), name)
    e, frame = Emitter(function), function.args[0]
    byte = ir.IntType(8)

    def field(base: Any, offset: int, kind: ir.Type = POINTER) -> Any:
        return e.ir.load(e.at(base, byte, offset), typ=kind)

    extension = field(frame, Fields.EXTENSION)
    with e.ir.if_then(e.ir.icmp_unsigned("!=", extension, NULL)):
        is_metadata = e.ir.icmp_signed("==", field(extension, Fields.EXTENSION_TYPE, I32), I32(METADATA))
        with e.ir.if_then(is_metadata):
            metadata = field(extension, Fields.METADATA)
            for offset, number in zip((Fields.MAJOR, Fields.MINOR), VERSION, strict=True):
                e.ir.store(I32(number), e.at(metadata, byte, offset))
            e.ir.ret(NULL)

    buffers, dims = (e.array(POINTER, _MAX_BUFFERS) for _ in range(2))
    buffer_index = e.variable(I64, I64(0))
    for offset in (Fields.ARGS, Fields.RETS):
        group = e.at(frame, byte, offset)
        count, group_buffers = field(group, Fields.COUNT, I64), field(group, Fields.BUFFERS)
        with e.range(0, count) as index:
            buffer = e.load(group_buffers, POINTER, index)
            e.store(field(buffer, Fields.DATA), buffers, buffer_index.value)
            e.store(field(buffer, Fields.DIMS), dims, buffer_index.value)
            buffer_index.value = e.sum(buffer_index.value, 1)

    def end() -> None:
        if finish:
            e.ir.call(finish, [buffers, dims])
        e.ir.ret(NULL)

    units = e.ir.call(prepare, [buffers, dims])
    with e.ir.if_then(e.ir.icmp_signed("<=", units, I64(1))):
        with e.range(0, units) as unit:
            e.ir.call(run, [buffers, dims, unit])
        end()

    api, context = field(frame, Fields.API), field(frame, Fields.CONTEXT)
    function_pointer = ir.FunctionType(POINTER, [POINTER]).as_pointer()

    def call(function_offset: int, size: int, fields: dict[int, Any]) -> None:
        """Call a function of the interface. An error leaves the work to this thread."""
        struct = e.array(I64, size // 8)
        for offset, value in {0: I64(size), 8: NULL, **fields}.items():
            e.ir.store(value, e.at(struct, byte, offset))
        e.ir.call(field(api, function_offset, function_pointer), [struct])

    threads = e.array(I64, 1)
    e.ir.store(I64(1), threads)
    call(Fields.NUM_THREADS, Fields.NUM_THREADS_SIZE, {Fields.POOL_CONTEXT: context, Fields.THREADS: threads})
    helpers = e.ir.sub(e.least(e.ir.load(threads, typ=I64), units), I64(1))
    job = e.ir.call(libc(module, "malloc", POINTER, [I64]), [I64(_Job.SIZE)])
    fields = {
        _Job.NEXT: I64(0),
        _Job.COUNT: units,
        _Job.DONE: I64(0),
        # Each helper, this thread taking units, and this thread waiting for the last.
        _Job.USERS: e.sum(helpers, 2),
        _Job.BUFFERS: buffers,
        _Job.DIMS: dims,
    }
    for offset, value in fields.items():
        e.ir.store(value, e.at(job, byte, offset))
    e.ir.fence("release")
    with e.range(0, helpers):
        task = {Fields.POOL_CONTEXT: context, Fields.TASK: take, Fields.TASK_DATA: job}
        call(Fields.SCHEDULE, Fields.SCHEDULE_SIZE, task)
    e.ir.call(take, [job])
    wait(e, e.at(job, byte, _Job.DONE), units)
    _leave(e, module, job)
    end()


def wait(e: Emitter, count: Any, wanted: Any) -> None:
    """Wait until a count of units that other threads have taken or done reaches `wanted`.

    That takes about as long as one unit. A thread that was put to sleep with its unit may need this very core, so after
    a while the core is offered.
    """
    turns = e.variable(I64, I64(0))
    test, pause, after = (e.function.append_basic_block() for _ in range(3))
    e.ir.branch(test)
    e.ir.position_at_end(test)
    value = e.ir.load_atomic(count, "acquire", 8, typ=I64)
    e.ir.cbranch(e.ir.icmp_signed("<", value, wanted), pause, after)
    e.ir.position_at_end(pause)
    if processor.current().is_aarch64:
        e.call_named("llvm.aarch64.hint", I32(1), result=VOID)
    elif processor.current().is_x86:
        e.call_named("llvm.x86.sse2.pause", result=VOID)
    turns.value = e.sum(turns.value, 1)
    with e.ir.if_then(e.ir.icmp_signed(">", turns.value, I64(_MAX_PAUSES))):
        e.ir.call(libc(e.module, "sched_yield", I32, []), [])
    e.ir.branch(test)
    e.ir.position_at_end(after)


def _add_take(module: ir.Module, name: str, run: ir.Function) -> ir.Function:
    """Define the task of a thread: take units until none is left."""
    function = ir.Function(module, ir.FunctionType(VOID, [POINTER]), name)
    e, job = Emitter(function), function.args[0]
    byte = ir.IntType(8)
    units = e.ir.load(e.at(job, byte, _Job.COUNT), typ=I64)
    take, work, after = (function.append_basic_block() for _ in range(3))
    e.ir.branch(take)
    e.ir.position_at_end(take)
    unit = e.ir.atomic_rmw("add", e.at(job, byte, _Job.NEXT), I64(1), "monotonic")
    e.ir.cbranch(e.ir.icmp_signed("<", unit, units), work, after)
    e.ir.position_at_end(work)
    # Only now: a task that begins after all units are taken may outlive the call.
    buffers, dims = (e.ir.load(e.at(job, byte, offset), typ=POINTER) for offset in (_Job.BUFFERS, _Job.DIMS))
    e.ir.call(run, [buffers, dims, unit])
    e.ir.atomic_rmw("add", e.at(job, byte, _Job.DONE), I64(1), "release")
    e.ir.branch(take)
    e.ir.position_at_end(after)
    _leave(e, module, job)
    e.ir.ret_void()
    return function


def _leave(e: Emitter, module: ir.Module, job: Any) -> None:
    users = e.ir.atomic_rmw("sub", e.at(job, ir.IntType(8), _Job.USERS), I64(1), "acq_rel")
    with e.ir.if_then(e.ir.icmp_signed("==", users, I64(1))):
        e.ir.call(libc(module, "free", VOID, [POINTER]), [job])


def libc(module: ir.Module, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Function:
    """Return a function of C's library, declared once in the module."""
    function = module.globals.get(name)
    return function if function is not None else ir.Function(module, ir.FunctionType(result, arguments), name)
