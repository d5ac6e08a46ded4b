"""Measure the device's busy time by JAX's profiler, without launches and the host's waits."""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData

DEVICE_LINES = {"/device:GPU:": "Stream", "/device:TPU:": "XLA Ops", "/host:CPU": ""}
"""The beginning of the names of a device's planes in a profile, and of the lines with its operations."""
SHOWN = 8


class Operation(NamedTuple):
    """Something that a device ran."""

    name: str
    start: float
    """The beginning in seconds, on the profile's own clock."""
    seconds: float


class Timing(NamedTuple):
    """The times of one call."""

    seconds: float
    """The time during which the device was busy, if the profiler has seen it, else by the wall clock."""
    wall_seconds: float
    clock: str
    """ "profiler" or "wall clock"."""
    operations: dict[str, float]
    """The microseconds of each operation, the longest first."""


def time_calls(run: Callable[[], Any], *, calls: int = 1, repeats: int = 10) -> Timing:
    """Time a function that makes `calls` calls; it runs once before."""
    jax.block_until_ready(run())
    walls = []
    for _ in range(repeats):
        start = perf_counter()
        jax.block_until_ready(run())
        walls.append(perf_counter() - start)
    wall = statistics.median(walls) / calls
    operations = profile(lambda: [jax.block_until_ready(run()) for _ in range(repeats)])
    busy = busy_seconds(operations) / (calls * repeats)
    by_name = microseconds_by_name(operations, calls * repeats)
    return Timing(busy, wall, "profiler", by_name) if busy else Timing(wall, wall, "wall clock", {})


def profile(run: Callable[[], Any]) -> list[Operation]:
    """Return the operations of the devices during a call; none where profiling is not permitted."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        return list(read_operations(Path(folder)))


def read_operations(folder: Path) -> Iterator[Operation]:
    """Yield the operations of a profile on disk; on a CPU, XLA's operations."""
    for path in folder.rglob("*.xplane.pb"):
        for plane in ProfileData.from_file(str(path)).planes:
            wanted = next((line for prefix, line in DEVICE_LINES.items() if plane.name.startswith(prefix)), None)
            lines = [] if wanted is None else [line for line in plane.lines if line.name.startswith(wanted)]
            for event in (event for line in lines for event in line.events):
                if wanted or any(name == "hlo_op" for name, _ in event.stats):
                    yield Operation(event.name, event.start_ns * 1e-9, event.duration_ns * 1e-9)


def busy_seconds(operations: Iterable[Operation]) -> float:
    """Return the time during which at least one of the operations ran."""
    busy = end = 0.0
    for operation in sorted(operations, key=lambda op: op.start):
        last = operation.start + operation.seconds
        busy += max(0.0, last - max(end, operation.start))
        end = max(end, last)
    return busy


def microseconds_by_name(operations: Iterable[Operation], calls: int) -> dict[str, float]:
    """Return the longest operations, per call."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for operation in operations:
        seconds[operation.name] += operation.seconds
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:SHOWN]
    return {name: round(each * 1e6 / calls, 2) for name, each in longest}


def measure_peaks(*, is_dry: bool) -> dict[str, float]:
    """Return the rates of a plain copy and of a large matmul, on random data: zeros are an eighth faster."""
    size, n = (2**12, 64) if is_dry else (2**28, 8192)
    x = jax.random.normal(jax.random.key(0), (size,))
    copy, matmul = jax.jit(lambda x: x + 1), jax.jit(lambda a: a @ a)
    copying = time_calls(lambda: copy(x))
    a = jax.random.normal(jax.random.key(1), (n, n), jnp.bfloat16)
    multiplying = time_calls(lambda: matmul(a))
    return {
        "copy_gb_per_s": 2 * x.nbytes / copying.seconds / 1e9,
        "matmul_tflop_per_s": 2 * n**3 / multiplying.seconds / 1e12,
    }
