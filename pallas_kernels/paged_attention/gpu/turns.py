"""Attention of 64 query rows by one of two warpgroups that take turns, as in FlashAttention-3.

While one of them is in the softmax of its KV tile, the other has the tensor cores. Prefill and the attention of vision
towers are programs of two such warpgroups and a third, which loads the tiles into a ring of stages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .common import LOWEST, MMA_ROWS, Weights, accumulator, add_product, along_rows, online_softmax, product, row_vector

type _Weigh = Callable[[Array, Array], tuple[Array, float]]
"""Maps the scores of a tile, and the tile, to masked scores, and to the factor that turns them into exponents of 2."""


class Attended(NamedTuple):
    """The running result of r rows: an online softmax in exponents of 2."""

    acc_rh: Array
    """The sum of the weighted values."""
    max_r: Array
    sum_r: Array
    """The sum of the weights."""


class _Buffers(Protocol):
    """The refs in shared memory: w warpgroups, r rows of one, c positions of a KV tile, a stages."""

    @property
    def q_wrh(self) -> Any: ...
    @property
    def k_ach(self) -> Any: ...
    @property
    def v_ach(self) -> Any: ...
    @property
    def probs_wrc(self) -> Any:
        """A buffer for the weights in the interpreter, otherwise None."""


class _Barriers(Protocol):
    """The barriers of filled stages, of emptied ones, and the one at which turns are handed over."""

    @property
    def k_a(self) -> Any: ...
    @property
    def v_a(self) -> Any: ...
    @property
    def k_free_a(self) -> Any: ...
    @property
    def v_free_a(self) -> Any: ...
    @property
    def turn(self) -> Any: ...


class Turns(NamedTuple):
    """One warpgroup that attends in turns with another."""

    warpgroup: Array
    """0 or 1; 0 comes first."""
    smem: _Buffers
    barriers: _Barriers
    overlaps: bool = False
    """Whether the product with the next tile's keys runs beside that with a tile's values."""

    @property
    def _q_rh(self) -> Any:
        return self.smem.q_wrh.at[self.warpgroup]

    @property
    def _probs_rc(self) -> Any:
        return None if self.smem.probs_wrc is None else self.smem.probs_wrc.at[self.warpgroup]

    def attend(self, first: Array, stop: Array, last_stop: Array, weigh: _Weigh) -> Attended:
        """Attend the KV tiles `first` to `stop`, and keep the turns of those up to `last_stop`."""
        nothing = Attended(
            accumulator(MMA_ROWS, self._q_rh.shape[1]), row_vector(MMA_ROWS, LOWEST), row_vector(MMA_ROWS, 0.0)
        )
        pl.when(self.warpgroup == 1)(self._hand_over)
        if self.overlaps:
            overlapped = partial(self._attend_overlapped, first, stop, weigh)
            attended = lax.cond(first < stop, overlapped, lambda nothing: nothing, nothing)
        else:
            attended = lax.fori_loop(
                first, stop, lambda tile, so_far: self._attend(tile, self._stage(tile - first), so_far, weigh), nothing
            )
        lax.fori_loop(stop, last_stop, lambda tile, _: self._skip(self._stage(tile - first)), None)
        pl.when(self.warpgroup == 0)(self._hand_over)
        return attended

    def _stage(self, number: Array) -> Array:
        return lax.rem(number, self.smem.k_ach.shape[0])

    def _attend(self, tile: Array, stage: Array, so_far: Attended, weigh: _Weigh) -> Attended:
        """Attend a KV tile."""
        acc_rh, max_r, sum_r = so_far
        plgpu.barrier_wait(self.barriers.k_a.at[stage])
        scores_rc = self._multiply_keys(stage)
        plgpu.barrier_arrive(self.barriers.k_free_a.at[stage])
        probs_rc, decay_r, max_r, sum_r = online_softmax(*weigh(scores_rc, tile), max_r, sum_r)
        acc_rh *= along_rows(decay_r, acc_rh)
        # All of the softmax happens before the tensor cores' next turn.
        acc_rh, sum_r, max_r, weights_rc = lax.optimization_barrier(
            (acc_rh, sum_r, max_r, probs_rc.astype(jnp.bfloat16))
        )
        plgpu.barrier_arrive(self.barriers.turn)
        plgpu.barrier_wait(self.barriers.v_a.at[stage])
        plgpu.barrier_wait(self.barriers.turn)
        acc_rh = add_product(acc_rh, weights_rc, self.smem.v_ach.at[stage], self._probs_rc)
        plgpu.barrier_arrive(self.barriers.v_free_a.at[stage])
        return Attended(acc_rh, max_r, sum_r)

    def _attend_overlapped(self, first: Array, stop: Array, weigh: _Weigh, nothing: Attended) -> Attended:
        """Attend the KV tiles, at least one. A tile's values are multiplied in the turn of the next tile's keys."""

        def softmax(scores_rc: Array, tile: Array, stage: Array | int, so_far: Attended) -> Weights:
            plgpu.barrier_arrive(self.barriers.k_free_a.at[stage])
            weights = online_softmax(*weigh(scores_rc, tile), so_far.max_r, so_far.sum_r)
            weights = lax.optimization_barrier(weights)
            # This wait also is what keeps ptxas from moving the softmax behind the wait for the other product.
            plgpu.barrier_wait(self.barriers.v_a.at[stage])
            return weights

        def end_turn(acc_rh: Array, weights: Weights) -> tuple[Attended, Array]:
            attended = Attended(acc_rh * along_rows(weights.decay_r, acc_rh), weights.max_r, weights.sum_r)
            state = lax.optimization_barrier((attended, weights.probs_rc.astype(jnp.bfloat16)))
            self._hand_over()
            return state

        def attend(tile: Array, state: tuple[Attended, Array]) -> tuple[Attended, Array]:
            so_far, weights_rc = state
            stage, before = self._stage(tile - first), self._stage(tile - first - 1)
            plgpu.barrier_wait(self.barriers.k_a.at[stage])

            weigh_scores = partial(softmax, tile=tile, stage=stage, so_far=so_far)
            acc_rh, weights = self._multiply_both(stage, so_far.acc_rh, weights_rc, before, weigh_scores)
            plgpu.barrier_arrive(self.barriers.v_free_a.at[before])
            return end_turn(acc_rh, weights)

        plgpu.barrier_wait(self.barriers.k_a.at[0])
        state = end_turn(nothing.acc_rh, softmax(self._multiply_keys(0), first, 0, nothing))
        attended, weights_rc = lax.fori_loop(first + 1, stop, attend, state)
        last = self._stage(stop - 1 - first)
        acc_rh = add_product(attended.acc_rh, weights_rc, self.smem.v_ach.at[last], self._probs_rc)
        plgpu.barrier_arrive(self.barriers.v_free_a.at[last])
        return attended._replace(acc_rh=acc_rh)

    def _multiply_both(
        self,
        key_stage: Array,
        acc_rh: Array,
        weights_rc: Array,
        value_stage: Array,
        softmax: Callable[[Array], Weights],
    ) -> tuple[Array, Weights]:
        """Return `acc_rh + weights_rc @ V`, and `softmax(q @ K^T)`, which is computed while the first product runs."""
        keys_hc, values_ch = self.smem.k_ach.at[key_stage].T, self.smem.v_ach.at[value_stage]
        if self._probs_rc is not None:  # the interpreter, see `add_product`
            scores_rc = product(self._q_rh, keys_hc)
            acc_rh = add_product(acc_rh, weights_rc, values_ch, self._probs_rc)
            self._hand_over()
            return acc_rh, softmax(scores_rc)

        def body(scores_ref: Any, acc_ref: Any) -> tuple[Array, Weights]:
            acc_ref[...] = acc_rh
            plgpu.wgmma(scores_ref, self._q_rh, keys_hc)
            plgpu.wgmma(acc_ref, weights_rc, values_ch)
            self._hand_over()
            weights = softmax(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1))
            # Weights must not get the registers of those that the tensor cores still read.
            return lax.optimization_barrier((plgpu.wgmma_accumulator_load(acc_ref, wait_n=0), weights))

        shapes = (MMA_ROWS, self.smem.k_ach.shape[1]), (MMA_ROWS, self._q_rh.shape[1])
        return pl.run_scoped(body, *(plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for shape in shapes))

    def _skip(self, stage: Array) -> None:
        plgpu.barrier_arrive(self.barriers.k_free_a.at[stage])
        plgpu.barrier_arrive(self.barriers.v_free_a.at[stage])
        self._hand_over()
        self._hand_over()

    def _multiply_keys(self, stage: Array | int) -> Array:
        def body(acc_ref: Any) -> Array:
            plgpu.wgmma(acc_ref, self._q_rh, self.smem.k_ach.at[stage].T)
            self._hand_over()
            return acc_ref[...]

        return pl.run_scoped(body, plgpu.WGMMAAccumulatorRef((MMA_ROWS, self.smem.k_ach.shape[1]), jnp.float32))

    def _hand_over(self) -> None:
        plgpu.barrier_arrive(self.barriers.turn)
        plgpu.barrier_wait(self.barriers.turn)
