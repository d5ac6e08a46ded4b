"""Compile an engine's programs in the order of its start, and compute when each is there on a host with many cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from jaxllm.execution.mesh import param_bytes
from jaxllm.execution.programs.background import FAST
from jaxllm.execution.programs.compiler import StepCompiler
from jaxllm.execution.programs.shapes import ProgramKey, describe

_BLOCKS = 2049
_BYTES_PER_SECOND = 2e9
"""The assumed pace at which weights come from a disk onto the device."""


class Timeline:
    """When the programs of a start are there, if each thread has a core that is as fast as this machine's.

    One thread at a time traces. The first program begins when the size of the pool is known.
    """

    def __init__(self, begins: float, num_threads: int) -> None:
        self._free, self._tracing = [begins] * num_threads, begins

    def add(self, traced: float, compiled: float) -> tuple[float, float]:
        """Give the next program to the next free thread; return when it begins and when it is there."""
        self._free.sort()
        begins = max(self._free[0], self._tracing)
        self._tracing = begins + traced
        self._free[0] = self._tracing + compiled
        return begins, self._free[0]


def compile_start(compiler: StepCompiler) -> Iterator[dict[str, Any]]:
    """Yield the processor's seconds for each program of an engine in the engine's order, and computed times of a start.

    `begins_s` and `ends_s` count from the moment when devices and names are known, with as many threads as an engine
    has on a host of eight cores or more. Other programs on this machine change them little.
    """
    sizing = timed_compile(compiler, compiler.shapes.largest_step, 2)
    sized = sum(sizing.values())
    yield {"program": "the largest step, for the size of the pool", **sizing} | _times(0.0, sized)
    loaded = param_bytes(compiler.mesh, compiler.model.specs.all_param_specs()) / _BYTES_PER_SECOND
    yield {"program": "weights, at an assumed 2 GB/s"} | _times(0.0, loaded)
    timeline, first = Timeline(sized, FAST.num_threads), None
    for key in compiler.shapes.programs():
        seconds = timed_compile(compiler, key, _BLOCKS)
        begins, ends = timeline.add(seconds["lower_s"], seconds["compile_s"])
        first = first or ends
        yield {"program": describe(key), **seconds} | _times(begins, ends)
    yield {"program": "the first token can be computed"} | _times(0.0, max(loaded, first or 0.0))


def _times(begins: float, ends: float) -> dict[str, Any]:
    return {"begins_s": round(begins, 1), "ends_s": round(ends, 1), "missed": []}


def timed_compile(compiler: StepCompiler, key: ProgramKey, num_blocks: int) -> dict[str, float]:
    """Compile a program; return the processor's seconds for lowering and compiling it, of all threads and of ptxas."""
    start = _processor_seconds()
    lowered = compiler.lower(key, num_blocks)
    lowered_at = _processor_seconds()
    lowered.compile(compiler_options=compiler.options)
    return {"lower_s": round(lowered_at - start, 1), "compile_s": round(_processor_seconds() - lowered_at, 1)}


def _processor_seconds() -> float:
    return sum(os.times()[:4])
