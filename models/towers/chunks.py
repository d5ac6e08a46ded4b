"""The parts around the layers of a tower that hears in chunks: three convolutions over columns and bands at once."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import ModelConfig
from ..layers import ACTIVATIONS, declare
from .frame import RowProjector, multiply_flat
from .layout import PatchBatch

_STEPS = ("conv1", "conv2", "conv3")


class ChunkFrame(nnx.Module):
    """Three convolutions over the chunks of a spectrogram, the positions of their frames, and the projector."""

    outputs = ("projector",)

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert cfg.tower is not None
        assert cfg.tower.sound is not None
        assert cfg.tower.sound.chunks is not None
        self.settings, self.chunks, d, self.dtype = cfg.tower, cfg.tower.sound.chunks, cfg.hidden_size, dtype
        _, num_mels = cfg.tower.patch_shape
        c, num_bands = self.chunks.num_channels, -(-num_mels // 8)
        # As in the checkpoint, so that they are never quantized; 3 columns by 3 bands.
        for name, num_inputs in zip(_STEPS, (1, c, c), strict=True):
            setattr(self, name, declare((c, 3, 3, num_inputs), ("embed", "pixels", "pixels", "embed"), dtype))
            setattr(self, f"{name}_bias", declare((c,), ("embed",), dtype))
        self.join = declare((d, num_bands, c), ("embed", "pixels", "embed"), dtype)
        self.projector = RowProjector(cfg.tower.projector, cfg.tower.group, cfg, dtype)

    def start(self, inputs: PatchBatch) -> Array:
        """Return the stream [p, d] that goes into the first layer. Beyond a chunk's ends convolutions see zeros."""
        patches_pc = jnp.asarray(inputs.patches_pc)
        num_slots, (columns, num_mels) = len(patches_pc), self.settings.patch_shape
        is_used_p1 = (jnp.arange(num_slots) < inputs.num_slots)[:, None]
        patches_pc = jnp.where(is_used_p1, patches_pc, 0).astype(self.dtype)
        f = self.chunks.num_frames
        num_chunks = num_slots // f
        x_ntmc = patches_pc[: num_chunks * f].reshape(num_chunks, f * columns, num_mels, 1)
        length = self.chunks.num_columns
        for name in _STEPS:
            length = math.ceil(length / 2)
            x_ntmc = self._convolve(x_ntmc, getattr(self, name)[...], getattr(self, f"{name}_bias")[...], length)
        x_fd = multiply_flat(x_ntmc.reshape(num_chunks * f, -1), self.join[...])
        x_fd = x_fd + jnp.tile(jnp.asarray(sinusoids(f, x_fd.shape[1])).astype(self.dtype), (num_chunks, 1))
        return jnp.pad(x_fd, ((0, num_slots - num_chunks * f), (0, 0)))

    @staticmethod
    def _convolve(x_ntmc: Array, weight: Array, bias: Array, length: int) -> Array:
        """Return the convolution at every second column and band, with its activation; zeros from `length` on."""
        y_ntmc = jax.lax.conv_general_dilated(
            x_ntmc,
            weight,
            window_strides=(2, 2),
            padding=((1, 1), (1, 1)),
            dimension_numbers=("NHWC", "OHWI", "NHWC"),
            precision=jax.lax.Precision.HIGHEST if x_ntmc.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )
        y_ntmc = ACTIVATIONS["gelu"](y_ntmc.astype(x_ntmc.dtype) + bias)
        return jnp.where(jnp.arange(y_ntmc.shape[1])[:, None, None] < length, y_ntmc, 0)

    def arrange(self, x_ro: Array, inputs: PatchBatch) -> Array:
        """Return the rows [r, o] of what the projector gives."""
        del inputs
        return x_ro


def sinusoids(num_positions: int, size: int) -> np.ndarray:
    """Return the positions [p, d] of frames, float32: sines, then cosines, of wavelengths up to 20,000 pi."""
    rates_h = np.exp(-np.log(10_000) / (size // 2 - 1) * np.arange(size // 2, dtype=np.float32)).astype(np.float32)
    angles_ph = np.arange(num_positions, dtype=np.float32)[:, None] * rates_h
    return np.concatenate((np.sin(angles_ph), np.cos(angles_ph)), axis=1)
