"""compressed-tensors' "pack-quantized" integers: each row is one stream of bits, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import override

import numpy as np

from jaxllm.loading.checkpoint import TensorInfo
from jaxllm.loading.quantized.scheme import SCALE_DTYPES, Infos, Layout, Stored, as_scales, expect, expect_matrix
from jaxllm.loading.quantized.words import order_by_group, signed, unpack_words


@dataclass(frozen=True)
class PackedLayout(Layout):
    """Words [out, in * bits / 32], scales [out, groups] or fewer, and zeros [out * bits / 32, groups]."""

    @property
    @override
    def needed(self) -> tuple[str, ...]:
        zeros = () if self.form.zero_dtype is None else (".weight_zero_point",)
        return (".weight_packed", ".weight_scale", *zeros, *((".weight_g_idx",) if self.is_ordered else ()))

    @property
    @override
    def optional(self) -> tuple[str, ...]:
        return tuple({".weight_shape", ".weight_g_idx", ".weight_zero_point"} - set(self.needed))

    @override
    def shape(self, infos: Infos, stored: Stored) -> tuple[int, ...]:
        num_rows, num_words = expect_matrix(infos, ".weight_packed", "int32")
        sizes = expect(infos, ".weight_scale", None, *SCALE_DTYPES)
        num_inputs = self._num_inputs(num_words, sizes)
        num_groups = self._num_groups(num_inputs)
        wanted = [size for size in (num_rows, num_groups) if size != 1]
        if [size for size in sizes if size != 1] not in (wanted, [] if num_groups == 1 else wanted):
            raise ValueError(f".weight_scale has shape {list(sizes)}, expected {[num_rows, num_groups]}")
        if self.form.zero_dtype is not None:
            num_zeros = -(-num_rows * self.form.bits // 32)
            expect(infos, ".weight_zero_point", (num_zeros, num_groups), "int32")
        if ".weight_g_idx" in infos:
            expect(infos, ".weight_g_idx", (num_inputs,), "int32")
        return num_rows, num_inputs

    @override
    def scales(self, infos: Infos) -> TensorInfo | None:
        return infos[".weight_scale"]

    @override
    def part(self, name: str, stored: Stored) -> np.ndarray:
        words, scales, bits = stored[".weight_packed"], stored[".weight_scale"], self.form.bits
        num_inputs = self._num_inputs(words.shape[1], scales.shape)
        if name == "scales":
            entries = as_scales(scales, self.form).reshape(-1, self._num_groups(num_inputs))
            return np.broadcast_to(entries, (len(words), entries.shape[1]))
        if name == "zeros":
            zeros = unpack_words(stored[".weight_zero_point"].T, bits)
            return self._held(np.ascontiguousarray(zeros[:, : len(words)].T))
        codes = unpack_words(words, bits)[:, :num_inputs]
        order = self.order(stored)
        return self._held(codes if order is None else np.take(codes, order, axis=1))

    @override
    def order(self, stored: Stored) -> np.ndarray | None:
        if not self.is_ordered:
            return None
        groups = stored[".weight_g_idx"]
        return order_by_group(groups, stored[".weight_scale"].shape[-1], self.form.group or len(groups))

    def _num_inputs(self, num_words: int, sizes: tuple[int, ...]) -> int:
        """Return the number of codes in a row; its last word may have room for more."""
        most = num_words * 32 // self.form.bits
        by_groups = sizes[-1] * self.form.group if self.form.group and len(sizes) == 2 else most
        return by_groups if -(-by_groups * self.form.bits // 32) == num_words else most

    def _num_groups(self, num_inputs: int) -> int:
        return -(-num_inputs // (self.form.group or num_inputs))

    def _held(self, codes: np.ndarray) -> np.ndarray:
        return signed(codes) if self.form.bits == 8 else codes
