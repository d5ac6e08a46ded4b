"""Named shapes of real models' weights with adapters, shared by tests and benchmarks."""

from __future__ import annotations

from typing import NamedTuple


class _Case(NamedTuple):
    """The weights of one of a model's layers: the inputs of each, and the outputs of each of its parts."""

    qkv: tuple[int, tuple[int, ...]]
    o: tuple[int, tuple[int, ...]]
    gate_up: tuple[int, tuple[int, ...]]
    down: tuple[int, tuple[int, ...]]


CASES: dict[str, _Case] = {
    "smollm2-135m": _Case((576, (576, 192, 192)), (576, (576,)), (576, (1536, 1536)), (1536, (576,))),
    "llama-3.2-1b": _Case((2048, (2048, 512, 512)), (2048, (2048,)), (2048, (8192, 8192)), (8192, (2048,))),
    "tiny": _Case((64, (64, 32, 32)), (64, (64,)), (64, (96, 96)), (96, (64,))),
}
