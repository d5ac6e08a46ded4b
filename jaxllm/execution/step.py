"""The step: one pure function from parameters, pool and packed inputs to tokens. Everything in it is traced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.models.model import Model, TokenBatch
from jaxllm.sampling.sampler import Logprobs, SamplingBatch, sample_full, sample_plain
from pallas_kernels.paged_attention import AttentionBatch, KVPool

from .batch import BatchShape, float_fields, int_fields, unpack

# Rows of logits that exist at a time. Steps rarely fill their rows, and nothing is computed for tiles without any.
LOGITS_TILE = 64


class StepOutput(NamedTuple):
    """What comes back from the device; rows beyond the step's sequences hold garbage."""

    tokens_s: Array
    """As many rows as the largest bucket has, so that the next step can read it whatever its bucket."""
    logprobs: Logprobs | None


class StepShape(NamedTuple):
    """What a program is compiled for."""

    batch: BatchShape
    is_full: bool
    num_logprobs: int
    max_rows: int
    """Rows of `tokens_s`."""


def run_step(
    params: Any,
    kv_pool: KVPool,
    previous_tokens: Array,
    ints: Array,
    floats: Array,
    *allowed_bits_sw: Array,
    model: Model,
    shape: StepShape,
    implementation: str | None = None,
) -> tuple[KVPool, StepOutput]:
    """Run one step: `previous_tokens` are the last one's `tokens_s`; `allowed_bits_sw` is given if the step is full."""
    i = unpack(ints, int_fields(shape.batch))
    s = shape.batch.bucket.num_seqs
    tokens, attention, sampling = _batches(i, unpack(floats, float_fields(shape.batch)), previous_tokens, s)
    hidden_td, kv_pool = model.forward(params, kv_pool, tokens, attention, implementation=implementation)
    hidden_sd = hidden_td[jnp.maximum(i["query_ends"] - 1, 0)]

    def sample(hidden_rd: Array, sampling: SamplingBatch, *allowed: Array) -> tuple[Array, Logprobs | None]:
        logits_rv = model.logits(params, hidden_rd)
        if shape.is_full:
            return sample_full(logits_rv, sampling, *allowed, num_logprobs=shape.num_logprobs)
        return sample_plain(logits_rv, sampling), None

    tokens_s, logprobs = map_row_tiles(sample, (hidden_sd, sampling, *allowed_bits_sw), i["num_seqs"], LOGITS_TILE)
    return kv_pool, StepOutput(jnp.pad(tokens_s, (0, shape.max_rows - s)), logprobs)


def _batches(
    i: dict[str, Array], f: dict[str, Array], previous_tokens: Array, s: int
) -> tuple[TokenBatch, AttentionBatch, SamplingBatch]:
    # A row that continues a step in flight has its token on the device only. Such rows are decodes: row i is token i.
    sampled_s = previous_tokens[i["previous_rows"]]
    first_ids_s = jnp.where(i["from_previous"] == 1, sampled_s, i["token_ids"][:s])
    tokens = TokenBatch(
        token_ids_t=lax.dynamic_update_slice_in_dim(i["token_ids"], first_ids_s, 0, 0),
        positions_t=i["positions"],
        rope_lengths_t=i["rope_lengths"],
    )
    attention = AttentionBatch(
        slots_t=i["slots"],
        block_tables_sm=i["block_tables"],
        context_lens_s=i["context_lens"],
        query_ends_s=i["query_ends"],
        num_decodes=i["num_decodes"],
        tile_seqs_i=i["tile_seqs"],
        tile_rows_i=i["tile_rows"],
        num_tiles=i["num_tiles"],
    )
    sampling = SamplingBatch(
        seeds_s2=i["seeds"],
        positions_s=i["sampled_positions"],
        temperature_s=f["temperature"],
        top_k_s=i["top_k"],
        top_p_s=f["top_p"],
        min_p_s=f["min_p"],
    )
    return tokens, attention, sampling


def map_row_tiles(function: Callable[..., Any], arrays: Any, num_rows: Array, tile: int) -> Any:
    """Apply `function` to `tile` rows of all arrays at a time, to the tiles that hold the first `num_rows` rows.

    `function` takes the arrays as arguments and returns a pytree with as many rows; rows of other tiles are 0.
    """
    total = jax.tree.leaves(arrays)[0].shape[0]
    if total <= tile:
        return function(*arrays)
    arrays = jax.tree.map(lambda x: jnp.pad(x, ((0, -total % tile), *[(0, 0)] * (x.ndim - 1))), arrays)
    cut = partial(lax.dynamic_slice_in_dim, slice_size=tile)
    put = partial(lax.dynamic_update_slice_in_dim, axis=0)

    def body(index: Array, results: Any) -> Any:
        start = index * tile
        part = function(*jax.tree.map(lambda x: cut(x, start), arrays))
        return jax.tree.map(lambda whole, rows: put(whole, rows, start), results, part)

    rows = jax.tree.leaves(arrays)[0].shape[0]
    spec = jax.eval_shape(lambda: function(*jax.tree.map(lambda x: cut(x, 0), arrays)))
    empty = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), spec)
    results = lax.fori_loop(0, (num_rows + tile - 1) // tile, body, empty)
    return jax.tree.map(lambda x: x[:total], results)
