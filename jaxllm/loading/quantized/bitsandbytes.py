"""bitsandbytes: NF4 in blocks of a flat matrix, with plain or quantized scales, and int8 with a scale per row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, override

import numpy as np

from jaxllm.loading.quantized.bytes8 import ByteLayout
from jaxllm.loading.quantized.fields import read_bool, read_choice, read_names
from jaxllm.loading.quantized.patterns import SkipList
from jaxllm.loading.quantized.scheme import Infos, Layout, Scheme, Stored, expect
from jaxllm.loading.quantized.words import unpack_nibbles
from pallas_kernels.weights import CODEBOOKS, WeightFormat, dequantize

_STATE = ".weight.quant_state.bitsandbytes__nf4"
_BLOCK = 64
_MAX_STATE_BYTES = 4096


def read(config: Mapping[str, Any], dtype: str) -> Scheme:
    """Read a quantization_config of bitsandbytes."""
    del dtype
    is_4bit = read_bool(config, "load_in_4bit", read_bool(config, "_load_in_4bit", False))
    is_8bit = read_bool(config, "load_in_8bit", read_bool(config, "_load_in_8bit", False))
    if is_4bit == is_8bit:
        raise ValueError("quantization_config: expected one of load_in_4bit and load_in_8bit to be true")
    skipped = SkipList(read_names(config, "llm_int8_skip_modules"), "llm_int8_skip_modules")
    skipped.check()
    if is_4bit:
        read_choice(config, "bnb_4bit_quant_type", ("nf4",), "fp4")
        layout: Layout = _NF4Layout(WeightFormat(4, _BLOCK, values="nf4", scale_dtype="float32"))
        return Scheme("NF4", lambda module: None if module in skipped else layout, needs_weights=True)
    form = WeightFormat(8, None, scale_dtype="float32")
    rows = ByteLayout(form, scale_ends=(".SCB",), factor=1 / 127)
    note = "LLM.int8 rounds most inputs of matmuls to 8 bits too; here they keep the model's dtype"
    return Scheme("LLM.int8", lambda module: None if module in skipped else rows, (note,))


@dataclass(frozen=True)
class _State:
    """The JSON of a matrix's quant_state."""

    shape: tuple[int, int]
    block: int
    nested_block: int
    nested_offset: float


@dataclass(frozen=True)
class _NF4Layout(Layout):
    """Bytes of a flat matrix [out * in / 2, 1], the high half of a byte first, and a scale for each block."""

    @property
    @override
    def needed(self) -> tuple[str, ...]:
        return (".weight", ".weight.absmax", ".weight.quant_map", _STATE)

    @property
    @override
    def optional(self) -> tuple[str, ...]:
        return (".weight.nested_absmax", ".weight.nested_quant_map")

    @override
    def shape(self, infos: Infos, stored: Stored) -> tuple[int, ...]:
        state = _read_state(stored)
        num_numbers = prod(state.shape)
        expect(infos, ".weight", ((num_numbers + 1) // 2, 1), "uint8")
        num_blocks = -(-num_numbers // state.block)
        is_nested = ".weight.nested_absmax" in infos
        expect(infos, ".weight.absmax", (num_blocks,), "uint8" if is_nested else "float32")
        expect(infos, ".weight.quant_map", (16,), "float32")
        if is_nested:
            expect(infos, ".weight.nested_absmax", (-(-num_blocks // state.nested_block),), "float32")
            expect(infos, ".weight.nested_quant_map", (256,), "float32")
        return state.shape

    @override
    def held_as(self, num_inputs: int, infos: Infos) -> WeightFormat | None:
        return None if num_inputs % _BLOCK else super().held_as(num_inputs, infos)

    @override
    def part(self, name: str, stored: Stored) -> np.ndarray:
        num_rows, num_inputs = _read_state(stored).shape
        if name == "scales":
            return self._scales(stored).reshape(num_rows, -1)
        codes = unpack_nibbles(stored[".weight"].reshape(-1), high_first=True)
        return codes[: num_rows * num_inputs].reshape(num_rows, num_inputs)

    @override
    def widened(self, stored: Stored) -> np.ndarray | None:
        """Return the numbers of a matrix whose blocks cross the ends of rows."""
        state = _read_state(stored)
        if state.shape[1] % state.block == 0:
            return None
        codes = self.part("codes", stored).reshape(1, -1)
        whole = np.pad(codes, ((0, 0), (0, -codes.size % state.block)))
        numbers = dequantize({"codes": whole, "scales": self._scales(stored)[None]}, self.form)
        return numbers[0, : codes.size].reshape(state.shape)

    def _scales(self, stored: Stored) -> np.ndarray:
        """Return the scales of all blocks, float32."""
        if not np.array_equal(stored[".weight.quant_map"], np.array(CODEBOOKS["nf4"], np.float32)):
            raise ValueError(".weight.quant_map has other numbers than NF4")
        scales = stored[".weight.absmax"]
        if ".weight.nested_absmax" not in stored:
            return scales
        state = _read_state(stored)
        outer = np.repeat(stored[".weight.nested_absmax"], state.nested_block)[: len(scales)]
        return stored[".weight.nested_quant_map"][scales] * outer + np.float32(state.nested_offset)


def _read_state(stored: Stored) -> _State:
    data = stored[_STATE]
    if data.dtype != np.uint8 or data.size > _MAX_STATE_BYTES:
        raise ValueError(f"{_STATE} is no text")
    try:
        values = json.loads(data.tobytes())
        shape, block, nested = values["shape"], values["blocksize"], values.get("nested_blocksize", 256)
        offset = float(values.get("nested_offset", 0.0))
        is_matrix = isinstance(shape, list) and len(shape) == 2
        if not is_matrix or not all(type(size) is int and 0 < size < 1 << 31 for size in (*shape, block, nested)):
            raise ValueError("no shape and blocks")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{_STATE} cannot be read: {error!r}") from None
    if block != _BLOCK:
        raise ValueError(f"{_STATE}: blocksize is {block}, which is not supported, only {_BLOCK}")
    return _State((shape[0], shape[1]), block, nested, offset)
