"""Checkpoints whose matrices are quantized, in the forms of the tools that make them.

`config.json` says by which method (`methods.py`), before weights are opened: each method's file makes a `Scheme` of it,
which knows how each module's tensors lie. `QuantizedCheckpoint` offers those tensors as the one matrix that they are.
"""

from jaxllm.loading.quantized.checkpoint import QuantizedCheckpoint, with_quantized
from jaxllm.loading.quantized.methods import METHODS, read_scheme

__all__ = ["METHODS", "QuantizedCheckpoint", "read_scheme", "with_quantized"]
