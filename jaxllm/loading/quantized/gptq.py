"""GPTQ in the layout of AutoGPTQ and GPTQModel: 2, 3, 4 or 8 bits in groups of inputs, which may be in any order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, override

import numpy as np

from jaxllm.loading.checkpoint import TensorInfo
from jaxllm.loading.quantized.fields import MAX_NAMES, read_bool, read_choice, read_int, read_object
from jaxllm.loading.quantized.patterns import compiled
from jaxllm.loading.quantized.scheme import SCALE_DTYPES, Infos, Layout, Scheme, Stored, expect, expect_matrix
from jaxllm.loading.quantized.words import order_by_group, signed, unpack_words
from jaxllm.params.checks import shown
from pallas_kernels.weights import WeightFormat

_BITS = (2, 3, 4, 8)
FORMATS = ("gptq", "gptq_v2")


def read(config: Mapping[str, Any], dtype: str) -> Scheme:
    """Read a quantization_config of GPTQ."""
    default = _layout(config, dtype)
    rules = _read_dynamic(config, dtype)
    blocks = _read_blocks(config)
    has_head = read_bool(config, "lm_head", False)

    def layout_of(module: str) -> _GPTQLayout | None:
        if blocks and not module.endswith(blocks):
            return None
        return next((layout for pattern, layout in rules if pattern.match(module)), default)

    group = default.form.group or "rows"
    return Scheme(f"GPTQ of {default.form.bits} bits in groups of {group}", layout_of, has_head=has_head)


def _layout(config: Mapping[str, Any], dtype: str) -> _GPTQLayout:
    bits, group = read_choice(config, "bits", _BITS, 4), max(read_int(config, "group_size", 128), 0)
    read_choice(config, "pack_dtype", ("int32",), "int32")
    key = "checkpoint_format" if config.get("checkpoint_format") is not None else "format"
    kind = read_choice(config, key, FORMATS, "gptq")
    if config.get("is_marlin_format"):
        raise ValueError("quantization_config: is_marlin_format is not supported; use one in the format gptq")
    if read_bool(config, "sym", True):
        offset = 0 if bits == 8 else 1 << (bits - 1)
        form = WeightFormat(bits, group, offset=offset, scale_dtype=dtype)
    else:
        form = WeightFormat(bits, group, scale_dtype=dtype, zero_dtype="int8" if bits == 8 else "uint8")
    return _GPTQLayout(form, is_v1=kind == "gptq", is_ordered=read_bool(config, "desc_act", False))


def _read_dynamic(config: Mapping[str, Any], dtype: str) -> list[tuple[re.Pattern[str], _GPTQLayout | None]]:
    """Return the layouts for modules with matching names; None for modules that are not quantized."""
    rules = []
    for pattern, change in read_object(config, "dynamic").items():
        if not isinstance(change, Mapping):
            raise ValueError(f"quantization_config: dynamic has {shown(change)} for {shown(pattern)}")
        text = pattern[2:] if pattern.startswith(("+:", "-:")) else pattern
        layout = None if pattern.startswith("-:") else _layout({**config, **change}, dtype)
        rules.append((compiled(text, "dynamic"), layout))
    return rules


def _read_blocks(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the name endings of the only modules that are quantized; empty if all are."""
    key = "modules_in_block_to_quantize"
    entries = config.get(key) or []
    if not isinstance(entries, list) or len(entries) > MAX_NAMES:
        raise ValueError(f"quantization_config: {key} is {shown(entries)}, expected a list of names")
    names = [name for each in entries for name in (each if isinstance(each, list) else [each])]
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"quantization_config: {key} holds what is no name")
    return tuple(names)


@dataclass(frozen=True)
class _GPTQLayout(Layout):
    """Words [in * bits / 32, out] of inputs, zeros [groups, out * bits / 32], scales [groups, out], inputs' groups."""

    writes_biases: ClassVar[bool] = True
    is_v1: bool = True
    """Whether zeros are stored less one."""

    @property
    @override
    def needed(self) -> tuple[str, ...]:
        return (".qweight", ".qzeros", ".scales", *((".g_idx",) if self.is_ordered else ()))

    @property
    @override
    def optional(self) -> tuple[str, ...]:
        return () if self.is_ordered else (".g_idx",)

    @override
    def shape(self, infos: Infos, stored: Stored) -> tuple[int, ...]:
        bits = self.form.bits
        num_words, num_rows = expect_matrix(infos, ".qweight", "int32")
        if num_words * 32 % bits or num_rows * bits % 32:
            raise ValueError(f".qweight has shape {[num_words, num_rows]}, which {bits} bits do not fill")
        num_inputs = num_words * 32 // bits
        num_groups = -(-num_inputs // (self.form.group or num_inputs))
        expect(infos, ".qzeros", (num_groups, num_rows * bits // 32), "int32")
        expect(infos, ".scales", (num_groups, num_rows), *SCALE_DTYPES)
        if ".g_idx" in infos:
            expect(infos, ".g_idx", (num_inputs,), "int32")
        return num_rows, num_inputs

    @override
    def scales(self, infos: Infos) -> TensorInfo | None:
        return infos[".scales"]

    @override
    def part(self, name: str, stored: Stored) -> np.ndarray:
        if name == "scales":
            return np.ascontiguousarray(stored[".scales"].T)
        if name == "zeros":
            return self._held(self._zeros(stored))
        if self.form.zero_dtype is None and (self._zeros(stored) != 1 << (self.form.bits - 1)).any():
            raise ValueError(".qzeros has others than the middle, but the config says that sym is true")
        codes = unpack_words(stored[".qweight"].T, self.form.bits)
        order = self.order(stored)
        return self._held(codes if order is None else np.take(codes, order, axis=1))

    @override
    def order(self, stored: Stored) -> np.ndarray | None:
        if not self.is_ordered:
            return None
        groups = stored[".g_idx"]
        return order_by_group(groups, len(stored[".scales"]), self.form.group or len(groups))

    def _zeros(self, stored: Stored) -> np.ndarray:
        """Return the codes of zero, uint8 [out, groups]."""
        bits, words = self.form.bits, np.ascontiguousarray(stored[".qzeros"])
        if self.is_v1 and 32 % bits == 0:
            # One is added to whole words, as it was subtracted from them: a zero of 0 has borrowed from the next one.
            ones = sum(1 << low for low in range(0, 32, bits))
            words = (words.view(np.uint32) + np.uint32(ones)).view(np.int32)
        zeros = unpack_words(words, bits)
        if self.is_v1 and 32 % bits:
            zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)
        return np.ascontiguousarray(zeros.T)

    def _held(self, codes: np.ndarray) -> np.ndarray:
        return signed(codes) if self.form.bits == 8 else codes
