"""The common part of the Hopper kernels: compiler parameters, layouts of shared memory, and small numeric helpers.

The kernels are written in Mosaic GPU (`plgpu`) for sm_90a, for jax 0.11.2 to 0.12.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from ..layout import FLOAT8, to_pool_dtype

LOG2_E = math.log2(math.e)
# The maximum that an online softmax starts from: finite, so that a row that has seen nothing decays by exp2(0), not
# NaN.
LOWEST = -1e30
# Avoids division by 0 for rows that attended to nothing.
TINY = 1e-30
# The rows of a wgmma.
MMA_ROWS = 64
WARPGROUP_LANES = 128
# The rows of a tile of tiled shared memory: a TMA writes whole tiles.
TILED_ROWS = 8
# The shared memory of a thread block of an H100, and the part that Mosaic GPU needs (barriers, reductions).
SMEM_BYTES = 227 * 1024
SMEM_RESERVED = 3 * 1024
# The thread blocks that work is divided for: one for each multiprocessor of an H100 or H200. GPUs with other numbers of
# them divide it in the same way, so that sums are the same on all.
WORKERS = 132
# The thread blocks of a persistent kernel in the interpreter, where idle ones take time too.
_INTERPRETED_WORKERS = 2
# Decode multiplies an 8-bit pool in float16, which holds its numbers exactly, by queries times this: up to 2**20 they
# are in float16's range, and from 2**-10 on exact.
FLOAT16_QUERY = 2.0**-4
# The threads of XLA's pool: the interpreter blocks one for each warpgroup that runs.
INTERPRETER_THREADS = 8


def compiler_params() -> plgpu.CompilerParams:
    """Return the compiler parameters of all kernels: warpgroup semantics, and the hardware's exp2 and division."""
    return plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def interpret_params(interpret: bool) -> Any:
    """Return the `interpret` argument of `plgpu.kernel`; interpreted kernels are checked for races."""
    if not interpret:
        return None
    require_interpreter_threads()
    return plgpu.InterpretGPUParams(detect_races=True)


def num_workers(num_cores: int | None, interpret: bool) -> int:
    """Return the thread blocks of a persistent kernel: one for each of the multiprocessors, `WORKERS` if None.

    They take items in turn and never wait for each other, so that any number of them is right.
    """
    return _INTERPRETED_WORKERS if interpret else num_cores or WORKERS


def require_interpreter_threads() -> None:
    """Raise RuntimeError if XLA's pool has too few threads: the interpreter would wait for ever."""
    num_threads = int(os.environ.get("NPROC") or os.cpu_count() or 1)  # as XLA counts them
    if num_threads < INTERPRETER_THREADS:
        raise RuntimeError(
            f"a CPU interprets the GPU's kernels, which takes {INTERPRETER_THREADS} threads of XLA's pool or waits for "
            f"ever, and there are {num_threads}. Set NPROC={INTERPRETER_THREADS} in the environment."
        )


def tiled_smem(shape: tuple[int, ...], dtype: DTypeLike, *, columns: int | None = None) -> Any:
    """Return an SMEM scratch type in the tiled and swizzled form that TMA writes and wgmma reads.

    `columns` is the width of the slices in which the last axis is read, by default its whole length.
    """
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle((shape[-1] if columns is None else columns) * bits)
    tiling = plgpu.TilingTransform((TILED_ROWS, 8 * swizzle // bits))  # pyright: ignore[reportAbstractUsage]
    transforms = (tiling, plgpu.SwizzleTransform(swizzle))  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def smem_bytes(buffer: Any) -> int:
    """Return the size of an SMEM scratch type."""
    return math.prod(buffer.shape) * jnp.dtype(buffer.dtype).itemsize


def in_log2(scores: Array, scale: float, soft_cap: float | None) -> tuple[Array, float]:
    """Return scores of q @ K and the factor that turns them into exponents of 2, a part of a multiply-add later."""
    if soft_cap is None:
        return scores, scale * LOG2_E
    # tanh(x) = 1 - 2 / (1 + exp(2 x)). The hardware's own tanh is off by 5e-4, times the cap in the exponent; its
    # exp2 and rsqrt are good to 22 bits, and its division takes ten instructions.
    root = jax.lax.rsqrt(1.0 + jnp.exp2(scores * (2.0 * LOG2_E * scale / soft_cap)))
    return 1.0 - 2.0 * (root * root), soft_cap * LOG2_E


class Weights(NamedTuple):
    """The weights of a KV tile's scores in an online softmax, r rows and c positions."""

    probs_rc: Array
    decay_r: Array
    """The factor of everything that was summed before."""
    max_r: Array
    """The largest exponent so far."""
    sum_r: Array
    """The sum of the weights so far."""


def online_softmax(scores_rc: Array, unit: float, max_r: Array, sum_r: Array) -> Weights:
    """Return the weights of scores times `unit`, exponents of 2; before them come a maximum and a sum of weights.

    Masked scores are -inf and weigh nothing, even against the LOWEST of a row that has seen no other.
    """
    new_max_r = jnp.maximum(max_r, scores_rc.max(axis=1) * unit)
    decay_r = jnp.exp2(max_r - new_max_r)
    probs_rc = jnp.exp2(scores_rc * unit - along_rows(new_max_r, scores_rc))
    return Weights(probs_rc, decay_r, new_max_r, sum_r * decay_r + probs_rc.sum(axis=1))


def query_unit(dtype: DTypeLike) -> float:
    """Return what 1 is in queries of a dtype, see `decode_queries`."""
    return FLOAT16_QUERY if dtype == jnp.float16 else 1.0


def decode_query_dtype(dtype: DTypeLike, kv_dtype: DTypeLike) -> Any:
    """Return the dtype in which decode multiplies queries of a dtype by keys of a pool."""
    return jnp.dtype(jnp.float16 if kv_dtype in FLOAT8 else dtype)


def decode_queries(q: Array, kv_dtype: DTypeLike) -> Array:
    """Return queries as decode takes them for a pool: float16 in units of `FLOAT16_QUERY` for 8-bit pools.

    The hardware widens 8-bit floats to float16 two at a time, and has no such instruction for bfloat16.
    """
    dtype = decode_query_dtype(q.dtype, kv_dtype)
    if dtype == q.dtype:
        return q
    return to_pool_dtype(q.astype(jnp.float32) * query_unit(dtype), dtype)


def product(a: Any, b: Any) -> Array:
    """Return the float32 product of two matrices in shared memory, wgmma's operands.

    A fresh accumulator that is added to the running sum afterwards costs no more than scaling that sum, which an online
    softmax does anyway, and it runs in the interpreter.
    """

    def multiply(accumulator_ref):
        plgpu.wgmma(accumulator_ref, a, b)
        return accumulator_ref[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def add_product(accumulator: Array, weights: Array, values: Any, smem: Any | None) -> Array:
    """Return `accumulator + weights @ values`: weights [r, c] in registers, values [c, h] in shared memory.

    The interpreter supports neither operands in registers nor accumulators that start from a value. It gets a buffer
    `smem` [r, c] for the weights; when compiled, `smem` is None.
    """
    if smem is None:

        def accumulate(accumulator_ref: Any) -> None:
            plgpu.wgmma(accumulator_ref, weights, values)

        start: Any = plgpu.WGMMAAccumulatorRef.init(accumulator)
        return pl.run_state(accumulate)(start)

    smem[...] = weights
    plgpu.commit_smem()
    return accumulator + product(smem, values)


def row_vector(rows: int, value: float) -> Array:
    """Return a float32 vector with one entry per row of a wgmma accumulator."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def accumulator(rows: int, columns: int) -> Array:
    """Return float32 zeros in the layout of a wgmma accumulator."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), plgpu.Layout.WGMMA)


def along_rows(vector: Array, matrix: Array) -> Array:
    """Return `vector`, one entry per row, in the shape of `matrix`."""
    return jax.lax.broadcast_in_dim(vector, matrix.shape, (0,))


def live_rows(values: Array, rows: Any, live: Array, layout: Any, first: Array | None = None) -> Array:
    """Return the slice `rows` of a matrix of values with 0 in the matrix' rows from `live` on, and before `first`."""
    index = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout) + rows.start
    is_live = index < live if first is None else (index >= first) & (index < live)
    return jnp.where(is_live, values, jnp.zeros_like(values))
