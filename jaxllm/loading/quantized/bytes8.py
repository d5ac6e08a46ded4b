"""Matrices with one byte per number, as int8 or FP8, in the layout that several methods share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import override

import numpy as np

from jaxllm.loading.checkpoint import TensorInfo
from jaxllm.loading.quantized.scheme import E8M0, SCALE_DTYPES, Infos, Layout, Stored, as_scales, expect, expect_matrix


@dataclass(frozen=True)
class ByteLayout(Layout):
    """A matrix of int8 or FP8 [out, in] with one scale, one per row, or one per block or group."""

    block_rows: int = 1
    """The number of rows that share a scale, where blocks have more than one row."""
    scale_ends: tuple[str, ...] = (".weight_scale",)
    """The possible endings of the scales' name."""
    factor: float = 1.0
    """The factor of all scales."""
    has_zeros: bool = False

    @property
    @override
    def needed(self) -> tuple[str, ...]:
        return (".weight",)

    @property
    @override
    def optional(self) -> tuple[str, ...]:
        return (*self.scale_ends, ".weight_zero_point", ".weight_format")

    @override
    def shape(self, infos: Infos, stored: Stored) -> tuple[int, ...]:
        num_rows, num_inputs = expect_matrix(infos, ".weight", self.form.code_dtype.name)
        end = self._scale_end(infos)
        sizes = [size for size in expect(infos, end, None, *SCALE_DTYPES, *E8M0) if size != 1]
        num_groups = -(-num_inputs // self.form.group) if self.form.group else 1
        wanted = [size for size in (-(-num_rows // self.block_rows), num_groups) if size != 1]
        # One scale for the whole matrix may replace one per row.
        if sizes not in (wanted, [] if num_groups == 1 else wanted):
            raise ValueError(f"{end} has shape {list(infos[end].shape)}, expected {wanted}")
        if self.has_zeros:
            if ".weight_zero_point" not in infos:
                raise ValueError(" has no weight_zero_point")
            expect(infos, ".weight_zero_point", tuple(infos[end].shape), "int8")
        return num_rows, num_inputs

    @override
    def scales(self, infos: Infos) -> TensorInfo | None:
        return infos[self._scale_end(infos)]

    @override
    def part(self, name: str, stored: Stored) -> np.ndarray:
        codes = stored[".weight"]
        if name == "codes":
            return codes
        if name == "zeros":
            return self._spread(stored[".weight_zero_point"], codes.shape)
        scales = as_scales(stored[self._scale_end(stored)], self.form)
        if self.factor != 1:
            scales = scales * np.float32(self.factor)
        return self._spread(scales, codes.shape)

    def _spread(self, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Expand scales or zero points to one entry for each group of each row."""
        num_rows, num_inputs = shape
        num_groups = -(-num_inputs // self.form.group) if self.form.group else 1
        entries = values.reshape(-1, num_groups)
        if self.block_rows > 1:
            entries = np.repeat(entries, self.block_rows, axis=0)[:num_rows]
        return np.broadcast_to(entries, (num_rows, num_groups))

    def _scale_end(self, names: Infos | Stored) -> str:
        scale_end = next((end for end in self.scale_ends if end in names), None)
        if scale_end is None:
            raise ValueError(f" is quantized, but there is no {' or '.join(self.scale_ends)}")
        return scale_end
