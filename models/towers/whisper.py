"""Whisper's encoder: two convolutions over a spectrogram, learned positions, and layers that attend to all frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.linear import Linear
from pallas_kernels.segment_attention import SegmentAttention

from ..config import ModelConfig
from ..layers import ACTIVATIONS, LayerNorm, declare
from ..loop import Cached, LayerBody, LayerLoop, run_layers
from ..specs import ModelSpecs
from ..weights import Ops, bind
from .frame import multiply_flat

_Params = Mapping[str, Any]
_ROW_TILE = 128
"""Frames are padded to a multiple of this, which kernels take."""


class WhisperFrame(nnx.Module):
    """The parts around the encoder's layers: the convolutions, the positions of frames, and the final norm."""

    def __init__(self, cfg: ModelConfig, dtype: DTypeLike) -> None:
        assert cfg.clips is not None
        d, self.dtype = cfg.hidden_size, dtype
        # As in the checkpoint, so that they are never quantized; the last axis is 3 columns.
        self.conv1 = declare((d, 3, cfg.clips.num_mels), ("embed", "pixels", "pixels"), dtype)
        self.conv1_bias = declare((d,), ("embed",), dtype)
        self.conv2 = declare((d, 3, d), ("embed", "pixels", "embed"), dtype)
        self.conv2_bias = declare((d,), ("embed",), dtype)
        self.positions = declare((cfg.clips.num_frames, d), ("positions", "embed"), dtype)
        self.final_norm = LayerNorm(d, "embed", cfg, dtype)

    def start(self, mels_mc: Array) -> Array:
        """Return the stream [frames, d] that goes into the first layer, of a spectrogram [mels, 2 * frames]."""
        gelu = ACTIVATIONS["gelu"]
        x_cd = gelu(self._convolve(mels_mc.T.astype(self.dtype), self.conv1, self.conv1_bias, 1))
        x_fd = gelu(self._convolve(x_cd, self.conv2, self.conv2_bias, 2))
        return x_fd + self.positions[...]

    def _convolve(self, x_ci: Array, weight: nnx.Param[Array], bias: nnx.Param[Array], stride: int) -> Array:
        """Return the convolution over 3 columns at every `stride`-th column, with zeros before and after."""
        columns = len(x_ci)
        padded = jnp.pad(x_ci, ((1, 1), (0, 0)))
        around = [padded[first : first + columns : stride] for first in range(3)]
        return multiply_flat(jnp.concatenate(around, axis=1), weight[...]) + bias[...][None]

    def end(self, x_fd: Array) -> Array:
        """Return the frames [f, d] of the stream that comes out of the last layer."""
        return self.final_norm(x_fd)


class ClipEncoder:
    """The functions of an encoder of clips; it holds no arrays. Its config has `clips`, the encoder's settings."""

    def __init__(self, specs: ModelSpecs, *, ops: Ops | None = None, attention: SegmentAttention | None = None) -> None:
        if specs.config.clips is None:
            raise ValueError(f"{specs.config.architecture} does not encode clips: its config has no settings for them")
        self.specs, self.config, self.settings, self.plan = specs, specs.config, specs.config.clips, specs.plan
        self.ops = ops or Ops(Linear("cpu" if specs.loop is LayerLoop.IN_PLACE else "xla"))
        self.attention = attention or SegmentAttention()

    @property
    def facts(self) -> tuple[Any, ...]:
        """Return all that the functions of the encoder depend on."""
        return *self.specs.facts, self.ops, self.attention

    @property
    def num_rows(self) -> int:
        """Return the rows of the result, with those of padding."""
        return -(-self.settings.num_frames // _ROW_TILE) * _ROW_TILE

    @jax.named_scope("encode")
    def encode(self, params: _Params, mels_mc: Array) -> Array:
        """Return the frames [num_rows, d] of a spectrogram [mels, 2 * num_frames], in the model's dtype.

        Rows from `num_frames` on are padding, and finite.
        """
        num_frames = self.settings.num_frames
        weights = {name: value for name, value in params.items() if name != "layers"}
        frame = nnx.merge(self.specs.frame.definition, bind(weights, num_frames, self.ops))
        x_fd = jnp.pad(frame.start(mels_mc), ((0, self.num_rows - num_frames), (0, 0)))
        bodies = [self._body(kind) for kind in range(len(self.plan.kinds))]
        stream = x_fd, Cached((), {})
        (x_fd, _), _ = run_layers(self.specs.loop, self.plan, params.get("layers", ()), bodies, stream)
        is_frame_f1 = (jnp.arange(self.num_rows) < num_frames)[:, None]
        return jnp.where(is_frame_f1, frame.end(x_fd), 0)

    def _body(self, kind: int) -> LayerBody:
        """Return the computation of a kind's layers."""
        spec, num_frames = self.plan.kinds[kind], self.settings.num_frames
        starts_f = jnp.zeros(self.num_rows, jnp.int32)
        ends_f = jnp.where(jnp.arange(self.num_rows) < num_frames, num_frames, 0).astype(jnp.int32)

        def layer(weights: _Params) -> Any:
            return nnx.merge(self.specs.kinds[kind].definition, bind(dict(weights), num_frames, self.ops))

        @jax.named_scope("attend")
        def attend(heads: Any, cached: Cached, index: Array | int) -> tuple[Array, Cached]:
            del index
            settings: Any = {"scale": spec.scale, "longest": num_frames}
            return self.attention(heads.q_tnh, heads.k_tkh, heads.v_tkh, starts_f, ends_f, **settings), cached

        @jax.named_scope("finish")
        def finish(weights: _Params, x_fd: Array, attended_fnh: Array, index: Array | int) -> Array:
            del index
            return layer(weights).finish(x_fd, attended_fnh)

        return LayerBody(jax.named_scope("project")(lambda weights, x_fd: layer(weights).project(x_fd)), attend, finish)
