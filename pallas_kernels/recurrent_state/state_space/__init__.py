"""The scan of Mamba-2, a state space model whose states fade by one factor for each head.

A token adds the product of x and b to its heads' states, and reads their product with c. `reference.py` defines what is
correct.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from pallas_kernels.implementations import STATE_SPACE
from pallas_kernels.pool_op import pick_pool_op
from pallas_kernels.recurrent_state import StateBatch, StateOp

from .shape import StateSpaceShape

__all__ = ["StateSpace", "StateSpaceShape", "pick"]


@dataclass(frozen=True)
class StateSpace(StateOp):
    """The op for one shape in one implementation; make it with `pick`."""

    name = "the scan of states"
    implementations = STATE_SPACE

    shape: StateSpaceShape

    def __call__(
        self,
        x_thp: Array,
        dt_th: Array,
        a_h: Array,
        b_tgn: Array,
        c_tgn: Array,
        d_h: Array,
        pool: Array,
        batch: StateBatch,
        *,
        layer: Array | int,
        num_layers: int,
    ) -> tuple[Array, Array]:
        """Update the states of the batch's sequences by their tokens of this step, in `layer`.

        Args:
          x_thp: the inputs of all tokens of the step, which they add to the states.
          dt_th: their time steps, at least 0, in float32.
          a_h: the heads' rates, below 0, in float32: a state shrinks by exp(dt * a).
          b_tgn, c_tgn: the vectors by which each group's heads add to the states, and by which they read.
          d_h: the factors of x in the outputs, in float32.
          pool: the pool of all layers, of `pool_spec`; donate it, the result takes its place.
          batch: the rows and states of the step.
          layer: index of the layer, may be traced.
          num_layers: layers in the pool.

        Returns:
          The outputs [t, h, head_dim] in x's dtype (rows of padding are 0), and the pool.

        Raises:
          ValueError: for arrays that are not of this shape and these dtypes.
        """
        shape, t = self.shape, len(x_thp)
        heads = shape.num_heads
        self._check(
            pool,
            num_layers,
            x=(x_thp, (t, heads, shape.head_dim), shape.dtype),
            dt=(dt_th, (t, heads), jnp.float32),
            a=(a_h, (heads,), jnp.float32),
            b=(b_tgn, (t, shape.num_groups, shape.state_dim), shape.dtype),
            c=(c_tgn, (t, shape.num_groups, shape.state_dim), shape.dtype),
            d=(d_h, (heads,), jnp.float32),
        )
        return self._run(x_thp, dt_th, a_h, b_tgn, c_tgn, d_h, pool, batch, layer=layer, num_layers=num_layers)


def pick(
    shape: StateSpaceShape, platform: str, name: str | None = None, *, architecture: str | None = None
) -> tuple[StateSpace, str | None]:
    """Return the op for a platform, and why it is not the platform's own kernel; see `paged_attention.pick`."""
    return pick_pool_op(StateSpace, shape, platform, name, architecture)
