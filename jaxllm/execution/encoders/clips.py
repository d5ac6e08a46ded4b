"""Encode the clips of an encoder-decoder: the program that writes the keys and values of a clip's frames.

A clip is encoded alone, so that its frames do not depend on what else is encoded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jaxllm.core_messages import Clip
from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.caches import Caches, Pools
from jaxllm.models.model import Model
from jaxllm.models.towers.settings import ClipSettings
from jaxllm.scheduling.clips import ClipEncode
from pallas_kernels.paged_attention import AttentionBatch


class ClipShape(NamedTuple):
    """The shape that an encoder's program is compiled for."""

    num_frames: int


def run_clip_encoder(
    encoder_params: Any,
    params: Any,
    pools: Pools,
    mels_mc: Array,
    block_ids_b: Array,
    *,
    model: Model,
    caches: Caches,
    mesh: Mesh,
    query_tile: int,
) -> Pools:
    """Return the pools with the keys and values of a clip's frames in these blocks, in all cross-attention."""
    assert model.encoder is not None
    frames_fd = encode_frames(encoder_params, mels_mc, model=model, mesh=mesh)
    batch = _frame_batch(len(frames_fd), model.encoder.settings.num_frames, block_ids_b, caches.block_size, query_tile)
    layers = caches.of_layers(pools)
    written = model.write_frames(params, layers, frames_fd, batch, attention=caches.attention)
    return *written, *pools[len(layers) :]


def encode_frames(encoder_params: Any, mels_mc: Array, *, model: Model, mesh: Mesh) -> Array:
    """Return a clip's frames [f, d], and rows of padding after them.

    Each device of the mesh has the whole encoder and encodes the whole clip, as XLA cannot share out kernels.
    """
    assert model.encoder is not None
    everywhere = PartitionSpec()
    # The kernels' outputs do not declare over which mesh axes they vary, which check_vma would need.
    encode = jax.shard_map(
        model.encoder.encode, mesh=mesh, in_specs=(everywhere, everywhere), out_specs=everywhere, check_vma=False
    )
    return encode(encoder_params, mels_mc)


def _frame_batch(
    num_rows: int, num_frames: int, block_ids_b: Array, block_size: int, query_tile: int
) -> AttentionBatch:
    """Return the batch of a clip's frames, the first rows, as one sequence's chunk."""
    rows_t = jnp.arange(num_rows, dtype=jnp.int32)
    blocks_t = block_ids_b.at[rows_t // block_size].get(mode="clip")
    tile_rows_i = jnp.arange(0, num_frames, query_tile, dtype=jnp.int32)
    all_frames = jnp.full(1, num_frames, jnp.int32)
    return AttentionBatch(
        slots_t=jnp.where(rows_t < num_frames, blocks_t * block_size + rows_t % block_size, 0),
        block_tables_sm=block_ids_b[None],
        context_lens_s=all_frames,
        query_starts_s=jnp.zeros(1, jnp.int32),
        query_ends_s=all_frames,
        num_decodes=jnp.int32(0),
        tile_seqs_i=jnp.zeros_like(tile_rows_i),
        tile_rows_i=tile_rows_i,
        num_tiles=jnp.int32(len(tile_rows_i)),
    )


def clip_inputs(settings: ClipSettings, encode: ClipEncode) -> list[np.ndarray]:
    """Return a clip's spectrogram [mels, 2 * frames], and the blocks of its frames."""
    mels_mc = np.frombuffer(encode.clip.mels, np.float32).reshape(settings.num_mels, 2 * settings.num_frames)
    return [mels_mc, np.frombuffer(encode.block_ids, np.int32)]


def check_clip(settings: ClipSettings, clip: Clip) -> None:
    """Raise VLLMValidationError for a clip that the encoder cannot take. In a step it would end all requests."""
    columns = 2 * settings.num_frames
    if len(clip.mels) != 4 * settings.num_mels * columns:
        message = f"the spectrogram does not have {settings.num_mels} bands of {columns} columns."
        raise VLLMValidationError(message, parameter="multi_modal_data")
