"""Run a model without an engine: parameters from HF tensors, one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.models import LayerLoop, Model, ModelConfig, ModelSpecs, ParamSpec, TokenBatch, get_family
from jaxllm.models.params import ArraySpec, array_specs, unflatten
from jaxllm.models.plan import CacheGroup, LayerPlan
from jaxllm.models.quantization import quantize
from jaxllm.models.recurrence import StateOps, pick_state_ops
from jaxllm.models.towers.tower import Tower
from jaxllm.models.towers.whisper import ClipEncoder
from pallas_kernels.indexer import Indexer, IndexerShape
from pallas_kernels.latent_attention import LatentAttention, LatentShape
from pallas_kernels.paged_attention import (
    AttentionBatch,
    AttentionShape,
    BlockShape,
    KVPool,
    NoAttention,
    PagedAttention,
)
from pallas_kernels.paged_attention.tiles import XLA_TILES
from pallas_kernels.recurrent_state import StateBatch
from tests.models.tiny import BLOCK_SIZE, CASES, POOLING_CASES, Golden, read_hf_config, read_tensors
from tests.quick import QUICK_COMPILE

ROWS = 80
"""Rows of the one program that runs whole sequences, chunks and decodes; the longest golden has 75."""
# Out of order, so that a model that ignores the table fails. Block 0 is the null block.
BLOCK_IDS = (3, 1, 5, 2, 4)


def build_model(
    case: str, *, dtype: Any = jnp.float32, loop: LayerLoop = LayerLoop.SCAN, quantization: str | None = None
) -> Model:
    """Return the model of a tiny case."""
    assert case in (*CASES, *POOLING_CASES)
    hf = read_hf_config(case)
    family = get_family(hf["architectures"][0])
    return Model(ModelSpecs(family.read_config(hf, read_tensors(case)), dtype, loop, quantization=quantization))


def load(model: Model | Tower | ClipEncoder, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the parameters of a model or of a vision tower, from HF tensors."""

    def read(array: ArraySpec) -> Any:
        weights = jnp.asarray(_read(array, tensors), array.dtype)
        if array.format is None:
            return weights
        return quantize(weights, array.num_inputs, array.format, is_packed=array.is_packed)

    return unflatten({path: read(array) for path, array in array_specs(model.specs.param_specs(tensors)).items()})


def to_ours(layout: str, shape: tuple[int, ...], tensor: np.ndarray) -> np.ndarray:
    """Apply a layout such as "(n h) d -> d n h", giving an array of `shape`."""
    theirs, ours = layout.replace("(", "").replace(")", "").split("->")
    sizes = dict(zip(ours.split(), shape, strict=True))
    axes = [axis for axis in theirs.split() if axis != "1"]
    return tensor.reshape([sizes[axis] for axis in axes]).transpose([axes.index(axis) for axis in ours.split()])


class Runner:
    """Runs one sequence in blocks of 16 over a pool whose unwritten slots are NaN."""

    def __init__(
        self, model: Model, params: Mapping[str, Any], attention: Callable[..., tuple[Array, KVPool]] | None = None
    ) -> None:
        self.model, self.params = model, params
        plan = model.plan
        self.attentions: list[Any] = [attention or attention_of(group) for group in plan.attention_groups]
        self.attentions += [recurrence_of(group) for group in plan.state_groups]
        inputs = empty_pools(model.config), *self.inputs(np.zeros(1, np.int32), 0, 1)
        self.lowered = jax.jit(self._step).lower(params, *inputs)

    @cached_property
    def step(self) -> Any:
        """Return the compiled step."""
        return self.lowered.compile(compiler_options=dict(QUICK_COMPILE))

    def whole(self, golden: Golden) -> np.ndarray:
        """Return log-probabilities [tokens, v] of prompt and decodes, run as one chunk or in the model's attention
        chunks."""
        pools, logprobs = empty_pools(self.model.config), []
        for start, ids in self.cut(golden.sequence, ROWS):
            some, pools = self.run(pools, ids, start, len(golden.prompt))
            logprobs.append(some)
        return np.concatenate(logprobs)

    def incremental(self, golden: Golden, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """Run the prompt in chunks, then decode greedily; return log-probabilities [decodes, v] and tokens."""
        pools, prompt_len = empty_pools(self.model.config), len(golden.prompt)
        logprobs = np.zeros((0, 0), np.float32)
        for start, ids in self.cut(golden.prompt, chunk):
            logprobs, pools = self.run(pools, ids, start, prompt_len)
        steps, tokens = [logprobs[-1]], [int(logprobs[-1].argmax())]
        while len(tokens) < len(golden.tokens):
            position = prompt_len + len(tokens) - 1
            logprobs, pools = self.run(pools, np.asarray(tokens[-1:]), position, prompt_len)
            steps.append(logprobs[0])
            tokens.append(int(logprobs[0].argmax()))
        return np.stack(steps), np.asarray(tokens)

    def run(
        self, pools: tuple[KVPool, ...], token_ids: np.ndarray, start: int, prompt_len: int
    ) -> tuple[np.ndarray, tuple[KVPool, ...]]:
        """Run one chunk; return log-probabilities [tokens, v] and the pools."""
        logprobs, pools = self.step(self.params, pools, *self.inputs(token_ids, start, prompt_len))
        return np.asarray(logprobs)[: len(token_ids)], pools

    def cut(self, token_ids: np.ndarray, chunk: int) -> list[tuple[int, np.ndarray]]:
        """Return chunks of up to `chunk` tokens with their first positions; none spans two of the model's attention
        chunks."""
        sizes = {chunk, *(group.attention_chunk or chunk for group in self.model.plan.groups)}
        starts = sorted({start for size in sizes for start in range(0, len(token_ids), size)})
        return list(zip(starts, np.split(token_ids, starts[1:]), strict=True))

    def inputs(self, token_ids: np.ndarray, start: int, prompt_len: int) -> tuple[TokenBatch, list[Any]]:
        """Return a chunk's tokens, and the batch of each cache group."""
        tokens, attention = chunk_inputs(token_ids, start, prompt_len)
        plan = self.model.plan
        batches = [within_chunk(attention, group.attention_chunk, start) for group in plan.attention_groups]
        return tokens, [*batches, *(state_inputs(start, len(token_ids)) for _ in plan.state_groups)]

    def _step(
        self, params: Mapping[str, Any], pools: tuple[KVPool, ...], tokens: TokenBatch, batches: list[AttentionBatch]
    ) -> tuple[Array, tuple[KVPool, ...]]:
        hidden_td, pools, _ = self.model.forward(params, pools, tokens, batches, attention=self.attentions)
        return jax.nn.log_softmax(self.model.logits(params, hidden_td, hidden_td.shape[0])), pools


def empty_pools(config: ModelConfig, dtype: Any = jnp.float32) -> tuple[KVPool, ...]:
    """Return pools of NaN, one for each cache group."""
    plan, num_blocks = LayerPlan(config.layers), 1 + len(BLOCK_IDS)
    ops = [attention_of(group, dtype) for group in plan.attention_groups]
    specs = tuple(op.pool_spec(plan.depth(group), num_blocks) for op, group in zip(ops, plan.groups, strict=False))
    specs += tuple(state_ops_of(group, dtype).pool_spec(plan.depth(group), 2) for group in plan.state_groups)
    return jax.tree.map(lambda array: jnp.full(array.shape, jnp.nan, array.dtype), specs)


def attention_of(group: CacheGroup, dtype: Any = jnp.float32) -> Any:
    """Return the op of a cache group's layers in plain XLA: their attention, their indexer, or none."""
    dtype = jnp.dtype(dtype)
    if not group.num_heads:
        return NoAttention(BlockShape(BLOCK_SIZE, dtype))
    if group.is_indexer:
        assert group.top_k is not None
        return Indexer(IndexerShape(group.num_heads, group.head_dim, group.top_k, BLOCK_SIZE, dtype, dtype))
    if (latent_dim := group.latent_dim) is not None:
        sizes = group.num_heads, latent_dim, group.head_dim - latent_dim
        return LatentAttention(LatentShape(*sizes, BLOCK_SIZE, dtype, dtype, group.top_k or group.window))
    return PagedAttention(AttentionShape(group.num_heads, group.num_kv_heads, group.head_dim, BLOCK_SIZE, dtype, dtype))


def state_ops_of(group: CacheGroup, dtype: Any = jnp.float32) -> StateOps:
    """Return the ops of layers with recurrent state, in plain XLA."""
    assert group.state is not None
    return pick_state_ops(group.state, 1, dtype, lambda op, shape: op.pick(shape, "cpu", "xla")[0])


def recurrence_of(group: CacheGroup) -> Callable[..., Any]:
    """Return the function that `Model.forward` takes for a group of layers with recurrent state."""
    return state_ops_of(group).run


def state_inputs(start: int, count: int | Array) -> StateBatch:
    """Return the slots of one sequence's state for a chunk: slot 1, if it has begun."""
    none, one, ends = int32([0]), int32([1]), int32([count])
    return StateBatch(
        query_starts_s=none,
        query_ends_s=ends,
        num_decodes=int32(count == 1),
        read_slots_s=int32([start > 0]),
        write_slots_s=one,
        save_ends_s=ends,
        save_slots_s=none,
    )


def int32(values: Any) -> Array:
    """Return a device array of int32."""
    return jnp.asarray(values, jnp.int32)


def chunk_inputs(token_ids: np.ndarray, start: int, prompt_len: int) -> tuple[TokenBatch, AttentionBatch]:
    """Return the inputs of one sequence's chunk, padded to the program's rows."""
    count = len(token_ids)
    positions = np.arange(start, start + count)
    blocks = np.asarray(BLOCK_IDS)[positions // BLOCK_SIZE]

    def padded(values: np.ndarray) -> Array:
        return int32(np.pad(values, (0, ROWS - count)))

    tokens = TokenBatch(
        padded(token_ids),
        padded(positions),
        padded(np.maximum(prompt_len, positions + 1)),
        *[padded(0 * positions)] * 2,
    )
    tile_rows = np.arange(0, 0 if count == 1 else count, XLA_TILES.query)
    max_tiles = -(-ROWS // XLA_TILES.query)
    attention = AttentionBatch(
        slots_t=padded(blocks * BLOCK_SIZE + positions % BLOCK_SIZE),
        block_tables_sm=int32([BLOCK_IDS]),
        context_lens_s=int32([start + count]),
        query_starts_s=int32([0]),
        query_ends_s=int32([count]),
        num_decodes=int32(count == 1),
        tile_seqs_i=int32(np.zeros(max_tiles)),
        tile_rows_i=int32(np.pad(tile_rows, (0, max_tiles - len(tile_rows)))),
        num_tiles=int32(len(tile_rows)),
    )
    return tokens, attention


def within_chunk(attention: AttentionBatch, size: int | None, start: int) -> AttentionBatch:
    """Return the batch of tokens that start at a position, for layers that attend within chunks of `size`, if any."""
    if size is None:
        return attention
    first = start // size * size
    blocks = np.asarray(BLOCK_IDS[first // BLOCK_SIZE :])
    tables = int32([np.pad(blocks, (0, len(BLOCK_IDS) - len(blocks)))])
    return attention._replace(block_tables_sm=tables, context_lens_s=attention.context_lens_s - first)


def _read(array: ArraySpec, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    params = [_read_param(spec, tensors) for spec in array.params.values()]
    if array.shape == params[0].shape:
        return params[0]
    # Merged arrays have one shard here.
    return np.concatenate(params, axis=array.axes.index("rows") - 1).reshape(array.shape)


def _read_param(spec: ParamSpec, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    shape, parts = spec.shape[spec.num_lead :], []
    for source in spec.sources:
        tensor = tensors[source]
        assert tensor.shape == spec.hf_shape, source
        all_experts = spec.num_experts and len(spec.sources) == (spec.shape[0] if spec.stacked else 1)
        for part in tensor if all_experts else [tensor]:
            ours = to_ours(spec.layout, shape, part[spec.hf_index])
            if spec.head_order is not None:
                ours = np.take(ours, spec.head_order, axis=spec.axes.index("head_dim") - spec.num_lead)
            parts.append(ours)
    return np.stack(parts).reshape(spec.shape)
