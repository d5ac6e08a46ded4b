"""The step of a draft head: one pure function from parameters, pools, features and packed inputs to guesses.

Everything in this module is traced.

At position p a head takes the model's features of p and the token at p + 1, and guesses the token at p + 2. Where the
token at p + 1 is a guess itself, the model has no features of p yet, and the head's hidden state of the step before
takes their place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jaxllm.execution.kv_pool import FeatureGroup
from jaxllm.execution.packing import PackedInputs, unpack
from jaxllm.execution.step import (
    DeviceState,
    StepOutput,
    StepShape,
    StepStatics,
    draw_tokens,
    known_tokens,
    map_rows,
    pad_rows,
)


def run_head_step(
    params: Any,
    state: DeviceState,
    previous_tokens: Array,
    ints: Array,
    floats: Array,
    rare: None,
    features: Array,
    *,
    statics: StepStatics,
    shape: StepShape,
    reads: FeatureGroup,
) -> tuple[DeviceState, StepOutput]:
    """Run one step, as `run_step` does; `features` is the model's pool of features, which `reads` describes.

    It is not donated.
    """
    model, caches = statics.model, statics.caches
    assert rare is None  # guesses follow no rules
    inputs = unpack(ints, floats, shape.batch)
    tokens = known_tokens(inputs, previous_tokens)
    num_tokens = inputs.sequences.query_ends_s.max()
    # All cache groups of a head share the features' block table.
    features_tf = reads.read(features, inputs.placements[0].slots_t)
    features_td = model.read_features(params, features_tf, num_tokens)
    features_td = _with_own(features_td, inputs, state.hidden_sd)
    arguments = caches.arguments(inputs, decodes_only=shape.decodes_only)
    hidden_td, pools, _ = model.forward(params, state.pools, tokens, features_td=features_td, **arguments)
    hidden_sd = hidden_td[inputs.logit_rows.logit_tokens_s]
    # The noise is that of the guessed token, one position after the head's.
    sampling = inputs.sampling._replace(positions_s=inputs.sampling.positions_s + 1)
    draw = partial(draw_tokens, params=params, statics=statics)
    num_rows = inputs.logit_rows.num_rows
    rows = hidden_sd, sampling
    tokens_s = map_rows(draw, rows, num_rows=num_rows, tile=statics.logits_tile, few_rows=statics.few_rows)
    state = DeviceState(pools, None, pad_rows(hidden_sd, shape.max_rows))
    return state, StepOutput(pad_rows(tokens_s, shape.max_rows), None)


def _with_own(features_td: Array, inputs: PackedInputs, hidden_sd: Array) -> Array:
    """Return features with the head's own hidden states in place of those of tokens that it guessed a step before."""
    # Such rows are decodes: row i is token i.
    previous_rows_s = inputs.logit_rows.previous_rows_s
    own_sd, first_sd = hidden_sd[previous_rows_s], features_td[: previous_rows_s.shape[0]]
    first_sd = jnp.where(previous_rows_s[:, None] >= 0, own_sd, first_sd)
    return lax.dynamic_update_slice_in_dim(features_td, first_sd, 0, 0)
