"""Experts' weights in MXFP4 are widened to bfloat16, which represents all of them exactly, as they are read.

A tensor is stored as two: blocks of 32 numbers, two to a byte, and for each block the power of two that multiplies it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from jaxllm.loading.checkpoint import Checkpoint, TensorInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

METHOD = "mxfp4"  # as in jaxllm.models.reading, which a process that only opens checkpoints does not import
BLOCK_BYTES = 16
BLOCKS, SCALES = "_blocks", "_scales"
CHUNK_BYTES = 1 << 16
"""How many bytes of blocks are widened at once, so that temporaries stay in the cache."""


def _make_pairs() -> np.ndarray:
    """Return the two bfloat16 numbers of each byte under each scale as one uint32, at [scale * 256 + byte]."""
    nibbles = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    # The low half of a byte is the first of its numbers.
    pairs = np.stack([np.tile(nibbles, 16), np.repeat(nibbles, 16)], axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        values = (scales[:, None, None] * pairs).astype(ml_dtypes.bfloat16)
    return values.view(np.uint32).reshape(-1)


_PAIRS = _make_pairs()


def widen(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the bfloat16 numbers of uint8 blocks [..., b, 16] with their scales [..., b], as [..., b * 32]."""
    flat, exponents = blocks.reshape(-1, BLOCK_BYTES), scales.reshape(-1, 1)
    out = np.empty(flat.shape, np.uint32)
    step = CHUNK_BYTES // BLOCK_BYTES
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        codes = (exponents[part].astype(np.uint16) << 8) | flat[part]
        np.take(_PAIRS, codes, out=out[part], mode="clip")
    return out.view(ml_dtypes.bfloat16).reshape(*scales.shape[:-1], -1)


class MXFP4Checkpoint(Checkpoint):
    """A checkpoint whose experts are stored in MXFP4, each pair of blocks and scales offered as HF's widened tensor.

    The file has the inputs of a matrix last, [experts, out, in]; HF has them in the middle, [experts, in, out].
    """

    def __init__(self, inner: Checkpoint) -> None:
        self._inner = inner
        self.source = inner.source
        self.config = inner.config
        self.generation_config = inner.generation_config
        self.sentence_files = inner.sentence_files
        self.is_gguf = inner.is_gguf
        self.dtype = "bfloat16"
        widened = _widened_tensors(inner.tensors)
        stored = {name + suffix for name in widened for suffix in (BLOCKS, SCALES)}
        self._widened = frozenset(widened)
        self.tensors = {name: info for name, info in inner.tensors.items() if name not in stored} | widened
        if widened:
            sizes = [sum(info.num_bytes for info in widened.values())]
            sizes.append(2 * sum(int(np.prod(info.shape, dtype=np.int64)) for info in widened.values()))
            logger.info(
                "%s: the experts' weights are MXFP4, 4.25 bits a number. They are widened when loaded and computed in "
                "the model's dtype: %.2f GB become %.2f GB in bfloat16",
                self.source,
                *(size / 1e9 for size in sizes),
            )

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        if name not in self._widened:
            return self._inner.read(name, index)
        blocks, scales = (self._inner.read(name + suffix, index) for suffix in (BLOCKS, SCALES))
        return widen(blocks, scales).swapaxes(-1, -2)

    def release(self, name: str) -> None:
        for stored in [name + BLOCKS, name + SCALES] if name in self._widened else [name]:
            self._inner.release(stored)

    def fetch(self) -> None:
        self._inner.fetch()

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return self._inner.tokenizer()

    def tokenizer_digest(self) -> str | None:
        return self._inner.tokenizer_digest()


def with_widened(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its weights widened, if its config says that they are MXFP4."""
    quantization = checkpoint.config.get("quantization_config")
    is_mxfp4 = isinstance(quantization, Mapping) and quantization.get("quant_method") == METHOD
    return MXFP4Checkpoint(checkpoint) if is_mxfp4 else checkpoint


def _widened_tensors(stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the widened tensor of each pair; blocks and scales that do not fit together are left as they are."""
    widened: dict[str, TensorInfo] = {}
    for name in [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]:
        blocks, scales = stored[name + BLOCKS], stored.get(name + SCALES)
        if scales is None or {blocks.dtype, scales.dtype} != {"uint8"} or len(scales.shape) != 3:
            continue
        if blocks.shape == (*scales.shape, BLOCK_BYTES):
            experts, rows, num_blocks = scales.shape
            shape = (experts, num_blocks * BLOCK_BYTES * 2, rows)
            widened[name] = TensorInfo(shape, "bfloat16", blocks.num_bytes + scales.num_bytes)
    return widened
