"""Run a model that pools without an engine, all texts of a golden in one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.models import Model, TokenBatch
from pallas_kernels.paged_attention import AttentionBatch
from pallas_kernels.paged_attention.batches import ragged_batch
from pallas_kernels.paged_attention.tiles import XLA_TILES
from tests.models.running import attention_of, int32
from tests.models.tiny import BLOCK_SIZE, folder
from tests.quick import QUICK_COMPILE


class PooledGolden(NamedTuple):
    """A text, and HF's output for it in float32."""

    tokens: np.ndarray
    types: np.ndarray
    output: np.ndarray
    """The last hidden states [t, d] of an embedding model, [o] of a classifier of texts, [t, o] of a classifier of
    tokens."""


class Outputs(NamedTuple):
    """A model's outputs for texts in one step."""

    of_texts: list[np.ndarray]
    """[o] each."""
    of_tokens: list[np.ndarray]
    """[t, o] each."""


def read_pooled_goldens(case: str) -> list[PooledGolden]:
    """Return a case's goldens, the shortest text, of one token, first."""
    with np.load(folder(case) / "golden.npz") as arrays:
        count = sum(name.startswith("tokens_") for name in arrays)
        return [PooledGolden(*(arrays[f"{name}_{i}"] for name in PooledGolden._fields)) for i in range(count)]


def run_pooled(model: Model, params: Mapping[str, Any], texts: Sequence[PooledGolden]) -> Outputs:
    """Run texts, those of one token first, as one step over pools whose unwritten slots are NaN."""
    tokens, batch = step_inputs(texts)
    groups = model.plan.groups
    attention: list[Any] = [attention_of(group) for group in groups]
    num_blocks = 1 + int(batch.block_tables_sm.max())
    specs = tuple(
        op.pool_spec(model.plan.depth(group), num_blocks) for op, group in zip(attention, groups, strict=True)
    )
    pools = jax.tree.map(lambda array: jnp.full(array.shape, jnp.nan, array.dtype), specs)

    def step(params: Mapping[str, Any], pools: Any, tokens: TokenBatch, batch: AttentionBatch) -> tuple[Array, Array]:
        hidden_td, _, _ = model.forward(params, pools, tokens, [batch] * len(groups), attention=attention)
        return model.pool(params, hidden_td, batch), model.pool_tokens(params, hidden_td)

    lowered = jax.jit(step).lower(params, pools, tokens, batch)
    compiled = lowered.compile(compiler_options=dict(QUICK_COMPILE))
    of_texts_so, of_tokens_to = map(np.asarray, compiled(params, pools, tokens, batch))
    places = zip(np.asarray(batch.query_starts_s), np.asarray(batch.query_ends_s), strict=True)
    rows = [of_tokens_to[start:end] for start, end in places]
    return Outputs(list(of_texts_so[: len(texts)]), rows[: len(texts)])


def step_inputs(texts: Sequence[PooledGolden]) -> tuple[TokenBatch, AttentionBatch]:
    """Return the inputs of a step of whole texts, with rows of padding between and after them."""
    lengths, blocks, next_block = [len(text.tokens) for text in texts], [], 1
    for length in lengths:
        count = -(-length // BLOCK_SIZE)
        # Out of order, so that a model that ignores the table fails.
        blocks.append(list(range(next_block, next_block + count))[::-1])
        next_block += count
    chunks = [(length, length) for length in lengths]
    batch = ragged_batch(chunks, blocks, block_size=BLOCK_SIZE, query_tile=XLA_TILES.query, row_alignment=4, padding=2)
    arrays = np.zeros((5, len(batch.slots_t)), np.int32)
    for text, start, length in zip(texts, np.asarray(batch.query_starts_s).tolist(), lengths, strict=False):
        end = start + length
        arrays[:4, start:end] = text.tokens, np.arange(length), np.full(length, length), text.types
    return TokenBatch(*map(int32, arrays)), jax.tree.map(jnp.asarray, batch)
