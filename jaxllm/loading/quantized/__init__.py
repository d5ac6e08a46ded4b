"""Checkpoints with quantized matrices, in the formats of the tools that make them.

`config.json` names the method (`methods.py`), before weights are opened: each method's file turns it into a `Scheme`
with the tensor layout of each module. `QuantizedCheckpoint` presents those tensors as one matrix.
"""

from jaxllm.loading.quantized.checkpoint import QuantizedCheckpoint, with_quantized
from jaxllm.loading.quantized.methods import METHODS, read_scheme

__all__ = ["METHODS", "QuantizedCheckpoint", "read_scheme", "with_quantized"]
