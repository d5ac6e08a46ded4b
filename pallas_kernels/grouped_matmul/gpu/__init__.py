"""The grouped matmul on Hopper GPUs, in one Mosaic GPU kernel on the weights of all layers.

A row's sums run over `in` in the same order whatever the other rows are, 16 inputs at a time in one accumulator, so its
result is bitwise the same in every batch of the same shapes. Products of quantized weights are bfloat16 before they are
activated.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.paged_attention.gpu.common import num_workers
from pallas_kernels.weights.held import Quantized

from ..groups import Groups
from ..spans import cut
from ..xla import finish
from .kernel import multiply_tiles
from .quantized import multiply_quantized
from .sizes import ROW_SLAB, Sizes, choose_sizes

__all__ = ["ROW_SLAB", "gpu_grouped_matmul"]


def gpu_grouped_matmul(
    x_ri: Array,
    weight: Array | Quantized,
    layer: Array | int,
    groups: Groups,
    *,
    activation: str | None = None,
    out_dtype: DTypeLike,
    interpret: bool = False,
    num_cores: int | None = None,
    sizes: Sizes | None = None,
) -> Array:
    """See `GroupedMatmul`. `interpret` runs the kernel on a CPU, in an interpreter that looks for races.

    `num_cores` is the number of the GPU's multiprocessors. `sizes` is for tests; by default the shapes decide.
    """
    if isinstance(weight, Quantized):
        product_ro = multiply_quantized(x_ri, weight, layer, groups, interpret=interpret, num_cores=num_cores)
        return finish(product_ro.astype(jnp.float32), None, activation, out_dtype)
    num_experts, num_columns = weight.shape[1], weight.shape[2] // (1 if activation is None else 2)
    sizes = sizes or choose_sizes(x_ri.shape[0], num_experts, num_columns, out_dtype)
    sizes = sizes._replace(workers=num_workers(num_cores, interpret))
    tiles = cut(groups, x_ri.shape[0], ROW_SLAB, sizes.rows)
    options = {"activation": activation, "out_dtype": out_dtype, "sizes": sizes, "interpret": interpret}
    return multiply_tiles(x_ri, weight, layer, tiles, **options)
