"""Weights held in fewer bits: what a format is, how its arrays lie in memory, and what numbers they stand for.

A matrix [out, in] is held as several arrays, its parts: a code for each number, and for each group of numbers of a row
what takes codes to numbers. `format.py` says which parts a format has; `parts.py` is the definition of correct.
"""

from .format import CODEBOOKS, HALVES, INT8, PARTS, WeightFormat, num_bytes
from .parts import dequantize, pack, unpack

__all__ = ["CODEBOOKS", "HALVES", "INT8", "PARTS", "WeightFormat", "dequantize", "num_bytes", "pack", "unpack"]
