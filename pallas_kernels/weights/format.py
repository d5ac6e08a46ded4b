"""The format of quantized weights: the arrays that hold a matrix [out, in], and the numbers that they represent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

CODEBOOKS: Mapping[str, tuple[float, ...]] = {
    "e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
}
"""The numbers that 4-bit codes stand for, where these are not integers; all are float32."""

PARTS = ("codes", "scales", "mins", "zeros", "scale_factors", "min_factors", "order")
"""The arrays that can hold a matrix, in the order in which kernels take them, except the last."""
CHUNK = 64
"""The number of codes of a row that are packed together."""
_WIDENED = 16
"""The number of 16-bit numbers that are widened together."""
PLANES: Mapping[int, tuple[int, ...]] = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""How a code's bits are divided into planes, the lowest bits first."""


_EIGHT_BITS = {"integer": "int8", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
HALVES = ("bfloat16", "float16")
"""The 16-bit floats in which a matrix may be held where x is float32."""


@dataclass(frozen=True)
class WeightFormat:
    """The format of a matrix [out, in]: number = value(code) * scale - min, in float32, rounded once.

    Codes of 16 bits are the numbers themselves.

    The scale of a group is its entry of `scales`, times its entry of `scale_factors` if there are some. Its min is its
    entry of `mins` (times its entry of `min_factors`), or its entry of `zeros` times its scale, or 0.
    """

    bits: int
    """The number of bits of a code: one of `PLANES`, or 16."""
    group: int | None = None
    """The number of numbers of a row that share a scale. None: all of them do, and sums over a row are multiplied by
    it. With 16 bits there are no scales."""
    values: str = "integer"
    """What codes stand for: "integer", one of `CODEBOOKS` for 4 bits, "e4m3" or "e5m2" for 8 bits, one of `HALVES` for
    16."""
    offset: int = 0
    """The number subtracted from an integer code of fewer than 8 bits; 8-bit integers are signed."""
    scale_dtype: str = "float16"
    """The dtype of `scales` and `mins`: "float16", "bfloat16", "float32", "int8", "uint8" or "float8_e4m3fn"."""
    has_mins: bool = False
    zero_dtype: str | None = None
    """The dtype of `zeros`, "uint8", "int8" or "float16"; None if there are none."""
    factor_group: int | None = None
    """The number of numbers of a row that share a factor of their scales (and mins); None if there are no factors."""
    factor_dtype: str = "float16"
    is_ordered: bool = False
    """True if the numbers of a row are in another order than its inputs: `order` has the input of each, the same for
    all rows. Inputs are brought into that order before a kernel runs."""

    def __post_init__(self) -> None:
        is_whole, float_bits = self.group is None, 4 if self.values in CODEBOOKS else 16 if self.is_half else 8
        has_bits = self.bits in PLANES if self.values == "integer" else self.bits == float_bits
        if not has_bits:
            raise ValueError(f"there are no weights of {self.bits} bits that are {self.values}")
        if is_whole and (self.has_mins or self.zero_dtype or self.factor_group or self.bits < 8):
            raise ValueError("weights with one scale for each row, or none, have 8 or 16 bits, and nothing else")
        if self.is_half and not is_whole:
            raise ValueError("weights of 16 bits have no scales")
        if self.has_mins and self.zero_dtype:
            raise ValueError("weights have mins or zeros, not both")

    @property
    def name(self) -> str:
        """Return a name that no other format has, such as "int4/32+offset8": groups of 32 numbers, with float16 scales.

        Dtypes are named but those of most formats.
        """
        group = f"/{self.group}" if self.group else ""
        factors = "" if self.factor_dtype == "float16" else f":{self.factor_dtype}"
        more = {
            f"offset{self.offset}": self.offset != 0,
            f"scales:{self.scale_dtype}": self.scale_dtype != "float16",
            "mins": self.has_mins,
            f"zeros:{self.zero_dtype}": self.zero_dtype is not None,
            f"factors/{self.factor_group}{factors}": self.factor_group is not None,
            "ordered": self.is_ordered,
        }
        numbers = f"int{self.bits}" if self.values == "integer" else self.values
        return numbers + group + "".join(f"+{name}" for name, is_there in more.items() if is_there)

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the arrays that a matrix is held as, in the order of `PARTS`."""
        has_factors = self.factor_group is not None
        present = {
            "codes": True,
            "scales": not self.is_half,
            "mins": self.has_mins,
            "zeros": self.zero_dtype is not None,
            "scale_factors": has_factors,
            "min_factors": has_factors and self.has_mins,
            "order": self.is_ordered,
        }
        return tuple(name for name in PARTS if present[name])

    @property
    def is_half(self) -> bool:
        """Return whether codes are 16-bit numbers."""
        return self.values in HALVES

    @property
    def scales_rows(self) -> bool:
        """Return whether all numbers of a row share a scale, which then multiplies sums over the row."""
        return self.group is None and not self.is_half

    @property
    def is_packed(self) -> bool:
        """Return whether several codes share a byte, where they are packed at all."""
        return self.bits < 8

    def dtype(self, part: str) -> np.dtype:
        """Return the dtype in which a host holds a part."""
        if part == "codes":
            return self.code_dtype
        if part == "order":
            return np.dtype(np.int32)
        if part == "zeros":
            assert self.zero_dtype is not None
            return _dtype(self.zero_dtype)
        return _dtype(self.factor_dtype if part.endswith("factors") else self.scale_dtype)

    def device_dtype(self, part: str, *, packed: bool) -> np.dtype:
        """Return the dtype in which a device holds a part: codes of 4 bits that are not packed are uint4."""
        return _dtype("uint4") if part == "codes" and self.bits == 4 and not packed else self.dtype(part)

    @property
    def code_dtype(self) -> np.dtype:
        """Return the dtype in which a host holds codes."""
        return _dtype("uint8" if self.is_packed else _EIGHT_BITS.get(self.values, self.values))

    def width(self, part: str, num_inputs: int, *, packed: bool = False) -> int:
        """Return the number of entries that a part has in each row of `num_inputs` numbers.

        Raises ValueError if the numbers of a row do not divide evenly into bytes, scales, factors, or chunks that are
        widened together.
        """
        if part == "order":
            per, count = 1, num_inputs
        elif part == "codes":
            per = CHUNK if packed and self.is_packed else _WIDENED if self.is_half else 1
            count = num_inputs * self.bits // 8 if packed and self.is_packed else num_inputs
        else:
            per = (self.factor_group if part.endswith("factors") else self.group) or num_inputs
            count = num_inputs // per
        if num_inputs % per:
            raise ValueError(f"rows of {num_inputs} numbers are no multiple of {per}")
        return count

    def num_bytes(self, num_outputs: int, num_inputs: int, *, packed: bool = True) -> int:
        """Return the bytes of a matrix [num_outputs, num_inputs]."""
        return num_outputs * sum(
            num_bytes(self.width(part, num_inputs, packed=packed), self.device_dtype(part, packed=packed))
            for part in self.parts
        )

    def table(self) -> np.ndarray:
        """Return the float32 numbers of all codes of fewer than 8 bits, by code."""
        if self.values in CODEBOOKS:
            return np.array(CODEBOOKS[self.values], np.float32)
        return np.arange(2**self.bits, dtype=np.float32) - np.float32(self.offset)


INT8 = WeightFormat(8, scale_dtype="float32")
"""8-bit integers with a scale for each output."""


def num_bytes(count: int, dtype: DTypeLike) -> int:
    """Return the bytes in which a device holds `count` numbers; two 4-bit numbers share a byte."""
    return -(-count // 2) if np.dtype(dtype).name in ("uint4", "int4") else count * np.dtype(dtype).itemsize


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))
