"""The indexer of DeepSeek Sparse Attention: write this step's index keys, then choose the positions to attend to.

A row's score of a position is a weighted sum, over the indexer's heads, of the positive parts of products of queries
with the position's one key. The row attends to the `top_k` positions of the highest scores. `reference.py` defines what
is correct.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax import Array

from pallas_kernels.implementations import INDEXER, load
from pallas_kernels.paged_attention import AttentionBatch, PoolAttention
from pallas_kernels.paged_attention.layout import to_pool_dtype
from pallas_kernels.pool_op import pick_pool_op

from .layout import IndexerPool, IndexerShape

__all__ = ["Indexer", "IndexerPool", "IndexerShape", "pick"]


@dataclass(frozen=True)
class Indexer(PoolAttention):
    """The op for one shape in one implementation; make it with `pick`."""

    name = "the indexer of sparse attention"
    implementations = INDEXER

    shape: IndexerShape

    @property
    def cuts_pool(self) -> bool:
        """Return False: each device has the whole pool, and chooses the same positions."""
        return False

    @property
    def is_invariant(self) -> bool:
        """Return True for the CPU's kernel: a row has the same bits in any batch. XLA's matmuls do not promise it."""
        return self.implementation == "cpu"

    def __call__(
        self,
        q_tnh: Array,
        k_th: Array,
        weights_tn: Array,
        kv_pool: IndexerPool,
        batch: AttentionBatch,
        *,
        layer: Array | int,
        num_layers: int,
    ) -> tuple[Array, IndexerPool]:
        """Write keys at the batch's slots of `layer`, and choose positions of each row's sequence.

        Args:
          q_tnh: the indexer's queries of all tokens of the step, rotated.
          k_th: the keys of the same tokens, rotated; for a float8 pool they are clipped to its range.
          weights_tn: float32 weights of the heads, with the model's constant factors in them.
          kv_pool: the pool of all layers, of `pool_spec`; donate it, the result takes its place.
          batch: the position of every token, in tiles of this op's `tiles`; a token sees itself and all tokens before
            it, and there are no `row_ends_t`.
          layer: index of the layer, may be traced.
          num_layers: layers in the pool.

        Returns:
          The positions that each row attends to, as the bits [t, w] of `pallas_kernels.chosen`, and the pool. They are
          the `top_k` visible positions of the highest scores, the lowest ones where scores are equal, and all where
          fewer are visible; rows of padding have none.

        Raises:
          ValueError: for arrays that are not of this shape.
        """
        self._check(q_tnh, k_th, weights_tn, kv_pool, num_layers)
        return load(self._entry.function)(
            q_tnh,
            to_pool_dtype(k_th, self.shape.kv_dtype),
            weights_tn,
            kv_pool,
            batch,
            layer=layer,
            num_layers=num_layers,
            top_k=self.shape.top_k,
            tiles=self.tiles,
            interpret=self.interpret,
            **self._device,
        )

    def _check(self, q_tnh: Array, k_th: Array, weights_tn: Array, kv_pool: IndexerPool, num_layers: int) -> None:
        shape, t = self.shape, q_tnh.shape[0]
        wanted = (t, shape.num_heads, shape.head_dim), (t, shape.head_dim), (t, shape.num_heads)
        if (q_tnh.shape, k_th.shape, weights_tn.shape) != wanted or weights_tn.dtype != "float32":
            raise ValueError(
                f"indexer: q {q_tnh.shape}, k {k_th.shape} and {weights_tn.dtype} weights {weights_tn.shape} are not "
                f"of {shape} with float32 weights"
            )
        [pool], [spec] = kv_pool, self.pool_spec(num_layers, len(kv_pool.keys) // num_layers)
        if (pool.shape, pool.dtype) != (spec.shape, spec.dtype):
            raise ValueError(
                f"indexer: a pool of {pool.shape} {pool.dtype} does not hold {num_layers} layers of {shape}"
            )


def pick(
    shape: IndexerShape,
    platform: str,
    name: str | None = None,
    *,
    architecture: str | None = None,
    num_cores: int | None = None,
) -> tuple[Indexer, str | None]:
    """Return the op for a platform, and why it is not the platform's own kernels; see `paged_attention.pick`."""
    return pick_pool_op(Indexer, shape, platform, name, architecture, num_cores)
