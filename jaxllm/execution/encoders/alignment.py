"""Align the tokens of a transcript with a clip's frames: the program that returns where a decoder listens.

The model's own forward pass runs over the whole transcript at once, with attention that holds no blocks and keeps the
weights of cross-attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from jaxllm.core_messages import Clip
from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.encoders.clips import encode_frames
from jaxllm.models.inputs import TokenBatch
from jaxllm.models.model import Model
from pallas_kernels.paged_attention import AttentionBatch

_SIZES = (64, 128, 256)
"""The tokens of the smaller programs; the largest takes as many as the model."""
_REACH = 3
"""The frames on either side of one that the median filter looks at."""
_MEDIAN_OF_7 = "05 03 16 24 01 35 26 23 36 45 14 13 34"
"""The pairs of numbers to put in order, one pair after another, so that the fourth is the median of seven."""


class AlignShape(NamedTuple):
    """The shape that a program is compiled for."""

    num_tokens: int
    num_heads: int
    """The most heads of one layer whose weights count."""


class AlignInputs(NamedTuple):
    """The inputs of a program besides parameters."""

    mels_mc: Any
    """A clip's spectrogram, float32."""
    token_ids_t: Any
    """A decoder's prompt and the transcript, then padding."""
    bounds_3: Any
    """int32: the numbers of the prompt's tokens, of all tokens, and of the frames to which they may belong."""
    heads_lk: Any
    """int32, the heads of each layer whose weights count; -1 stands for none."""


def align_shapes(model: Model, heads: Sequence[tuple[int, int]] | None) -> list[AlignShape]:
    """Return the programs that align transcripts, smallest first; `heads` are those of `align_inputs`.

    Raises VLLMValidationError for a head that the model does not have.
    """
    return _shapes(model, _head_table(model, heads))


def _shapes(model: Model, heads_lk: np.ndarray) -> list[AlignShape]:
    most, num_heads = model.config.max_position_embeddings, heads_lk.shape[1]
    return [AlignShape(size, num_heads) for size in (*(size for size in _SIZES if size < most), most)]


def align_inputs(
    model: Model,
    heads: Sequence[tuple[int, int]] | None,
    clip: Clip,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
) -> tuple[AlignShape, AlignInputs]:
    """Return the program for a transcript, and its inputs; `heads` are (layer, head), None for those of later layers.

    Raises VLLMValidationError for a transcript that the model cannot have written.
    """
    config, clips = model.config, model.encoder
    assert clips is not None
    if not 0 < clip.num_heard <= clips.settings.num_frames:
        raise VLLMValidationError("the clip's sound does not end within its frames.", parameter="clip")
    most, ids = config.max_position_embeddings, [*prompt_ids, *token_ids]
    if not prompt_ids or not token_ids or len(ids) > most:
        message = f"{len(prompt_ids)} tokens of a prompt and {len(token_ids)} after it are not one or more of each, "
        raise VLLMValidationError(f"{message}and at most {most} of both.", parameter="token_ids")
    if not 0 <= min(ids) <= max(ids) < config.vocab_size:
        message = f"a token id is not one of the model's, from 0 to {config.vocab_size - 1}."
        raise VLLMValidationError(message, parameter="token_ids")
    heads_lk = _head_table(model, heads)
    shape = next(shape for shape in _shapes(model, heads_lk) if len(ids) <= shape.num_tokens)
    token_ids_t = np.zeros(shape.num_tokens, np.int32)
    token_ids_t[: len(ids)] = ids
    mels_mc = np.frombuffer(clip.mels, np.float32).reshape(clips.settings.num_mels, -1)
    bounds_3 = np.asarray((len(prompt_ids), len(ids), clip.num_heard), np.int32)
    return shape, AlignInputs(mels_mc, token_ids_t, bounds_3, heads_lk)


def _head_table(model: Model, heads: Sequence[tuple[int, int]] | None) -> np.ndarray:
    """Return `AlignInputs.heads_lk`. Raises VLLMValidationError for a head that the model does not have."""
    sizes = [spec.num_heads for spec in model.plan.layers if spec.is_cross]
    if heads is None:
        later = range(len(sizes) // 2, len(sizes))
        heads = [(layer, head) for layer in later for head in range(sizes[layer])]
    rows: list[list[int]] = [[] for _ in sizes]
    for layer, head in heads:
        if not (0 <= layer < len(sizes) and 0 <= head < sizes[layer]):
            message = f"alignment_heads of generation_config.json has head {head} of layer {layer}, and "
            raise VLLMValidationError(f"{message}the decoder has no such head.", parameter="generation_config")
        rows[layer].append(head)
    widest = max(map(len, rows))
    return np.asarray([row + [-1] * (widest - len(row)) for row in rows], np.int32)


def run_alignment(
    encoder_params: Any, params: Any, inputs: AlignInputs, *, model: Model, mesh: Mesh
) -> tuple[Array, Array]:
    """Return how much the transcript's tokens attend to frames [t, f], and tokens' log-probabilities [t]; float32.

    The first are the mean of the heads' weights, each normalized over the transcript's tokens and smoothed by a median
    over seven frames. Rows of other tokens, and frames after the last that counts, mean nothing.
    """
    assert model.encoder is not None
    num_frames, num_tokens = model.encoder.settings.num_frames, len(inputs.token_ids_t)
    frames_fd = encode_frames(encoder_params, inputs.mels_mc, model=model, mesh=mesh)[:num_frames]
    groups = list(model.plan.groups)
    pools = tuple(_empty(group, num_frames, num_tokens, model) if group.is_cross else () for group in groups)
    keeps = [_KeepFrames()] * len(groups)
    pools = model.write_frames(params, pools, frames_fd, _batch_of(jnp.int32(num_frames)), attention=keeps)
    listen: list[Any] = [_Listen(inputs) if group.is_cross else _attend_to_past for group in groups]
    positions_t, zeros_t = jnp.arange(num_tokens, dtype=jnp.int32), jnp.zeros(num_tokens, jnp.int32)
    tokens = TokenBatch(inputs.token_ids_t, positions_t, positions_t + 1, zeros_t, zeros_t)
    batches = [_batch_of(inputs.bounds_3[1])] * len(groups)
    hidden_td, pools, _ = model.forward(params, pools, tokens, batches, attention=listen)
    logprobs_tv = jax.nn.log_softmax(model.logits(params, hidden_td, inputs.bounds_3[1]))
    of_next_t = jnp.take_along_axis(logprobs_tv, jnp.roll(inputs.token_ids_t, -1)[:, None], axis=1)[:, 0]
    heard_tf = sum(pool.heard_tf for pool, group in zip(pools, groups, strict=True) if group.is_cross)
    return heard_tf / jnp.sum(inputs.heads_lk >= 0), jnp.roll(of_next_t, 1)


class _Frames(NamedTuple):
    """The keys and values of a clip's frames in all layers, and the sum of what tokens attend to in those before."""

    k_lfkh: Array
    v_lfkh: Array
    heard_tf: Array


def _empty(group: Any, num_frames: int, num_tokens: int, model: Model) -> _Frames:
    zeros = jnp.zeros((model.plan.depth(group), num_frames, group.num_kv_heads, group.head_dim), model.dtype)
    return _Frames(zeros, zeros, jnp.zeros((num_tokens, num_frames), jnp.float32))


def _batch_of(num_rows: Array) -> AttentionBatch:
    """Return a batch with one sequence, from which the model reads how many rows are its own."""
    none, end = jnp.zeros(1, jnp.int32), num_rows.reshape(1)
    return AttentionBatch(none, none[None], end, none, end, none[0], none, none, none[0])


class _KeepFrames:
    """The op that keeps frames' keys and values, called as paged attention."""

    def __call__(
        self, q_tnh: Array, k_fkh: Array, v_fkh: Array, frames: _Frames, batch: AttentionBatch, **settings: Any
    ) -> tuple[Array, _Frames]:
        del batch
        layer = settings["layer"]
        return q_tnh, frames._replace(
            k_lfkh=frames.k_lfkh.at[layer].set(k_fkh), v_lfkh=frames.v_lfkh.at[layer].set(v_fkh)
        )


def _attend_to_past(
    q_tnh: Array, k_tkh: Array, v_tkh: Array, pool: Any, batch: AttentionBatch, *, scale: float, **settings: Any
) -> tuple[Array, Any]:
    """Attend to a token and those before it, called as paged attention."""
    del batch, settings
    t = len(q_tnh)
    scores_nts = jnp.where(jnp.tri(t, dtype=bool), _scores(q_tnh, k_tkh, scale), -jnp.inf)
    return _weigh(jax.nn.softmax(scores_nts), v_tkh, q_tnh), pool


class _Listen:
    """Cross-attention that adds up how much tokens attend to frames, called as paged attention."""

    def __init__(self, inputs: AlignInputs) -> None:
        self._inputs = inputs

    def read(self, frames: _Frames, slots_t: Array, *, layer: Array | int, num_layers: int) -> tuple[Array, Array]:
        """Return the keys and values of a layer's frames."""
        del slots_t, num_layers
        return frames.k_lfkh[layer], frames.v_lfkh[layer]

    def __call__(
        self,
        q_tnh: Array,
        k_fkh: Array,
        v_fkh: Array,
        frames: _Frames,
        batch: AttentionBatch,
        *,
        scale: float,
        layer: Array | int,
        **settings: Any,
    ) -> tuple[Array, _Frames]:
        del batch, settings
        weights_ntf = jax.nn.softmax(_scores(q_tnh, k_fkh, scale))
        start, end, num_frames = self._inputs.bounds_3
        heads_k = self._inputs.heads_lk[layer]
        rows_t1 = jnp.arange(len(q_tnh))[:, None]
        marked_ktf = _normalize(weights_ntf[heads_k], (rows_t1 >= start) & (rows_t1 < end))
        marked_ktf = jnp.where((heads_k >= 0)[:, None, None], _smooth(marked_ktf, num_frames), 0)
        # Else XLA adds up all layers at the end, and keeps the weights of all heads until then.
        attended_tnh, heard_tf = jax.lax.optimization_barrier(
            (_weigh(weights_ntf, v_fkh, q_tnh), frames.heard_tf + marked_ktf.sum(0))
        )
        return attended_tnh, frames._replace(heard_tf=heard_tf)


def _scores(q_tnh: Array, k_fkh: Array, scale: float) -> Array:
    """Return float32 scores [n, t, f]."""
    k_fnh = jnp.repeat(k_fkh, q_tnh.shape[1] // k_fkh.shape[1], axis=1)
    return jnp.einsum("tnh,fnh->ntf", q_tnh, k_fnh, preferred_element_type=jnp.float32) * scale


def _weigh(weights_ntf: Array, v_fkh: Array, q_tnh: Array) -> Array:
    """Return the weighted sums of values [t, n, h]."""
    v_fnh = jnp.repeat(v_fkh, q_tnh.shape[1] // v_fkh.shape[1], axis=1)
    weights_ntf = weights_ntf.astype(q_tnh.dtype)
    return jnp.einsum("ntf,fnh->tnh", weights_ntf, v_fnh, preferred_element_type=jnp.float32).astype(q_tnh.dtype)


def _normalize(weights_ktf: Array, counts_t1: Array) -> Array:
    """Return weights less their mean over the tokens that count, divided by their standard deviation."""
    num_tokens = counts_t1.sum()
    mean_k1f = jnp.where(counts_t1, weights_ktf, 0).sum(1, keepdims=True) / num_tokens
    apart_ktf = weights_ktf - mean_k1f
    spread_k1f = jnp.sqrt(jnp.where(counts_t1, apart_ktf**2, 0).sum(1, keepdims=True) / num_tokens)
    return jnp.where(spread_k1f > 0, apart_ktf / spread_k1f, 0)


def _smooth(values_ktf: Array, num_frames: Array) -> Array:
    """Return the median of seven frames around each of `num_frames`, which are mirrored at both ends.

    No more frames than three are left as they are.
    """
    before = values_ktf[..., _REACH:0:-1]
    mirrored = values_ktf[..., jnp.maximum(num_frames - 2 - jnp.arange(_REACH), 0)]
    after = jnp.zeros_like(before)
    padded = jnp.concatenate((before, values_ktf, after), axis=-1)
    padded = jax.lax.dynamic_update_slice_in_dim(padded, mirrored, num_frames + _REACH, axis=-1)
    # Else a GPU computes each value seven times, in kernels that spill registers.
    padded = jax.lax.optimization_barrier(padded)
    num_columns = values_ktf.shape[-1]
    around = [padded[..., first : first + num_columns] for first in range(2 * _REACH + 1)]
    for low, high in (map(int, pair) for pair in _MEDIAN_OF_7.split()):
        around[low], around[high] = jnp.minimum(around[low], around[high]), jnp.maximum(around[low], around[high])
    return jnp.where(num_frames > _REACH, around[_REACH], values_ktf)
