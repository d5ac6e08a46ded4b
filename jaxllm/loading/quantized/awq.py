"""AWQ in the layout of AutoAWQ's "gemm": 4 bits, groups of inputs, and a zero for each group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, override

import numpy as np

from jaxllm.loading.checkpoint import TensorInfo
from jaxllm.loading.quantized.fields import read_bool, read_choice, read_int, read_names
from jaxllm.loading.quantized.patterns import SkipList
from jaxllm.loading.quantized.scheme import SCALE_DTYPES, Infos, Layout, Scheme, Stored, expect, expect_matrix
from pallas_kernels.weights import WeightFormat

_PER_WORD = 8
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position in a word of each of its eight outputs."""


def read(config: Mapping[str, Any], dtype: str) -> Scheme:
    """Read a quantization_config of AWQ."""
    read_choice(config, "bits" if "bits" in config else "w_bit", (4,), 4)
    read_choice(config, "format" if "format" in config else "version", ("gemm",), "gemm")
    if not read_bool(config, "zero_point", True):
        raise ValueError("quantization_config: zero_point is false, which is not supported; use one made with zeros")
    group = read_int(config, "group_size" if "group_size" in config else "q_group_size", 128)
    skipped = SkipList(read_names(config, "modules_to_not_convert"), "modules_to_not_convert")
    skipped.check()
    layout = _AWQLayout(WeightFormat(4, max(group, 0), scale_dtype=dtype, zero_dtype="uint8"))
    return Scheme(f"AWQ of 4 bits in groups of {group}", lambda module: None if module in skipped else layout)


@dataclass(frozen=True)
class _AWQLayout(Layout):
    """Words [in, out / 8] of eight outputs, zeros packed alike [groups, out / 8], and scales [groups, out]."""

    @property
    @override
    def needed(self) -> tuple[str, ...]:
        return (".qweight", ".qzeros", ".scales")

    @override
    def shape(self, infos: Infos, stored: Stored) -> tuple[int, ...]:
        num_inputs, num_words = expect_matrix(infos, ".qweight", "int32")
        num_groups = -(-num_inputs // (self.form.group or num_inputs))
        expect(infos, ".qzeros", (num_groups, num_words), "int32")
        expect(infos, ".scales", (num_groups, num_words * _PER_WORD), *SCALE_DTYPES)
        return num_words * _PER_WORD, num_inputs

    @override
    def scales(self, infos: Infos) -> TensorInfo | None:
        return infos[".scales"]

    @override
    def part(self, name: str, stored: Stored) -> np.ndarray:
        if name == "scales":
            return np.ascontiguousarray(stored[".scales"].T)
        words = np.ascontiguousarray(stored[".qweight" if name == "codes" else ".qzeros"].T)
        in_bytes = words.view(np.uint8).reshape(*words.shape, 4)
        out = np.empty((len(words), _PER_WORD, words.shape[1]), np.uint8)
        for output, position in enumerate(_ORDER):
            np.bitwise_and(in_bytes[..., position // 2] >> np.uint8(position % 2 * 4), np.uint8(15), out=out[:, output])
        return out.reshape(-1, words.shape[1])
