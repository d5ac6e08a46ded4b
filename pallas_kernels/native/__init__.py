"""Kernels for a CPU, written as LLVM IR and compiled for the present processor when they are first needed.

Pallas cannot produce a CPU's machine code. Here `emitter.py` writes loops and vectors, `handler.py` wraps a kernel in
the function that XLA calls and spreads its work over XLA's threads, `compiling.py` compiles it, and `objects.py` keeps
the machine code on disk.
"""
