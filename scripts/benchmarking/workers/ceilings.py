"""What the machine does at best, as a worker: the model's matmuls and nothing else, and memory read and copied."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from protocol import serve

SECONDS = 1.0
"""Of repeating a thing; its best time counts."""


class Ceilings:
    """The matmuls of a decoder of these shapes, with weights of the dtype."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.shapes, self.dtype = settings["shapes"], jnp.dtype(settings["dtype"])

    def matmuls(self, rows: int) -> dict[str, float]:
        """Return the seconds that the layers' matmuls take on so many rows, and those of the output head."""
        size = self.shapes
        d, f, layers = size["hidden_size"], size["intermediate_size"], size["num_layers"]
        q, kv = size["num_heads"] * size["head_dim"], size["num_kv_heads"] * size["head_dim"]
        x, head = self._array(rows, d), self._array(d, size["vocab_size"])
        stacks = [self._array(layers, *shape) for shape in ((d, q + 2 * kv), (q, d), (d, 2 * f), (f, d))]

        def layer(x: jax.Array, weights: list[jax.Array]) -> tuple[jax.Array, None]:
            qkv, out, up, down = weights
            x = (x @ qkv)[:, :q] @ out
            return (x @ up)[:, :f] @ down, None

        run_layers = jax.jit(lambda x, stacks: jax.lax.scan(layer, x, stacks)[0])
        run_head = jax.jit(jnp.matmul)
        return {
            "layers_s": best_seconds(lambda: run_layers(x, stacks).block_until_ready()),
            "head_s": best_seconds(lambda: run_head(x, head).block_until_ready()),
        }

    def bandwidth(self, num_bytes: int) -> dict[str, float]:
        """Return GB/s of reading an array of this size over and over, and of copying it: bytes read and written."""
        cores = len(os.sched_getaffinity(0))
        source = np.ones(num_bytes // 4, np.float32)
        target = np.empty_like(source)
        parts = list(zip(np.array_split(source, cores), np.array_split(target, cores), strict=True))
        with ThreadPoolExecutor(cores) as pool:
            read = best_seconds(lambda: list(pool.map(lambda part: part[0].max(), parts)))
            copy = best_seconds(lambda: list(pool.map(lambda part: np.copyto(part[1], part[0]), parts)))
        return {"read_gb_per_s": source.nbytes / read / 1e9, "copy_gb_per_s": 2 * source.nbytes / copy / 1e9}

    def _array(self, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(0), shape, self.dtype) * 0.02


def best_seconds(run: Callable[[], object]) -> float:
    """Return the shortest of the times that `run` takes, repeated for a second after a first try."""
    run()
    times: list[float] = []
    while sum(times) < SECONDS:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    serve(Ceilings)
