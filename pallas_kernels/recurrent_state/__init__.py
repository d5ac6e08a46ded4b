"""What ops of recurrent state share: a pool that holds a state of fixed size for each sequence, in slots.

An op takes the tokens of a step, brings the states of their sequences up to date and returns what each token reads.
Pools are of all layers, [num_layers * num_slots, ...]: layer i owns slots [i * num_slots, (i + 1) * num_slots), the
first of which is the layer's null slot, 0 of the batch: what is in it is never used.
"""

from .batch import StateBatch
from .op import StateOp

__all__ = ["StateBatch", "StateOp"]
