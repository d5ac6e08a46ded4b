"""Named shapes of real models, shared by tests and benchmarks."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """One model's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    soft_cap: float | None = None


CASES: dict[str, Case] = {
    "smollm2-135m": Case(9, 3, 64),
    "llama-3.2-1b": Case(32, 8, 64),
    "llama-3-8b": Case(32, 8, 128),
    "qwen3-0.6b": Case(16, 8, 128),
    "gemma-2-2b-sliding": Case(8, 4, 256, window=4096, soft_cap=50.0),
    "gemma-3-270m-sliding": Case(4, 1, 256, window=512),
    "llama-2-7b": Case(32, 32, 128),
}
