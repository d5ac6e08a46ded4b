"""The step of a model that generates: one pure function from parameters, pools and packed inputs to tokens.

Everything in this module is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.execution.caches import Caches, Pools
from jaxllm.execution.mesh import replicated
from jaxllm.execution.packing import BatchShape, PackedInputs, unpack
from jaxllm.models.inputs import Steering, TokenBatch
from jaxllm.models.model import Model
from jaxllm.models.params import MESH_AXES
from jaxllm.sampling.inputs import RareRules, Sampling, SamplingBatch
from jaxllm.sampling.logprobs import Logprobs
from jaxllm.sampling.processors import LogitsProcessor
from jaxllm.sampling.sampler import sample_full, sample_plain, sample_plain_shard, sample_truncated
from jaxllm.sampling.shards import VocabShards
from jaxllm.sampling.token_counts import add_tokens
from jaxllm.sampling.transcripts import TranscriptRules, TranscriptState, apply_rules


class DeviceState(NamedTuple):
    """The arrays that stay on the device from step to step; they are donated to each step."""

    pools: Pools
    counts_cv: Any
    """The token counts (`sampling.token_counts`): row 0 is for rows that count nothing, then there is one per sequence.
    None in steps that are not full."""
    hidden_sd: Any = None
    """The hidden states of the last step's rows, in a draft head's steps; None in others."""


class StepOutput(NamedTuple):
    """The arrays that come back from the device; rows beyond the step's own hold garbage."""

    tokens_s: Array
    """The tokens have as many rows as the largest bucket, so that the next step can read them in any bucket."""
    logprobs: Logprobs | None
    features_tf: Array | None = None
    """The tokens' features, in an engine whose requests may ask for hidden states."""


class StepShape(NamedTuple):
    """The shape that a step's program is compiled for."""

    batch: BatchShape
    sampling: Sampling
    decodes_only: bool
    """True if no sequence has more than one token in the step, which makes attention cheaper."""
    num_logprobs: int
    logprobs_mode: str
    max_rows: int
    """The number of rows of `tokens_s`."""

    @property
    def is_full(self) -> bool:
        """Return whether the program takes token counts and rare rules, and returns log-probabilities."""
        return self.sampling is Sampling.FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatics:
    """The constants of a model's steps, which their programs are traced with."""

    model: Model
    caches: Caches
    mesh: Mesh
    processors: tuple[LogitsProcessor, ...] = ()
    transcript_rules: TranscriptRules | None = None
    logits_tile: int
    """The number of rows whose logits exist at a time."""
    few_rows: int | None = None
    """The number of rows up to which padding is worth skipping; None if padding rows cost next to nothing.

    A step that is not full and uses no more rows computes the logits of only this many; a plain one reads those of a
    single row alone. Other steps of no more rows sample the rows in use one by one.
    """
    skips_unused: bool = True
    """See `sampling.branches`."""


def run_step(
    params: Any,
    state: DeviceState,
    previous_tokens: Array,
    ints: Array,
    floats: Array,
    rare: RareRules | None,
    *,
    statics: StepStatics,
    shape: StepShape,
) -> tuple[DeviceState, StepOutput]:
    """Run one step: `previous_tokens` are the last one's `tokens_s`; `rare` and token counts are a full step's."""
    model, caches, few_rows = statics.model, statics.caches, statics.few_rows
    inputs = unpack(ints, floats, shape.batch)
    tokens = known_tokens(inputs, previous_tokens)
    arguments = caches.arguments(inputs, decodes_only=shape.decodes_only)
    out = model.forward(params, caches.of_layers(state.pools), tokens, **arguments, **_beside(params, inputs))
    pools = caches.with_features(out.pools, state.pools, out.features_tf, inputs)
    returned = out.features_tf if model.returns_features else None
    num_rows = inputs.logit_rows.num_rows
    rows = (out.hidden_td[inputs.logit_rows.logit_tokens_s], inputs.sampling, _transcripts(inputs, tokens))
    if rare is None:
        draw = partial(draw_tokens, params=params, statics=statics, truncates=shape.sampling is Sampling.TRUNCATED)
        tokens_s = map_rows(draw, rows, num_rows=num_rows, tile=statics.logits_tile, few_rows=few_rows)
        return DeviceState(pools, None), StepOutput(pad_rows(tokens_s, shape.max_rows), None, returned)

    def sample_rows(logits_rv: Array, batch: SamplingBatch, heard: Any, *settings: Any) -> tuple[Array, Logprobs]:
        return sample_full(
            logits_rv,
            batch,
            *settings,
            uses=inputs.uses,
            counts_cv=state.counts_cv,
            num_logprobs=shape.num_logprobs,
            logprobs_mode=shape.logprobs_mode,
            processors=statics.processors,
            last_edit=_rules_of(heard, statics),
            skips_unused=statics.skips_unused,
        )

    def sample(num_rows: Array, hidden_rd: Array, *settings: Any) -> tuple[Array, Logprobs]:
        row_inputs = _gathered(model.logits(params, hidden_rd, num_rows), statics.mesh), *settings
        return _map_few(sample_rows, row_inputs, num_rows=num_rows, few_rows=few_rows)

    tokens_s, logprobs = _map_row_tiles(
        sample, (*rows, inputs.rules, rare), num_rows=num_rows, tile=statics.logits_tile
    )
    counted = (inputs.rules.count_rows_s, tokens_s, rare.drafts_sd, rare.draft_rows_sd)
    counts_cv = add_tokens(state.counts_cv, *counted)
    return DeviceState(pools, counts_cv), StepOutput(pad_rows(tokens_s, shape.max_rows), logprobs, returned)


def draw_tokens(
    num_rows: Array,
    hidden_sd: Array,
    batch: SamplingBatch,
    transcripts: TranscriptState | None = None,
    *,
    params: Any,
    statics: StepStatics,
    truncates: bool = False,
) -> Array:
    """Return the token of each row, by temperature and seed, the rules of transcripts, and truncation if `truncates`.

    Rows from `num_rows` on are padding.
    """
    edit, logits_sv = _rules_of(transcripts, statics), statics.model.logits(params, hidden_sd, num_rows)
    if edit is not None:
        logits_sv = edit(_gathered(logits_sv, statics.mesh))
    if truncates:
        rows = _gathered(logits_sv, statics.mesh), batch
        sampler = partial(sample_truncated, skips_unused=statics.skips_unused)
        return _map_few(sampler, rows, num_rows=num_rows, few_rows=statics.few_rows)
    alone = num_rows if _is_few(len(hidden_sd), statics.few_rows) else None
    sampler = _plain_sampler(statics.mesh, statics.model.config.vocab_size, alone, statics.skips_unused)
    return sampler(logits_sv, batch)


def _beside(params: Any, inputs: PackedInputs) -> dict[str, Any]:
    """Return what tokens take of media, and of steering vectors if requests may name any."""
    steering = Steering(params["steering"], *inputs.steering[0]) if inputs.steering else None
    return {"media": inputs.media_tokens, "steering": steering}


def _transcripts(inputs: PackedInputs, tokens: TokenBatch) -> TranscriptState | None:
    """Return what the rules of transcripts need of each row; None in a model without them."""
    if not inputs.transcripts:
        return None
    last_ids_s = tokens.token_ids_t[inputs.logit_rows.logit_tokens_s]
    return TranscriptState(inputs.rules.num_outputs_s, last_ids_s, inputs.transcripts[0])


def _rules_of(transcripts: TranscriptState | None, statics: StepStatics) -> Callable[[Array], Array] | None:
    """Return the function that applies the rules of transcripts to the rows' logits; None if there are none."""
    if transcripts is None or statics.transcript_rules is None:
        return None
    return partial(apply_rules, rules=statics.transcript_rules, state=transcripts)


def _plain_sampler(
    mesh: Mesh, vocab_size: int, num_rows: Array | None, skips_unused: bool
) -> Callable[[Array, SamplingBatch], Array]:
    """Return `sample_plain` for logits whose vocabulary is spread over the mesh."""
    shards = VocabShards(vocab_size, mesh.size, MESH_AXES)
    if mesh.size == 1 or not shards.can_sample:
        return lambda logits_sv, batch: sample_plain(
            _gathered(logits_sv, mesh), batch, num_rows, skips_unused=skips_unused
        )
    return jax.shard_map(
        partial(sample_plain_shard, shards=shards, skips_unused=skips_unused),
        mesh=mesh,
        in_specs=(PartitionSpec(None, MESH_AXES), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )


def _is_few(num_rows: int, few_rows: int | None) -> bool:
    """Return whether there are so few rows that padding among them is worth skipping."""
    return few_rows is not None and num_rows <= few_rows


def _gathered(logits_sv: Array, mesh: Mesh) -> Array:
    """Gather the whole vocabulary on every device, so that nothing after it is computed in parts."""
    if logits_sv.shape[1] % mesh.size == 0:
        # Without it the compiler may gather the weights and compute all logits everywhere.
        parts = NamedSharding(mesh, PartitionSpec(None, MESH_AXES))
        logits_sv = lax.with_sharding_constraint(logits_sv, parts)
    return lax.with_sharding_constraint(logits_sv, replicated(mesh))


def pad_rows(array: Array, num_rows: int) -> Array:
    """Return an array [s, ...] with `num_rows` rows; the new ones are 0."""
    return jnp.pad(array, ((0, num_rows - array.shape[0]), *[(0, 0)] * (array.ndim - 1)))


def known_tokens(inputs: PackedInputs, previous_tokens: Array) -> TokenBatch:
    """Return the step's tokens, with those that the last step sampled, which only the device knows, filled in."""
    # Such rows are decodes: row i is token i.
    previous_rows_s, token_ids_t = inputs.logit_rows.previous_rows_s, inputs.tokens.token_ids_t
    first_ids_s = token_ids_t[: previous_rows_s.shape[0]]
    first_ids_s = jnp.where(previous_rows_s >= 0, previous_tokens[previous_rows_s], first_ids_s)
    return inputs.tokens._replace(token_ids_t=lax.dynamic_update_slice_in_dim(token_ids_t, first_ids_s, 0, 0))


def map_rows(function: Callable[..., Array], arrays: Any, *, num_rows: Array, tile: int, few_rows: int | None) -> Array:
    """Do as `_map_row_tiles`, with `few_rows` rows at once where no more are in use.

    A prompt's step has many tokens and a row or two to sample.
    """
    total = jax.tree.leaves(arrays)[0].shape[0]
    if few_rows is None or total <= few_rows:
        return _map_row_tiles(function, arrays, num_rows=num_rows, tile=tile)
    return lax.cond(
        num_rows <= few_rows,
        lambda: pad_rows(function(num_rows, *jax.tree.map(lambda x: x[:few_rows], arrays)), total),
        lambda: _map_row_tiles(function, arrays, num_rows=num_rows, tile=tile),
    )


def _map_few(function: Callable[..., Any], arrays: Any, *, num_rows: Array, few_rows: int | None) -> Any:
    """Apply `function` to all rows, or one by one if there are few, so that one or two do not take the time of all."""
    total = jax.tree.leaves(arrays)[0].shape[0]
    tile = 1 if _is_few(total, few_rows) else total
    return _map_row_tiles(lambda _, *rows: function(*rows), arrays, num_rows=num_rows, tile=tile)


def _map_row_tiles(function: Callable[..., Any], arrays: Any, *, num_rows: Array, tile: int) -> Any:
    """Apply `function` to `tile` rows of all arrays at a time, to the tiles that hold the first `num_rows` rows.

    `function` takes the number of such rows in its tile, and the arrays; it returns a pytree with as many rows as they
    have. Rows of other tiles are 0.
    """
    total = jax.tree.leaves(arrays)[0].shape[0]
    if total <= tile:
        return function(num_rows, *arrays)
    arrays = jax.tree.map(lambda x: jnp.pad(x, ((0, -total % tile), *[(0, 0)] * (x.ndim - 1))), arrays)
    cut = partial(lax.dynamic_slice_in_dim, slice_size=tile)
    function = jax.jit(function, inline=True)  # traced once, for the shapes and for the loop
    put = partial(lax.dynamic_update_slice_in_dim, axis=0)

    def body(index: Array, results: Any) -> Any:
        start = index * tile
        part = function(jnp.minimum(num_rows - start, tile), *jax.tree.map(lambda x: cut(x, start), arrays))
        return jax.tree.map(lambda whole, rows: put(whole, rows, start), results, part)

    rows = jax.tree.leaves(arrays)[0].shape[0]
    spec = jax.eval_shape(lambda: function(num_rows, *jax.tree.map(lambda x: cut(x, 0), arrays)))
    empty = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype), spec)
    results = lax.fori_loop(0, (num_rows + tile - 1) // tile, body, empty)
    return jax.tree.map(lambda x: x[:total], results)
