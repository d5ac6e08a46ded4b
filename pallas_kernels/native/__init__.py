"""Kernels for a CPU, written as LLVM IR and compiled when first wanted, for the processor at hand.

Pallas has no way to a CPU's machine code, so this stands in its place there: `emitter.py` writes loops and vectors,
`handler.py` makes what XLA calls out of a kernel and spreads it over XLA's threads, `compiling.py` turns it into code,
`objects.py` keeps that on disk.
"""
