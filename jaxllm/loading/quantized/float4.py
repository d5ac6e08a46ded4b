"""Matrices of E2M1 numbers, two to a byte, with scales for groups: NVFP4 and MXFP4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import override

import numpy as np

from jaxllm.loading.checkpoint import TensorInfo
from jaxllm.loading.quantized.scheme import E8M0, Infos, Layout, Stored, as_scales, expect, expect_matrix
from jaxllm.loading.quantized.words import unpack_nibbles
from pallas_kernels.weights import WeightFormat

MXFP4 = WeightFormat(4, 32, values="e2m1", scale_dtype="bfloat16")
NVFP4 = WeightFormat(4, 16, values="e2m1", scale_dtype="float8_e4m3fn", factor_group=0, factor_dtype="float32")


@dataclass(frozen=True)
class Float4Layout(Layout):
    """A matrix of bytes [out, in / 2], the low half of a byte first, with scales and one factor for all of them."""

    codes_end: str = ".weight_packed"
    factor_end: str | None = None
    is_divided: bool = False
    """Whether scales are divided by the stored factor, instead of multiplied."""

    @property
    @override
    def needed(self) -> tuple[str, ...]:
        factor = () if self.factor_end is None else (self.factor_end,)
        return (self.codes_end, ".weight_scale", *factor)

    @override
    def shape(self, infos: Infos, stored: Stored) -> tuple[int, ...]:
        num_rows, num_bytes = expect_matrix(infos, self.codes_end, "uint8")
        group = self.form.group or 1
        if 2 * num_bytes % group:
            raise ValueError(f"{self.codes_end} has rows of {2 * num_bytes} numbers, no multiple of {group}")
        expect(infos, ".weight_scale", (num_rows, 2 * num_bytes // group), *self._scale_dtypes)
        if self.factor_end is not None and expect(infos, self.factor_end, None, "float32") not in ((), (1,)):
            raise ValueError(f"{self.factor_end} has shape {list(infos[self.factor_end].shape)}, expected one number")
        return num_rows, 2 * num_bytes

    @property
    def _scale_dtypes(self) -> tuple[str, ...]:
        return E8M0 if self.factor_end is None else ("float8_e4m3fn",)

    @override
    def scales(self, infos: Infos) -> TensorInfo | None:
        return infos[".weight_scale"]

    @override
    def part(self, name: str, stored: Stored) -> np.ndarray:
        if name == "codes":
            return unpack_nibbles(stored[self.codes_end])
        scales = stored[".weight_scale"]
        if name == "scales":
            return as_scales(scales, self.form)
        assert self.factor_end is not None
        factor = stored[self.factor_end].reshape(1, 1).astype(np.float32)
        with np.errstate(divide="ignore"):
            factor = np.float32(1) / factor if self.is_divided else factor
        return np.broadcast_to(factor, (len(scales), 1))
