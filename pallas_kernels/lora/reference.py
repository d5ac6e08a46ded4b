"""The reference: a loop over rows, slow, which defines what is correct."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def reference_lora(
    x_ti: np.ndarray,
    down_ci: np.ndarray,
    up_co: np.ndarray,
    slots_t: np.ndarray,
    parts: Sequence[int],
    num_slots: int,
    *,
    plus_to: np.ndarray | None = None,
) -> np.ndarray:
    """See `Lora`; takes one layer's arrays, returns float64, and rounds only A x, to x's dtype."""
    num_outputs = up_co.shape[1]
    out_to = np.zeros((len(x_ti), num_outputs)) if plus_to is None else np.asarray(plus_to, np.float64)
    rank = len(down_ci) // num_slots // len(parts)
    stops = np.cumsum(parts)
    for row, slot in enumerate(slots_t):
        for part, (size, stop) in enumerate(zip(parts, stops, strict=True)) if slot else ():
            first = ((slot - 1) * len(parts) + part) * rank
            products = np.asarray(down_ci[first : first + rank], np.float64) @ np.asarray(x_ti[row], np.float64)
            products = np.asarray(products.astype(x_ti.dtype), np.float64)
            part_of_b = np.asarray(up_co[first : first + rank, stop - size : stop], np.float64)
            out_to[row, stop - size : stop] += products @ part_of_b
    return out_to
