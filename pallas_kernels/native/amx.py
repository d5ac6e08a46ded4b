"""The matrix unit of a processor with AMX: registers of 16 rows of 64 bytes, and an instruction to multiply them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .emitter import CACHE_LINE, I8, I16, VOID, Emitter

SIDE = 16
"""How many rows a register holds, of 64 bytes each; and as many columns of sums."""
STEP = 32
"""How many bfloat16 of a row are multiplied at a time."""
MATRIX_BYTES = SIDE * CACHE_LINE
NUM_REGISTERS = 8
CONFIG_BYTES, WIDTHS_AT, HEIGHTS_AT = 64, 16, 48
"""How many bytes say what registers are, and from which on they say how many bytes a row has, and how many rows."""


def configure(e: Emitter, sizes: Sequence[tuple[Any, Any]]) -> None:
    """Tell the processor how many rows, and bytes of each, the registers have."""
    config = e.array(I8, CONFIG_BYTES)
    e.clear(config, CONFIG_BYTES)
    e.store(I8(1), config, 0)
    for register, (height, width) in enumerate(sizes):
        e.ir.store(I16(width) if isinstance(width, int) else width, e.at(config, I8, WIDTHS_AT + 2 * register))
        e.store(I8(height) if isinstance(height, int) else height, config, HEIGHTS_AT + register)
    e.call_named("llvm.x86.ldtilecfg", config, result=VOID)


def release(e: Emitter) -> None:
    """Let the registers go, so that the system need not keep them."""
    e.call_named("llvm.x86.tilerelease", result=VOID)


def clear(e: Emitter, register: int) -> None:
    """Let a register hold zeros."""
    _call(e, "tilezero", register)


def load(e: Emitter, register: int, base: Any, stride: Any) -> None:
    """Load rows that are so many bytes behind each other."""
    _call(e, "tileloadd64", register, base, e.i64(stride))


def store(e: Emitter, register: int, base: Any, stride: Any) -> None:
    """Store rows so many bytes behind each other."""
    _call(e, "tilestored64", register, base, e.i64(stride))


def multiply(e: Emitter, sums: int, rows: int, pairs: int) -> None:
    """Add the products of rows of bfloat16 and of columns, whose numbers lie in pairs: a row has one of each column."""
    _call(e, "tdpbf16ps", sums, I8(rows), I8(pairs))


def _call(e: Emitter, name: str, register: int, *arguments: Any) -> None:
    e.call_named(f"llvm.x86.{name}", I8(register), *arguments, result=VOID)
