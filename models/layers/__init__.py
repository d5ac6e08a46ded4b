"""Layers shared by the families, as Flax NNX modules that declare parameters and compute; none holds state.

Constructors run under `nnx.eval_shape`, so they allocate nothing. Weights are stored [out, in], as HF stores them.
"""

from .attention import Attention
from .cross import CrossDecoderLayer
from .decoder import DecoderLayer
from .embedding import Embedding
from .frame import EncoderFrame, Frame
from .gpt import GPTFrame, GPTLayer
from .linear import ACTIVATIONS, linear
from .mlp import GatedMLP, PlainMLP
from .norm import LayerNorm, RMSNorm
from .params import declare

__all__ = [
    "ACTIVATIONS",
    "Attention",
    "CrossDecoderLayer",
    "DecoderLayer",
    "Embedding",
    "EncoderFrame",
    "Frame",
    "GPTFrame",
    "GPTLayer",
    "GatedMLP",
    "LayerNorm",
    "PlainMLP",
    "RMSNorm",
    "declare",
    "linear",
]
