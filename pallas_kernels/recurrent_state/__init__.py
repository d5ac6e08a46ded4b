"""Ops of recurrent state, and their common base: a pool holds a state of fixed size for each sequence, in slots.

An op takes the tokens of a step, updates the states of their sequences and returns what each token reads. A pool holds
all layers, [num_layers * num_slots, ...]: layer i owns slots [i * num_slots, (i + 1) * num_slots). The first of them,
slot 0 of the batch, is the layer's null slot, and its contents are never used.
"""

from .batch import StateBatch
from .op import StateOp

__all__ = ["StateBatch", "StateOp"]
