"""A tower that sees or hears as pure functions over a plain nested dict of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from pallas_kernels.linear import Linear
from pallas_kernels.paged_attention.rope import Rope, rotate
from pallas_kernels.segment_attention import SegmentAttention

from ..config import LayerSpec, RopeConfig
from ..loop import Cached, LayerBody, LayerLoop, run_layers
from ..rope import grid_rope_table, rope_table
from ..specs import ModelSpecs
from ..weights import Ops, bind
from .chunks import ChunkFrame
from .conformer import ConformerFrame, LocalHeads, attend_locally
from .frame import RowProjector, SoundFrame, TowerFrame
from .layout import PatchBatch, count_slots
from .settings import Grid

_Params = Mapping[str, Any]
_AnyFrame = TowerFrame | SoundFrame | ChunkFrame | ConformerFrame


class Tower:
    """The functions of one tower; it holds no arrays. Its config has `tower`, the tower's settings."""

    def __init__(self, specs: ModelSpecs, *, ops: Ops | None = None, attention: SegmentAttention | None = None) -> None:
        if specs.config.tower is None:
            raise ValueError(f"{specs.config.architecture} is not a tower: its config has no tower settings")
        self.specs, self.config, self.settings, self.plan = specs, specs.config, specs.config.tower, specs.plan
        self.ops = ops or Ops(Linear("cpu" if specs.loop is LayerLoop.IN_PLACE else "xla"))
        self.attention = attention or SegmentAttention()

    @property
    def facts(self) -> tuple[Any, ...]:
        """Return all that the functions of the tower depend on."""
        return *self.specs.facts, self.ops, self.attention

    @jax.named_scope("encode")
    def encode(self, params: _Params, inputs: PatchBatch) -> Array:
        """Return rows [r, (1 + k) * d], in the model's dtype, with d the text model's width and k its deepstack inputs.

        Rows of padding are finite, and of no use.
        """
        num_slots = jnp.asarray(inputs.num_slots)
        frame = self._frame_of(params, num_slots)
        bodies = [self._body(kind, inputs) for kind in range(len(self.plan.kinds))]
        stream, tapped = (frame.start(inputs), Cached((), {})), [layer + 1 for layer in self.settings.deepstack]
        (x_pd, _), taps_kpd = run_layers(self.specs.loop, self.plan, params.get("layers", ()), bodies, stream, tapped)
        states = [x_pd, *(() if taps_kpd is None else taps_kpd)]
        rows_rg = jnp.asarray(inputs.rows_rg)
        joined = [
            self._projector(frame, name).gather(x_pd, rows_rg) for name, x_pd in zip(frame.outputs, states, strict=True)
        ]
        by_rows = self._frame_of(params, jnp.asarray(inputs.num_rows))
        outputs = (
            self._projector(by_rows, name).project(x_ri) for name, x_ri in zip(frame.outputs, joined, strict=True)
        )
        return frame.arrange(jnp.concatenate(list(outputs), axis=-1), inputs)

    def _body(self, kind: int, inputs: PatchBatch) -> LayerBody:
        """Return the computation of a kind's layers."""
        spec, num_slots = self.plan.kinds[kind], jnp.asarray(inputs.num_slots)
        rope = None
        if spec.rope is not None:
            table = self.config.ropes[spec.rope]
            rope = Rope(*self._rope_table(table, spec.head_dim, jnp.asarray(inputs.coordinates_p2)))
        which = 0 if spec.attention_chunk is None else 1
        starts_p, ends_p = jnp.asarray(inputs.starts_ap)[which], jnp.asarray(inputs.ends_ap)[which]

        def layer(weights: _Params) -> Any:
            return nnx.merge(self.specs.kinds[kind].definition, bind(dict(weights), num_slots, self.ops))

        @jax.named_scope("attend")
        def attend(heads: Any, cached: Cached, index: Array | int) -> tuple[Any, Cached]:
            del index
            if isinstance(heads, LocalHeads):
                return (attend_locally(heads, spec), heads.x_pd), cached
            q_pnh, k_pnh = heads.q_tnh, heads.k_tkh
            if rope is not None:
                q_pnh, k_pnh = rotate(q_pnh, rope), rotate(k_pnh, rope)
            longest = self._longest_segment(spec)
            return self.attention(
                q_pnh, k_pnh, heads.v_tkh, starts_p, ends_p, scale=spec.scale, longest=longest
            ), cached

        @jax.named_scope("finish")
        def finish(weights: _Params, x_pd: Array, attended: Any, index: Array | int) -> Array:
            del index
            return layer(weights).finish(x_pd, attended)

        return LayerBody(jax.named_scope("project")(lambda weights, x_pd: layer(weights).project(x_pd)), attend, finish)

    def _frame_of(self, params: _Params, num_rows: Array) -> _AnyFrame:
        """Return the frame for a call whose rows from `num_rows` on are padding."""
        weights = {name: value for name, value in params.items() if name != "layers"}
        return nnx.merge(self.specs.frame.definition, bind(weights, num_rows, self.ops))

    def _rope_table(self, table: RopeConfig, head_dim: int, coordinates_p2: Array) -> tuple[Array, Array]:
        """Return cos and sin, each [p, head_dim / 2], of patches in a grid, or of a sound's frames."""
        if self.settings.sound is not None:
            frames_p = coordinates_p2[:, 1]
            return rope_table(table, head_dim, frames_p, frames_p)
        return grid_rope_table(table, head_dim, coordinates_p2, alternates=self.settings.rope_alternates)

    def _longest_segment(self, spec: LayerSpec) -> int | None:
        """Return the most slots that a slot of a kind's layers attends to; None if images have no largest size."""
        if self.settings.sound is not None:
            return self.settings.sound.window or self.settings.sound.num_frames
        if spec.attention_chunk is not None:
            return spec.attention_chunk
        if self.settings.positions == "exact":
            return count_slots(self.settings, [Grid(1, self.settings.side, self.settings.side)])
        return None

    @staticmethod
    def _projector(frame: _AnyFrame, name: str) -> RowProjector:
        return getattr(frame, name)
