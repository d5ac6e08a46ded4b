"""The scan of Mamba, also Jamba's and Falcon Mamba's: a state space with a factor for each number of a channel's state.

A token adds the product of x and b to its channels' states, and reads their product with c. `reference.py` defines what
is correct.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from pallas_kernels.implementations import SELECTIVE_SCAN
from pallas_kernels.pool_op import pick_pool_op
from pallas_kernels.recurrent_state import StateBatch, StateOp

from .shape import SelectiveScanShape

__all__ = ["SelectiveScan", "SelectiveScanShape", "pick"]


@dataclass(frozen=True)
class SelectiveScan(StateOp):
    """The op for one shape in one implementation; make it with `pick`."""

    name = "the selective scan"
    implementations = SELECTIVE_SCAN

    shape: SelectiveScanShape

    def __call__(
        self,
        x_tc: Array,
        dt_tc: Array,
        a_cn: Array,
        b_tn: Array,
        c_tn: Array,
        d_c: Array,
        pool: Array,
        batch: StateBatch,
        *,
        layer: Array | int,
        num_layers: int,
    ) -> tuple[Array, Array]:
        """Update the states of the batch's sequences by their tokens of this step, in `layer`.

        Args:
          x_tc: the inputs of all tokens of the step, which they add to the states.
          dt_tc: their time steps, at least 0, in float32.
          a_cn: the rates, below 0, in float32: each number of a channel's state shrinks by exp(dt * a).
          b_tn, c_tn: the vectors by which all channels add to their states, and by which they read.
          d_c: the factors of x in the outputs, in float32.
          pool: the pool of all layers, of `pool_spec`; donate it, the result takes its place.
          batch: the rows and states of the step.
          layer: index of the layer, may be traced.
          num_layers: layers in the pool.

        Returns:
          The outputs [t, c] in x's dtype (rows of padding are 0), and the pool.

        Raises:
          ValueError: for arrays that are not of this shape and these dtypes.
        """
        shape, t = self.shape, len(x_tc)
        channels, numbers = shape.num_channels, shape.state_dim
        self._check(
            pool,
            num_layers,
            x=(x_tc, (t, channels), shape.dtype),
            dt=(dt_tc, (t, channels), jnp.float32),
            a=(a_cn, (channels, numbers), jnp.float32),
            b=(b_tn, (t, numbers), shape.dtype),
            c=(c_tn, (t, numbers), shape.dtype),
            d=(d_c, (channels,), jnp.float32),
        )
        return self._run(x_tc, dt_tc, a_cn, b_tn, c_tn, d_c, pool, batch, layer=layer, num_layers=num_layers)


def pick(
    shape: SelectiveScanShape, platform: str, name: str | None = None, *, architecture: str | None = None
) -> tuple[SelectiveScan, str | None]:
    """Return the op for a platform, and why it is not the platform's own kernel; see `paged_attention.pick`."""
    return pick_pool_op(SelectiveScan, shape, platform, name, architecture)
