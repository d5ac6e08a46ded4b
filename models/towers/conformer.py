"""A conformer, an encoder of sounds: convolutions that leave one frame of four columns of a spectrogram, then layers of
two MLPs with attention to the frames just before and a causal convolution between them.

A frame depends on no later ones, but for the columns that the first convolutions see.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from ..config import LayerSpec, ModelConfig
from ..layers import ACTIVATIONS, LayerNorm, RMSNorm, declare, linear
from ..layers.clipped import ClippedLinear
from .frame import RowProjector, multiply_flat
from .layout import PatchBatch
from .settings import ConformerSettings

_LONGEST_WAVE = 10_000.0
"""The longest wavelength in the code of distances, divided by 2 pi."""


class LocalHeads(NamedTuple):
    """The inputs of attention to the frames just before, float32."""

    x_pd: Array
    """The stream, in the model's dtype, to which attention is added."""
    q_pnh: Array
    k_pnh: Array
    v_pnh: Array
    far_wnh: Array
    """What each distance, from 0 up to the window's, adds to keys."""


def attend_locally(heads: LocalHeads, spec: LayerSpec) -> Array:
    """Return the attention of each frame to itself and those before it in its window, [p, n, h].

    The score of a distance is added before the soft cap.
    """
    assert spec.window is not None
    assert spec.soft_cap is not None
    places_pw = jnp.arange(len(heads.q_pnh))[:, None] - jnp.arange(spec.window)
    taken_pw = jnp.maximum(places_pw, 0)
    # Sums of products, because a matmul for each frame would be small, and rounded on a TPU.
    scores_pwn = jnp.sum(heads.q_pnh[:, None] * (heads.k_pnh[taken_pw] + heads.far_wnh), axis=-1) * spec.scale
    scores_pwn = spec.soft_cap * jnp.tanh(scores_pwn / spec.soft_cap)
    weights_pwn = jax.nn.softmax(jnp.where((places_pw >= 0)[:, :, None], scores_pwn, -jnp.inf), axis=1)
    return jnp.sum(weights_pwn[..., None] * heads.v_pnh[taken_pw], axis=1)


class ConformerFrame(nnx.Module):
    """Two convolutions over columns and bands, which both become half as many, a matmul, and the projector."""

    outputs = ("projector",)

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert cfg.tower is not None
        assert cfg.tower.conformer is not None
        self.settings, self.dtype = cfg.tower, dtype
        first, second = cfg.tower.conformer.channels
        # As in the checkpoint, so that they are never quantized; the inner axes are 3 columns of 3 bands.
        self.conv1 = declare((first, 3, 3, 1), ("embed", *("pixels",) * 3), dtype)
        self.conv2 = declare((second, 3, 3, first), ("embed", *("pixels",) * 3), dtype)
        self.conv1_norm, self.conv2_norm = (LayerNorm(size, "embed", cfg, dtype) for size in (first, second))
        flat = math.ceil(math.ceil(cfg.tower.patch_shape[1] / 2) / 2) * second
        self.patch = declare((cfg.hidden_size, flat), ("embed", "pixels"), dtype, 1)
        self.projector = RowProjector(cfg.tower.projector, 1, cfg, dtype)

    def start(self, inputs: PatchBatch) -> Array:
        """Return the stream [p, d] that goes into the first layer.

        What is beyond a clip's ends is zero for both convolutions.
        """
        patches_pc = jnp.asarray(inputs.patches_pc)
        p, per_patch = len(patches_pc), self.settings.patch_shape[0]
        heard_p1 = jnp.asarray(inputs.coordinates_p2)[:, :1]
        heard_s = (jnp.arange(per_patch) < heard_p1).reshape(-1, 1, 1)
        x_sfc = jnp.where(heard_s, patches_pc.astype(self.dtype).reshape(p * per_patch, -1, 1), 0)
        x_sfc = self._halve(x_sfc, self.conv1, self.conv1_norm, p)
        x_sfc = self._halve(jnp.where(heard_s[::2], x_sfc, 0), self.conv2, self.conv2_norm, p)
        return linear(x_sfc.reshape(p, -1), self.patch)

    @staticmethod
    def _halve(x_sfc: Array, weight: nnx.Param[Array], norm: LayerNorm, num_patches: int) -> Array:
        """Return the convolution over 3 columns and 3 bands at every second of both, normed, without what is negative.

        It is [s / 2, f / 2, o], the numbers of columns and bands rounded up, of [s, f, c].
        """
        s, f, _ = x_sfc.shape
        padded = jnp.pad(x_sfc, ((1, 1), (1, 1), (0, 0)))
        taps = [padded[column : column + s : 2, band : band + f : 2] for column in range(3) for band in range(3)]
        taps_sfk = jnp.concatenate(taps, axis=-1)
        shape = *taps_sfk.shape[:2], len(weight[...])
        x_ro = multiply_flat(taps_sfk.reshape(-1, taps_sfk.shape[-1]), weight[...])
        return jax.nn.relu(norm(x_ro.reshape(num_patches, -1, shape[-1]))).reshape(shape)

    def arrange(self, x_ro: Array, inputs: PatchBatch) -> Array:
        """Return the rows [r, o] of what the projector gives."""
        del inputs
        return x_ro


def _matmul(shape: tuple[int, ...], axes: tuple[str, ...], cfg: ModelConfig, dtype: DTypeLike) -> ClippedLinear:
    """Return a matmul by a weight [*out, in], with bounds if the tower's have some."""
    assert cfg.tower is not None
    return ClippedLinear(declare(shape, axes, dtype, 1), clips=cfg.tower.clips)


def _bounded(settings: ConformerSettings, x_pd: Array) -> Array:
    """Return hidden states clipped to the settings' bound."""
    bound = min(settings.bound, float(jnp.finfo(x_pd.dtype).max))
    return jnp.clip(x_pd, -bound, bound)


class _HalfMLP(nnx.Module):
    """An MLP whose output is normed and halved, or scaled otherwise, before it is added to the stream."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, settings: ConformerSettings, dtype: DTypeLike) -> None:
        d, f, self.act = cfg.hidden_size, spec.intermediate_size, spec.hidden_act
        self.norm, self.post_norm = (RMSNorm(d, "embed", cfg, dtype) for _ in range(2))
        self.up = _matmul((f, d), ("mlp", "embed"), cfg, dtype)
        self.down = _matmul((d, f), ("embed", "mlp"), cfg, dtype)
        self.settings = settings

    def __call__(self, x_pd: Array) -> Array:
        """Return the stream [p, d] with the MLP's output."""
        inner_pf = ACTIVATIONS[self.act](self.up(self.norm(_bounded(self.settings, x_pd))))
        return x_pd + self.post_norm(_bounded(self.settings, self.down(inner_pf))) * self.settings.mlp_scale


class _Convolution(nnx.Module):
    """A gated matmul, a causal convolution of each channel with itself, and another matmul."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, settings: ConformerSettings, dtype: DTypeLike) -> None:
        d, self.act, self.settings = cfg.hidden_size, spec.hidden_act, settings
        self.norm, self.conv_norm = (RMSNorm(d, "embed", cfg, dtype) for _ in range(2))
        self.start = _matmul((2 * d, d), ("embed", "embed"), cfg, dtype)
        self.conv = declare((d, 1, settings.kernel_size), ("embed", "pixels", "pixels"), dtype)
        self.end = _matmul((d, d), ("embed", "embed"), cfg, dtype)

    def __call__(self, x_pd: Array) -> Array:
        """Return the stream [p, d] with the convolution's output."""
        value_pd, gate_pd = jnp.split(self.start(self.norm(x_pd)), 2, axis=1)
        kernel_kd = self.conv[...][:, 0].T.astype(jnp.float32)
        padded = jnp.pad((value_pd * jax.nn.sigmoid(gate_pd)).astype(jnp.float32), ((len(kernel_kd) - 1, 0), (0, 0)))
        terms = (padded[first : first + len(x_pd)] * row_d for first, row_d in enumerate(kernel_kd))
        mixed_pd = sum(terms, start=jnp.zeros((), jnp.float32)).astype(x_pd.dtype)
        return x_pd + self.end(ACTIVATIONS[self.act](self.conv_norm(_bounded(self.settings, mixed_pd))))


class _LocalAttention(nnx.Module):
    """The projections around attention to the frames just before. Each dimension of queries has a learned scale."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        d, n, h = cfg.hidden_size, spec.num_heads, spec.head_dim
        heads, axes = (n, h, d), ("heads", "head_dim", "embed")
        self.q, self.k, self.v = (_matmul(heads, axes, cfg, dtype) for _ in range(3))
        self.o = _matmul((d, n * h), ("embed", "heads"), cfg, dtype)
        self.far = declare(heads, axes, dtype)
        self.q_scale = declare((h,), ("head_dim",), dtype)
        assert spec.window is not None
        self.window = spec.window

    def project(self, x_pd: Array) -> tuple[Array, Array, Array, Array]:
        """Return queries, keys, values, and what distances add to keys, float32."""
        q_pnh, k_pnh, v_pnh = (of(x_pd).astype(jnp.float32) for of in (self.q, self.k, self.v))
        q_pnh = q_pnh * (jax.nn.softplus(self.q_scale[...].astype(jnp.float32)) / math.log(2))
        k_pnh = k_pnh * (math.log(1 + math.e) / math.log(2))
        far_wd = jnp.asarray(_distances(self.window, x_pd.shape[1]), x_pd.dtype)
        far_nhd = self.far[...]
        far_wnh = multiply_flat(far_wd, far_nhd.reshape(-1, far_nhd.shape[-1])).reshape(-1, *far_nhd.shape[:2])
        return q_pnh, k_pnh, v_pnh, far_wnh.astype(jnp.float32)


def _distances(number: int, size: int) -> np.ndarray:
    """Return the code [number, size] of distances from 0 on: sines, then cosines, of growing wavelengths."""
    waves = np.exp(np.arange(size // 2, dtype=np.float32) * (-math.log(_LONGEST_WAVE) / max(size // 2 - 1, 1)))
    angles = np.arange(number, dtype=np.float32)[:, None] * waves.astype(np.float32)
    return np.concatenate((np.sin(angles), np.cos(angles)), axis=1)


class ConformerLayer(nnx.Module):
    """An MLP, attention, a convolution, another MLP, and a norm of the stream."""

    def __init__(self, spec: LayerSpec, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert cfg.tower is not None
        assert cfg.tower.conformer is not None
        self.settings = cfg.tower.conformer
        self.mlp1, self.mlp2 = (_HalfMLP(spec, cfg, self.settings, dtype) for _ in range(2))
        self.attn, self.conv = _LocalAttention(spec, cfg, dtype), _Convolution(spec, cfg, self.settings, dtype)
        norms = (RMSNorm(cfg.hidden_size, "embed", cfg, dtype) for _ in range(3))
        self.attn_norm, self.post_attn_norm, self.out_norm = norms

    def project(self, x_pd: Array) -> LocalHeads:
        """Return the inputs of attention, from the stream [p, d]."""
        x_pd = self.mlp1(x_pd)
        return LocalHeads(x_pd, *self.attn.project(self.attn_norm(_bounded(self.settings, x_pd))))

    def finish(self, x_pd: Array, attended: tuple[Array, Array]) -> Array:
        """Return the stream after this layer, from attention's output and the stream that this is added to."""
        attended_pnh, x_pd = attended
        attended_pd = self.attn.o(attended_pnh.reshape(len(x_pd), -1).astype(x_pd.dtype))
        x_pd = x_pd + self.post_attn_norm(_bounded(self.settings, attended_pd))
        return self.out_norm(_bounded(self.settings, self.mlp2(self.conv(x_pd))))
