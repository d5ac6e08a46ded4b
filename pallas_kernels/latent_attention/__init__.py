"""Attention over latents: write this step's latents into the block pool, then attend over them.

This is multi-head latent attention in its absorbed form: one latent gives a token's keys and values of all heads. The
matrices that would make them are multiplied into the queries before, and into the output after. So all heads attend to
the latents themselves, and the pool holds nothing else. `reference.py` defines what is correct.

In sparse attention each row attends to few positions, which `pallas_kernels/indexer` chooses.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax import Array

from pallas_kernels.chosen import num_words
from pallas_kernels.implementations import LATENT_ATTENTION, load
from pallas_kernels.paged_attention import AttentionBatch, PoolAttention
from pallas_kernels.paged_attention.layout import to_pool_dtype
from pallas_kernels.pool_op import pick_pool_op

from .layout import LatentPool, LatentShape

__all__ = ["LatentAttention", "LatentPool", "LatentShape", "pick"]


@dataclass(frozen=True)
class LatentAttention(PoolAttention):
    """The op for one shape in one implementation; make it with `pick`."""

    name = "attention over latents"
    implementations = LATENT_ATTENTION

    shape: LatentShape

    @property
    def cuts_pool(self) -> bool:
        """Return False: each device has the whole pool, as every head reads all of a latent."""
        return False

    @property
    def is_invariant(self) -> bool:
        """Return True for the CPU's kernel: a row has the same bits in any batch. XLA's matmuls do not promise it."""
        return self.implementation == "cpu"

    def __call__(
        self,
        q_tnh: Array,
        latents_th: Array,
        kv_pool: LatentPool,
        batch: AttentionBatch,
        *,
        layer: Array | int,
        num_layers: int,
        scale: float,
        chosen_tw: Array | None = None,
    ) -> tuple[Array, LatentPool]:
        """Write latents at the batch's slots of `layer`, and attend over sequences' blocks.

        Args:
          q_tnh: queries of all tokens of the step, absorbed, [t, n, latent_dim + rope_dim]: the last part is rotated.
          latents_th: latents of the same tokens, each followed by its rotated part; for a float8 pool they are clipped
            to its range.
          kv_pool: the pool of all layers, of `pool_spec`; donate it, the result takes its place.
          batch: the position of every token; a token sees itself and all tokens before it, and there are no
            `row_ends_t`.
          layer: index of the layer, may be traced.
          num_layers: layers in the pool.
          scale: factor on the scores.
          chosen_tw: for a shape with `top_k`, and only then, the positions of its sequence that each row attends to, as
            the bits of `pallas_kernels.chosen`: at most `top_k` of them, none after its own. `Indexer` chooses them.

        Returns:
          The weighted sums of latents [t, n, latent_dim] in q's dtype (rows of padding, and rows without a position,
          hold finite garbage), and the pool.

        Raises:
          ValueError: for arrays that are not of this shape.
        """
        self._check(q_tnh, latents_th, kv_pool, num_layers, batch, chosen_tw)
        chosen = {} if chosen_tw is None else {"chosen_tw": chosen_tw, "top_k": self.shape.top_k}
        return load(self._entry.function)(
            q_tnh,
            to_pool_dtype(latents_th, self.shape.kv_dtype),
            kv_pool,
            batch,
            layer=layer,
            num_layers=num_layers,
            scale=scale,
            latent_dim=self.shape.latent_dim,
            tiles=self.tiles,
            interpret=self.interpret,
            **self._device,
            **chosen,
        )

    def _check(
        self,
        q_tnh: Array,
        latents_th: Array,
        kv_pool: LatentPool,
        num_layers: int,
        batch: AttentionBatch,
        chosen_tw: Array | None,
    ) -> None:
        shape, t = self.shape, q_tnh.shape[0]
        if q_tnh.shape[1:] != (shape.num_heads, shape.key_dim) or latents_th.shape != (t, shape.key_dim):
            raise ValueError(f"latent_attention: q {q_tnh.shape} and latents {latents_th.shape} are not of {shape}")
        chosen = None if chosen_tw is None else chosen_tw.shape
        wanted = None if shape.top_k is None else (t, num_words(batch, shape.block_size))
        if chosen != wanted:
            raise ValueError(f"latent_attention: chosen_tw has the shape {chosen}, not {wanted}, for {shape}")
        [pool], [spec] = kv_pool, self.pool_spec(num_layers, len(kv_pool.latents) // num_layers)
        if (pool.shape, pool.dtype) != (spec.shape, spec.dtype):
            raise ValueError(
                f"latent_attention: a pool of {pool.shape} {pool.dtype} does not hold {num_layers} layers of {shape}"
            )


def pick(
    shape: LatentShape,
    platform: str,
    name: str | None = None,
    *,
    architecture: str | None = None,
    num_cores: int | None = None,
) -> tuple[LatentAttention, str | None]:
    """Return the op for a platform, and why it is not the platform's own kernels; see `paged_attention.pick`."""
    return pick_pool_op(LatentAttention, shape, platform, name, architecture, num_cores)
