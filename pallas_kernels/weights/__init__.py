"""Weights held in fewer bits: their formats, how their arrays lie in memory, and the numbers that they represent.

A matrix [out, in] is held as several arrays, its parts: a code for each number, and scales, mins or zeros for each
group of numbers of a row. `format.py` lists the parts of a format; `dequantize` in `parts.py` defines what is correct.
"""

from .format import CODEBOOKS, HALVES, INT8, PARTS, WeightFormat, num_bytes
from .parts import dequantize, pack, unpack

__all__ = ["CODEBOOKS", "HALVES", "INT8", "PARTS", "WeightFormat", "dequantize", "num_bytes", "pack", "unpack"]
