"""The parts around the layers of a vision tower: the embedding of patches, and the projectors."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import ModelConfig
from ..layers import ACTIVATIONS, LayerNorm, RMSNorm, declare, linear
from .layout import PatchBatch
from .settings import DenseSettings, NormSettings, Projector


def make_norm(settings: NormSettings, size: int, cfg: ModelConfig, dtype: DTypeLike) -> LayerNorm | RMSNorm:
    """Return a norm over the last axis."""
    kind = LayerNorm if settings.kind == "layer" else RMSNorm
    return kind(size, "embed", replace(cfg, norm_eps=settings.eps, norm_offset=settings.offset), dtype)


def multiply_flat(x_pc: Array, weight: Array) -> Array:
    """Return [p, outputs] of flattened inputs [p, c] by a convolution's weight, in the dtype of the inputs."""
    precision = jax.lax.Precision.HIGHEST if x_pc.dtype == jnp.float32 else None
    weight_dc = weight.reshape(len(weight), -1)
    x_pd = jnp.einsum("pc,dc->pd", x_pc, weight_dc, precision=precision, preferred_element_type=jnp.float32)
    return x_pd.astype(x_pc.dtype)


class _Dense(nnx.Module):
    """A matmul, the activation after it, and a norm after that."""

    def __init__(self, settings: DenseSettings, num_inputs: int, cfg: ModelConfig, dtype: DTypeLike) -> None:
        self.weight = declare((settings.size, num_inputs), ("embed", "embed"), dtype, 1)
        self.bias = declare((settings.size,), ("embed",), dtype) if settings.bias else None
        self.act, self.gated = settings.act, settings.gated
        self.norm = make_norm(settings.norm, settings.num_outputs, cfg, dtype) if settings.norm else None

    def __call__(self, x_ri: Array) -> Array:
        """Return [r, outputs] of rows [r, inputs]."""
        x_ro = linear(x_ri, self.weight, bias=self.bias)
        if self.gated:
            assert self.act is not None
            x_ro, gate_ro = jnp.split(x_ro, 2, axis=-1)
            x_ro = ACTIVATIONS[self.act](gate_ro) * x_ro
        elif self.act is not None:
            x_ro = ACTIVATIONS[self.act](x_ro)
        return x_ro if self.norm is None else self.norm(x_ro)


class RowProjector(nnx.Module):
    """The norms and matmuls that make rows from the hidden states of patches."""

    def __init__(self, settings: Projector, group: int, cfg: ModelConfig, dtype: DTypeLike) -> None:
        d, self.join = cfg.hidden_size, settings.join
        size = d if settings.join == "mean" else group * d
        self.norm = make_norm(settings.norm, d, cfg, dtype) if settings.norm else None
        self.joined_norm = make_norm(settings.joined_norm, size, cfg, dtype) if settings.joined_norm else None
        self.names = [f"dense{number}" for number in range(len(settings.dense))]
        sizes = [size, *(dense.num_outputs for dense in settings.dense)]
        for name, dense, num_inputs in zip(self.names, settings.dense, sizes, strict=False):
            setattr(self, name, _Dense(dense, num_inputs, cfg, dtype))

    def gather(self, x_pd: Array, rows_rg: Array) -> Array:
        """Return the normed and joined hidden states of each row's patches, [r, g * d] or, if it is their mean,
        [r, d]."""
        normed_pd = x_pd if self.norm is None else self.norm(x_pd)
        x_rgd = normed_pd.at[rows_rg].get(mode="fill", fill_value=0)
        if self.join == "mean":
            return jnp.mean(x_rgd.astype(jnp.float32), axis=1).astype(x_pd.dtype)
        return (x_rgd.swapaxes(1, 2) if self.join == "channels" else x_rgd).reshape(len(rows_rg), -1)

    def project(self, x_ri: Array) -> Array:
        """Return rows [r, o] of what is joined."""
        if self.joined_norm is not None:
            x_ri = self.joined_norm(x_ri)
        for name in self.names:
            x_ri = getattr(self, name)(x_ri)
        return x_ri


class TowerFrame(nnx.Module):
    """The embedding of patches with their positions, and a projector for each output of a row."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert cfg.tower is not None
        self.settings, d = cfg.tower, cfg.hidden_size
        self.dtype = dtype
        # Its inputs have several axes, as in the checkpoint's convolution, so it is never quantized.
        inner = ("pixels",) * len(self.settings.patch_shape)
        self.patch = declare((d, *self.settings.patch_shape), ("embed", *inner), dtype)
        self.patch_bias = declare((d,), ("embed",), dtype) if self.settings.patch_bias else None
        self.class_token = declare((d,), ("embed",), dtype) if self.settings.has_class_token else None
        if self.settings.positions is not None:
            self.positions = declare((self.settings.num_positions, d), ("positions", "embed"), dtype)
        patch_norm, start_norm = self.settings.patch_norm, self.settings.start_norm
        self.patch_norm = make_norm(patch_norm, d, cfg, dtype) if patch_norm else None
        self.start_norm = make_norm(start_norm, d, cfg, dtype) if start_norm else None
        self.projector = RowProjector(self.settings.projector, self.settings.group, cfg, dtype)
        if self.settings.tiling is not None:
            self.newline = declare((self.settings.output_size,), ("embed",), dtype)
        self.outputs = ["projector", *(f"deepstack{number}" for number in range(len(self.settings.deepstack)))]
        for name in self.outputs[1:]:
            assert self.settings.deep_projector is not None
            setattr(self, name, RowProjector(self.settings.deep_projector, self.settings.group, cfg, dtype))

    def arrange(self, x_ro: Array, inputs: PatchBatch) -> Array:
        """Return the final rows [q, o] of what the projectors give."""
        if self.settings.tiling is None:
            return x_ro
        table_ro = jnp.concatenate((x_ro, self.newline[...][None])).astype(jnp.float32)
        places_qk, weights_qk = jnp.asarray(inputs.places_qk), jnp.asarray(inputs.row_weights_qk)
        terms = (table_ro[places_qk[:, k]] * weights_qk[:, k, None] for k in range(places_qk.shape[1]))
        return sum(terms, start=jnp.zeros((), jnp.float32)).astype(x_ro.dtype)

    def start(self, inputs: PatchBatch) -> Array:
        """Return the stream [p, d] that goes into the first layer."""
        patches_pc = jnp.asarray(inputs.patches_pc)
        is_used_p1 = (jnp.arange(len(patches_pc)) < inputs.num_slots)[:, None]
        patches_pc = jnp.where(is_used_p1, patches_pc, 0).astype(self.dtype)
        x_pd = multiply_flat(patches_pc, self.patch[...])
        if self.patch_bias is not None:
            x_pd = x_pd + self.patch_bias[...][None]
        if self.patch_norm is not None:
            x_pd = self.patch_norm(x_pd)
        places_pk = jnp.asarray(inputs.places_pk)
        if self.class_token is not None:
            is_class_p1 = places_pk[:, :1] == self.settings.class_position
            x_pd = jnp.where(is_class_p1, self.class_token[...].reshape(1, -1), x_pd)
        if self.settings.positions is not None:
            table_nd = self.positions[...].astype(jnp.float32).reshape(-1, x_pd.shape[1])
            weights_pk = jnp.asarray(inputs.weights_pk)
            terms = (table_nd[places_pk[:, k]] * weights_pk[:, k, None] for k in range(places_pk.shape[1]))
            x_pd = x_pd + sum(terms, start=jnp.zeros((), jnp.float32)).astype(self.dtype)
        return x_pd if self.start_norm is None else self.start_norm(x_pd)


class SoundFrame(nnx.Module):
    """Two convolutions over the columns of a clip's spectrogram, the positions of its frames, and the projector."""

    outputs = ("projector",)

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert cfg.tower is not None
        self.settings, d, self.dtype = cfg.tower, cfg.hidden_size, dtype
        assert self.settings.sound is not None
        num_columns, num_mels = self.settings.patch_shape
        assert num_columns == self.settings.sound.columns == 2, "a frame is two columns"
        # As in the checkpoint, so that they are never quantized; the last axis is 3 columns.
        self.conv1 = declare((d, 3, num_mels), ("embed", "pixels", "pixels"), dtype)
        self.conv1_bias = declare((d,), ("embed",), dtype)
        self.conv2 = declare((d, 3, d), ("embed", "pixels", "embed"), dtype)
        self.conv2_bias = declare((d,), ("embed",), dtype)
        if self.settings.positions is not None:
            self.positions = declare((self.settings.num_positions, d), ("positions", "embed"), dtype)
        self.projector = RowProjector(self.settings.projector, self.settings.group, cfg, dtype)

    def start(self, inputs: PatchBatch) -> Array:
        """Return the stream [p, d] that goes into the first layer. Beyond a clip's ends the convolutions see zeros."""
        assert self.settings.sound is not None
        patches_pc, frames_p = jnp.asarray(inputs.patches_pc), jnp.asarray(inputs.coordinates_p2)[:, 1]
        is_used_p1 = (jnp.arange(len(patches_pc)) < inputs.num_slots)[:, None]
        patches_pc = jnp.where(is_used_p1, patches_pc, 0).astype(self.dtype)
        first_pm, second_pm = jnp.split(patches_pc, 2, axis=1)
        is_first_p1 = (frames_p == 0)[:, None]
        is_last_p1 = (frames_p == self.settings.sound.num_frames - 1)[:, None]
        before_pm = jnp.where(is_first_p1, 0, jnp.roll(second_pm, 1, axis=0))
        after_pm = jnp.where(is_last_p1, 0, jnp.roll(first_pm, -1, axis=0))
        even_pd = self._convolve((before_pm, first_pm, second_pm), self.conv1, self.conv1_bias)
        odd_pd = self._convolve((first_pm, second_pm, after_pm), self.conv1, self.conv1_bias)
        before_pd = jnp.where(is_first_p1, 0, jnp.roll(odd_pd, 1, axis=0))
        x_pd = self._convolve((before_pd, even_pd, odd_pd), self.conv2, self.conv2_bias)
        return x_pd if self.settings.positions is None else x_pd + self.positions[...][frames_p]

    @staticmethod
    def _convolve(columns: tuple[Array, Array, Array], weight: nnx.Param[Array], bias: nnx.Param[Array]) -> Array:
        """Return the convolution over three columns, with its activation."""
        x_pd = multiply_flat(jnp.concatenate(columns, axis=1), weight[...]) + bias[...][None]
        return ACTIVATIONS["gelu"](x_pd)

    def arrange(self, x_ro: Array, inputs: PatchBatch) -> Array:
        """Return the rows [r, o] of what the projector gives."""
        del inputs
        return x_ro
