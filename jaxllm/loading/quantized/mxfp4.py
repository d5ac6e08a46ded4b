"""Experts' weights in MXFP4, as gpt-oss stores them: bfloat16 represents all of them exactly.

A tensor is stored as two: blocks of 32 numbers, two to a byte, and for each block the power of two that multiplies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, override

import ml_dtypes
import numpy as np

from jaxllm.loading.quantized.fields import read_names
from jaxllm.loading.quantized.float4 import MXFP4
from jaxllm.loading.quantized.patterns import SkipList
from jaxllm.loading.quantized.scheme import Infos, Layout, Scheme, Stored, as_scales, expect
from jaxllm.loading.quantized.words import unpack_nibbles

_BLOCK_BYTES = 16
BLOCKS, SCALES = "_blocks", "_scales"
CHUNK_BYTES = 1 << 16
"""The number of bytes decoded at once, so that temporaries stay in the cache."""


def read(config: Mapping[str, Any], dtype: str) -> Scheme:
    """Read a quantization_config of gpt-oss."""
    del dtype
    skipped = SkipList(read_names(config, "modules_to_not_convert"), "modules_to_not_convert")
    skipped.check()
    layout = _StackedMXFP4(MXFP4)

    def layout_of(name: str) -> Layout | None:
        return layout if name.endswith((".gate_up_proj", ".down_proj")) and name not in skipped else None

    return Scheme("MXFP4", layout_of, dtype="bfloat16")


@dataclass(frozen=True)
class _StackedMXFP4(Layout):
    """All experts' blocks [experts, out, in / 32, 16] and scales [experts, out, in / 32].

    HF's matrix is [experts, in, out].
    """

    target: ClassVar[str] = ""
    dtype: ClassVar[str] = "bfloat16"
    is_stacked: ClassVar[bool] = True

    @property
    @override
    def needed(self) -> tuple[str, ...]:
        return (BLOCKS, SCALES)

    @override
    def shape(self, infos: Infos, stored: Stored) -> tuple[int, ...]:
        sizes = expect(infos, SCALES, None, "uint8")
        if len(sizes) != 3:
            raise ValueError(f"{SCALES} has shape {list(sizes)}, expected experts, outputs and blocks")
        expect(infos, BLOCKS, (*sizes, _BLOCK_BYTES), "uint8")
        experts, rows, num_blocks = sizes
        return experts, num_blocks * _BLOCK_BYTES * 2, rows

    @override
    def part(self, name: str, stored: Stored) -> np.ndarray:
        if name == "scales":
            return as_scales(stored[SCALES], self.form)
        blocks = unpack_nibbles(stored[BLOCKS])
        return blocks.reshape(*blocks.shape[:-2], -1)

    @override
    def widened(self, stored: Stored) -> np.ndarray | None:
        return widen(stored[BLOCKS], stored[SCALES]).swapaxes(-1, -2)


def _make_pairs() -> np.ndarray:
    """Return the two bfloat16 numbers of each byte under each scale as one uint32, at [scale * 256 + byte]."""
    nibbles = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    # The low half of a byte is the first number.
    pairs = np.stack([np.tile(nibbles, 16), np.repeat(nibbles, 16)], axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        values = (scales[:, None, None] * pairs).astype(ml_dtypes.bfloat16)
    return values.view(np.uint32).reshape(-1)


_PAIRS = _make_pairs()


def widen(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the bfloat16 numbers of uint8 blocks [..., b, 16] with scales [..., b], as [..., b * 32]."""
    flat, exponents = blocks.reshape(-1, _BLOCK_BYTES), scales.reshape(-1, 1)
    out = np.empty(flat.shape, np.uint32)
    step = CHUNK_BYTES // _BLOCK_BYTES
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        codes = (exponents[part].astype(np.uint16) << 8) | flat[part]
        np.take(_PAIRS, codes, out=out[part], mode="clip")
    return out.view(ml_dtypes.bfloat16).reshape(*scales.shape[:-1], -1)
