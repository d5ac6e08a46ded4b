"""Ragged paged attention: write this step's K and V into the block pool, then attend over it.

One call serves decodes and prefill chunks of many sequences at once. `reference.py` defines what is correct.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax import Array, lax

from pallas_kernels.implementations import PAGED_ATTENTION, load
from pallas_kernels.pool_op import pick_pool_op

from .layout import (
    AttentionBatch,
    AttentionShape,
    FusedPool,
    KVPool,
    PairedPool,
    SplitPool,
    copy_blocks,
    read_slots,
    to_pool_dtype,
)
from .op import BlockShape, NoAttention, PoolAttention
from .rope import Rope, rotate
from .tiles import Tiles

__all__ = [
    "NO_WINDOW",
    "AttentionBatch",
    "AttentionShape",
    "BlockShape",
    "FusedPool",
    "KVPool",
    "NoAttention",
    "PagedAttention",
    "PairedPool",
    "PoolAttention",
    "Rope",
    "SplitPool",
    "Tiles",
    "copy_blocks",
    "pick",
]

NO_WINDOW = 2**30
"""The window of global attention: longer than any sequence."""


@dataclass(frozen=True)
class PagedAttention(PoolAttention):
    """The op for one shape in one implementation; make it with `pick`."""

    name = "paged attention"
    implementations = PAGED_ATTENTION

    shape: AttentionShape

    @property
    def cuts_pool(self) -> bool:
        """Return True: each device has a part of the pool, its own kv heads, which are axis 1 of every layout."""
        return True

    @property
    def is_invariant(self) -> bool:
        """Return True: on a CPU a row has the same bits whatever is beside it, which the tests check."""
        return True

    def __call__(
        self,
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
        rope: Rope | None = None,
        soft_cap: float | None = None,
        sinks_n: Array | None = None,
    ) -> tuple[Array, KVPool]:
        """Rotate q and k, write k and v at the batch's slots of `layer`, and attend over sequences' blocks.

        Args:
          q_tnh: queries of all tokens of the step.
          k_tkh, v_tkh: keys and values of the same tokens; for a float8 pool they are clipped to its range.
          kv_pool: the pool of all layers, of `pool_spec`; donate it, the result takes its place.
          batch: the position of every token, and how far it sees: up to itself, or up to `row_ends_t`. It may see
            tokens that this step writes.
          layer: index of the layer, may be traced.
          num_layers: layers in the pool.
          window: a token attends to itself, the `window - 1` tokens before it, and the later ones that it sees;
            `NO_WINDOW` for all. May be traced.
          scale: factor on the scores, before `soft_cap`.
          rope: how q and k are rotated; None if they need no rotation.
          soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
          sinks_n: one more score per head, which enters the softmax without a value.

        Returns:
          The attention output [t, n, h] in q's dtype (rows of padding hold finite garbage), and the pool.

        Raises:
          ValueError: for arrays that are not of this shape.
        """
        self._check(q_tnh, k_tkh, v_tkh, kv_pool, num_layers)
        fused: dict[str, Any] = {"rope": rope} if self._entry.fuses_rope(self.shape) else {}
        if not fused:
            if rope is not None:
                q_tnh, k_tkh = rotate(q_tnh, rope), rotate(k_tkh, rope)
            k_tkh, v_tkh = (to_pool_dtype(x, self.shape.kv_dtype) for x in (k_tkh, v_tkh))
        return load(self._entry.function)(
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
            sinks_n=sinks_n,
            tiles=self.tiles,
            interpret=self.interpret,
            **self._device,
            **fused,
        )

    def read(self, kv_pool: KVPool, slots_t: Array, *, layer: Array | int, num_layers: int) -> tuple[Array, Array]:
        """Return the keys and values [t, k, h] that slots of a layer hold, in the dtype of queries.

        They are as they were written: a step that writes them again changes nothing.
        """
        block_size = self.shape.block_size
        rows_t = layer * (kv_pool[0].shape[0] // num_layers) + slots_t // block_size
        held = read_slots(kv_pool, rows_t, slots_t % block_size)
        if kv_pool[0].dtype != self.shape.kv_dtype:  # 8-bit floats, held as uint8
            held = [lax.bitcast_convert_type(x, self.shape.kv_dtype) for x in held]
        k_tkh, v_tkh = (x.astype(self.shape.dtype) for x in held)
        return k_tkh, v_tkh

    def _check(self, q_tnh: Array, k_tkh: Array, v_tkh: Array, kv_pool: KVPool, num_layers: int) -> None:
        shape, t = self.shape, q_tnh.shape[0]
        kv_shape = (t, shape.num_kv_heads, shape.head_dim)
        if q_tnh.shape[1:] != (shape.num_heads, shape.head_dim) or {k_tkh.shape, v_tkh.shape} != {kv_shape}:
            raise ValueError(
                f"paged_attention: q {q_tnh.shape}, k {k_tkh.shape} and v {v_tkh.shape} are not of {self.shape}"
            )
        spec = self.pool_spec(num_layers, kv_pool[0].shape[0] // num_layers)
        if [(x.shape, x.dtype) for x in kv_pool] != [(x.shape, x.dtype) for x in spec]:
            raise ValueError(
                f"paged_attention: a pool of {[x.shape for x in kv_pool]} does not hold {num_layers} layers of {shape}"
            )


def pick(
    shape: AttentionShape,
    platform: str,
    name: str | None = None,
    *,
    architecture: str | None = None,
    num_cores: int | None = None,
) -> tuple[PagedAttention, str | None]:
    """Return the op for a platform ("cpu", "tpu" or "gpu"), and why it is not the platform's own kernels if it is not.

    `name` is a key of `PAGED_ATTENTION`; a CPU runs the kernels of other platforms in their interpreters.
    `architecture` is a GPU's compute capability, such as "9.0" (None for a GPU without one), or a TPU's kind, such as
    "TPU v6 lite" (None for any). `num_cores` is the number of a GPU's multiprocessors (None: an H100's). It changes no
    result. Raises ValueError for a name that does not exist, or that cannot run this shape on this device.
    """
    return pick_pool_op(PagedAttention, shape, platform, name, architecture, num_cores)
