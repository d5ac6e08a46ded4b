"""The gated delta rule, a recurrent form of linear attention: Qwen3-Next's and Qwen3.5's, and Kimi's delta attention.

A state is a memory of values by keys. Each token lets it fade, looks up the value held for the token's key, corrects it
towards the token's value, and reads the value held for the token's query. `reference.py` defines what is correct.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from pallas_kernels.implementations import GATED_DELTA
from pallas_kernels.pool_op import pick_pool_op
from pallas_kernels.recurrent_state import StateBatch, StateOp

from .shape import GatedDeltaShape

__all__ = ["GatedDelta", "GatedDeltaShape", "pick"]


@dataclass(frozen=True)
class GatedDelta(StateOp):
    """The op for one shape in one implementation; make it with `pick`."""

    name = "the gated delta rule"
    implementations = GATED_DELTA

    shape: GatedDeltaShape

    def __call__(
        self,
        q_tkd: Array,
        k_tkd: Array,
        v_tvd: Array,
        log_decay_tvd: Array,
        beta_tv: Array,
        pool: Array,
        batch: StateBatch,
        *,
        layer: Array | int,
        num_layers: int,
    ) -> tuple[Array, Array]:
        """Update the states of the batch's sequences by their tokens of this step, in `layer`.

        Args:
          q_tkd, k_tkd: queries and keys of all tokens of the step; the op brings each to length 1, and divides queries
            by the root of `key_dim`.
          v_tvd: their values.
          log_decay_tvd: logarithms of decays, at most 0, in float32: [t, v, 1], or [t, v, key_dim] with decays of keys.
          beta_tv: how far the held value is corrected, in float32.
          pool: the pool of all layers, of `pool_spec`; donate it, the result takes its place.
          batch: the rows and states of the step.
          layer: index of the layer, may be traced.
          num_layers: layers in the pool.

        Returns:
          The outputs [t, v, value_dim] in v's dtype (rows of padding are 0), and the pool.

        Raises:
          ValueError: for arrays that are not of this shape and these dtypes.
        """
        shape, t = self.shape, len(q_tkd)
        heads = shape.num_value_heads
        self._check(
            pool,
            num_layers,
            q=(q_tkd, (t, shape.num_key_heads, shape.key_dim), shape.dtype),
            k=(k_tkd, (t, shape.num_key_heads, shape.key_dim), shape.dtype),
            v=(v_tvd, (t, heads, shape.value_dim), shape.dtype),
            log_decay=(log_decay_tvd, (t, heads, shape.decay_dim), jnp.float32),
            beta=(beta_tv, (t, heads), jnp.float32),
        )
        arguments = q_tkd, k_tkd, v_tvd, log_decay_tvd, beta_tv, pool, batch
        return self._run(*arguments, layer=layer, num_layers=num_layers)


def pick(
    shape: GatedDeltaShape, platform: str, name: str | None = None, *, architecture: str | None = None
) -> tuple[GatedDelta, str | None]:
    """Return the op for a platform, and why it is not the platform's own kernel; see `paged_attention.pick`."""
    return pick_pool_op(GatedDelta, shape, platform, name, architecture)
