"""Ragged paged attention: write this step's K and V into the block pool, then attend over it.

One call serves decodes and prefill chunks of many sequences at once. `reference.py` defines what is correct.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from jax import Array

from .layout import AttentionBatch, KVPool, copy_blocks, kv_pool_spec
from .tiles import Tiles
from .xla import xla_paged_attention

__all__ = [
    "IMPLEMENTATIONS",
    "AttentionBatch",
    "KVPool",
    "Tiles",
    "copy_blocks",
    "kv_pool_spec",
    "paged_attention",
]

# One entry per way of running the op; each has the signature of `paged_attention` without `implementation`.
IMPLEMENTATIONS: MappingProxyType[str, Callable[..., tuple[Array, KVPool]]] = MappingProxyType(
    {"xla": xla_paged_attention}
)


def paged_attention(
    q_tnh: Array,
    k_tkh: Array,
    v_tkh: Array,
    kv_pool: KVPool,
    batch: AttentionBatch,
    *,
    layer: Array | int,
    num_layers: int,
    window: Array | int,
    scale: float,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> tuple[Array, KVPool]:
    """Write `k_tkh`, `v_tkh` at the batch's slots of `layer`, then attend causally over each sequence's blocks.

    Args:
      q_tnh: queries of all tokens of the step, RoPE applied; n is a multiple of k.
      k_tkh, v_tkh: keys and values of the same tokens.
      kv_pool: the pool of all layers; donate it, the result takes its place.
      batch: where every token lives, from `AttentionBatch`.
      layer: index of the layer, may be traced.
      num_layers: layers in the pool.
      window: a token attends to itself and the `window - 1` tokens before it; may be traced.
      scale: factor on the scores, before `soft_cap`.
      soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
      implementation: a name of `IMPLEMENTATIONS`; None picks one.

    Returns:
      The attention output [t, n, h] in q's dtype (rows of padding hold finite garbage), and the pool.

    Raises:
      ValueError: for shapes that do not fit together or an unknown implementation.
    """
    _check_shapes(q_tnh, k_tkh, v_tkh, kv_pool, num_layers)
    name = "xla" if implementation is None else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"paged_attention: no implementation {name!r}; there are {sorted(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[name](
        q_tnh,
        k_tkh,
        v_tkh,
        kv_pool,
        batch,
        layer=layer,
        num_layers=num_layers,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
    )


def _check_shapes(q_tnh: Array, k_tkh: Array, v_tkh: Array, kv_pool: KVPool, num_layers: int) -> None:
    t, n, h = q_tnh.shape
    k = k_tkh.shape[1]
    if k_tkh.shape != (t, k, h) or v_tkh.shape != k_tkh.shape:
        raise ValueError(f"paged_attention: q {q_tnh.shape}, k {k_tkh.shape} and v {v_tkh.shape} do not fit together")
    if n % k:
        raise ValueError(f"paged_attention: {n} query heads are not a multiple of {k} kv heads")
    if kv_pool.k.shape[1:3] != (k, h) or kv_pool.k.shape[0] % num_layers:
        raise ValueError(
            f"paged_attention: a pool of {kv_pool.k.shape} does not hold {num_layers} layers of k={k}, h={h}"
        )
