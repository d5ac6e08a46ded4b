"""A quantized weight is multiplied by on several devices, each of which has a share of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from pallas_kernels.linear.xla import ACTIVATIONS
from pallas_kernels.weights.held import Quantized

from ..ops import LayerOf
from ..params import MESH_AXES, Cut

EVERYWHERE = PartitionSpec()


def multiply_spread(
    x_ti: Array,
    weight: Quantized,
    place: LayerOf,
    cut: Cut | None,
    *,
    out_dtype: DTypeLike | None = None,
    plus_to: Array | None = None,
    bias_o: Array | None = None,
    activation: str | None = None,
) -> Array:
    """Return what `Linear` gives for a weight [l, o, i] of which each device of a mesh has a share, [t, o].

    XLA shares out plain matmuls itself, but no kernels. Devices with shares of the inputs exchange their sums in the
    result's dtype, as XLA does. An activation is of all columns: none gates others.
    """
    mesh, op = place.ops.mesh, place.ops.linear
    assert mesh is not None
    out_dtype = jnp.dtype(out_dtype or x_ti.dtype)
    is_finished = plus_to is None and bias_o is None and activation is None
    # Sums that are exchanged are half as many bytes in bfloat16; others are rounded once, at the end.
    dtype = out_dtype if is_finished or cut is Cut.INPUTS else jnp.float32

    def multiply(x_ti: Array, weight: Quantized, layer: Array, num_rows: Array) -> Array:
        y_to = op(x_ti, weight, layer, num_rows=num_rows, out_dtype=dtype)
        return jax.lax.psum(y_to, MESH_AXES) if cut is Cut.INPUTS else y_to

    def weights(part: Array) -> PartitionSpec:
        """What there is once for all inputs, such as a scale for each output, is whole where those are cut."""
        if cut is Cut.INPUTS:
            return PartitionSpec(None, None, MESH_AXES) if part.shape[2] > 1 else EVERYWHERE
        return EVERYWHERE if cut is None else PartitionSpec(None, MESH_AXES)

    columns = PartitionSpec(None, MESH_AXES)
    # The kernels' outputs do not declare over which mesh axes they vary, which check_vma would need.
    sharded = jax.shard_map(
        multiply,
        mesh=mesh,
        in_specs=(columns if cut is Cut.INPUTS else EVERYWHERE, weight.map(weights), EVERYWHERE, EVERYWHERE),
        out_specs=columns if cut is Cut.OUTPUTS else EVERYWHERE,
        check_vma=False,
    )
    y_to = sharded(x_ti, weight, jnp.asarray(place.layer, jnp.int32), jnp.asarray(place.num_rows, jnp.int32))
    if is_finished:
        return y_to
    for each in (plus_to, bias_o):
        y_to = y_to if each is None else y_to.astype(jnp.float32) + each
    return (y_to if activation is None else ACTIVATIONS[activation](y_to)).astype(out_dtype)
