"""A worker that times the machine's peaks: the model's matmuls alone, and memory read and copied."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from protocol import serve

from pallas_kernels.linear import Linear, LinearShape

SECONDS, TIMES = 0.3, 3
"""The least seconds and times that everything is repeated; a figure is the median, as jaxllm's is."""
YNN_OPERATIONS = "xla_cpu_experimental_ynn_fusion_type"
CPU_WAYS = ({}, {YNN_OPERATIONS: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}, {YNN_OPERATIONS: ""})
"""Compiler options for matmuls by XLA's default, its library and XLA itself: which is fastest depends on the case."""


class HardwareSpeeds:
    """Times the matmuls of a decoder of these shapes, with weights of the dtype, and memory."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.shapes, self.dtype = settings["shapes"], jnp.dtype(settings["dtype"])

    def matmuls(self, rows: int) -> dict[str, float]:
        """Return the seconds of the layers' matmuls on a number of rows, and of the output head.

        The fastest of XLA with weights [in, out] or [out, in], and a CPU's own kernel.
        """
        size, is_cpu = self.shapes, jax.default_backend() == "cpu"
        options = CPU_WAYS if is_cpu else ({},)
        ways = [self._matmuls(rows, lambda x, w: x @ w, options, is_transposed=False)]
        ways += [self._matmuls(rows, lambda x, w: x @ w.T, options, is_transposed=True)]
        kernel, head = Linear("cpu"), (size["vocab_size"], size["hidden_size"])
        if is_cpu and kernel.refusal(LinearShape(*head, self.dtype, self.dtype)) is None:
            ways += [self._matmuls(rows, lambda x, w: kernel(x, w[None], 0), ({},), is_transposed=True)]
        return {name: min(way[name] for way in ways) for name in ways[0]}

    def _matmuls(
        self, rows: int, multiply: Callable[..., jax.Array], options: Sequence[dict[str, str]], *, is_transposed: bool
    ) -> dict[str, float]:
        size = self.shapes
        d, f = size["hidden_size"], size["intermediate_size"]
        q, kv = size["num_heads"] * size["head_dim"], size["num_kv_heads"] * size["head_dim"]
        shapes = ((d, q + 2 * kv), (q, d), (d, 2 * f), (f, d))

        def weight(width: int, out: int) -> jax.Array:
            return self._array(out, width) if is_transposed else self._array(width, out)

        def run_layers(x: jax.Array, layers: list[list[jax.Array]]) -> jax.Array:
            for qkv, out, up, down in layers:
                x = multiply(multiply(x, qkv)[:, :q], out)
                x = multiply(multiply(x, up)[:, :f], down)
            return x

        def seconds(function: Callable[..., jax.Array], *arguments: Any) -> float:
            lowered = jax.jit(function).lower(*arguments)
            programs = [lowered.compile(compiler_options=each) for each in options]
            return min(median_seconds(lambda: program(*arguments).block_until_ready()) for program in programs)  # noqa: B023

        layers = [[weight(*shape) for shape in shapes] for _ in range(size["num_layers"])]
        x, head = self._array(rows, d), weight(d, size["vocab_size"])
        return {"layers_s": seconds(run_layers, x, layers), "head_s": seconds(multiply, x, head)}

    def bandwidth(self, num_bytes: int) -> dict[str, float]:
        """Return GB/s of reading an array of this size over and over, and of copying it: bytes read and written."""
        cores = len(os.sched_getaffinity(0))
        source = np.ones(num_bytes // 4, np.float32)
        target = np.empty_like(source)
        parts = list(zip(np.array_split(source, cores), np.array_split(target, cores), strict=True))
        with ThreadPoolExecutor(cores) as pool:
            read = median_seconds(lambda: list(pool.map(lambda part: part[0].max(), parts)))
            copy = median_seconds(lambda: list(pool.map(lambda part: np.copyto(part[1], part[0]), parts)))
        return {"read_gb_per_s": source.nbytes / read / 1e9, "copy_gb_per_s": 2 * source.nbytes / copy / 1e9}

    def _array(self, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(0), shape, self.dtype) * 0.02


def median_seconds(run: Callable[[], object]) -> float:
    """Return the median time of `run`, after a first call."""
    run()
    times: list[float] = []
    while sum(times) < SECONDS or len(times) < TIMES:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    serve(HardwareSpeeds)
