"""The tokens of a step, as a model takes them."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array


class TokenBatch(NamedTuple):
    """The tokens of a step, int32 [t] each.

    `rope_lengths_t` is max(prompt length, position + 1): the sequence length that dynamic RoPE scales by. `type_ids_t`
    tells the second text of a pair, 1, from the first. `adapter_slots_t` is the slot of each token's LoRA adapter, 0
    for none.
    """

    token_ids_t: Array
    positions_t: Array
    rope_lengths_t: Array
    type_ids_t: Array
    adapter_slots_t: Array
