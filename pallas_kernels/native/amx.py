"""The matrix unit of a processor with AMX: registers of 16 rows of 64 bytes, and an instruction to multiply them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .emitter import CACHE_LINE, I8, I16, VOID, Emitter

SIDE = 16
"""The number of rows of a register, of 64 bytes each; and the number of columns of sums."""
STEP = 32
"""The number of bfloat16 of a row that are multiplied at a time."""
MATRIX_BYTES = SIDE * CACHE_LINE
NUM_REGISTERS = 8
_CONFIG_BYTES, _WIDTHS_AT, _HEIGHTS_AT = 64, 16, 48
"""The size of the configuration in bytes, and the offsets of the registers' row lengths (in bytes) and of their numbers
of rows."""


def configure(e: Emitter, sizes: Sequence[tuple[Any, Any]]) -> None:
    """Configure the registers: the number of rows of each, and the bytes of a row."""
    config = e.array(I8, _CONFIG_BYTES)
    e.clear(config, _CONFIG_BYTES)
    e.store(I8(1), config, 0)
    for register, (height, width) in enumerate(sizes):
        e.ir.store(I16(width) if isinstance(width, int) else width, e.at(config, I8, _WIDTHS_AT + 2 * register))
        e.store(I8(height) if isinstance(height, int) else height, config, _HEIGHTS_AT + register)
    e.call_named("llvm.x86.ldtilecfg", config, result=VOID)


def release(e: Emitter) -> None:
    """Release the registers, so that the system need not save them."""
    e.call_named("llvm.x86.tilerelease", result=VOID)


def clear(e: Emitter, register: int) -> None:
    """Set a register to zeros."""
    _call(e, "tilezero", register)


def load(e: Emitter, register: int, base: Any, stride: Any) -> None:
    """Load rows that lie `stride` bytes apart."""
    _call(e, "tileloadd64", register, base, e.i64(stride))


def store(e: Emitter, register: int, base: Any, stride: Any) -> None:
    """Store rows `stride` bytes apart."""
    _call(e, "tilestored64", register, base, e.i64(stride))


def multiply(e: Emitter, sums: int, rows: int, pairs: int) -> None:
    """Add the products of rows of bfloat16 and of columns that lie in pairs: a row has one pair of each column."""
    _call(e, "tdpbf16ps", sums, I8(rows), I8(pairs))


def _call(e: Emitter, name: str, register: int, *arguments: Any) -> None:
    e.call_named(f"llvm.x86.{name}", I8(register), *arguments, result=VOID)
