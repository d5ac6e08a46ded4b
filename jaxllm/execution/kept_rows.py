"""What the rows of running requests keep from step to step, in arrays that a step reads by index. numpy only.

A request's settings are written when it first has a row, and its blocks when they have changed: a step of many rows
writes what a few of them have new, and copies the rest.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntFlag
from typing import NamedTuple

import numpy as np

from jaxllm.params.checks import INT32_MAX
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.plan import Owner, StepPlan
from jaxllm.scheduling.request import needs_token_counts


class Wants(IntFlag):
    """What a request asks of the sampler."""

    TRUNCATION = 1
    LOGPROBS = 2
    PENALTIES = 4
    BIAS = 8
    ASKED_IDS = 16
    COUNTS = 32

    FULL = LOGPROBS | PENALTIES | BIAS | ASKED_IDS | COUNTS
    """Only the full program does any of these."""


class RowSettings(NamedTuple):
    """The settings of a step's chunks, one row for each."""

    tables: tuple[np.ndarray, ...]
    """For each cache group, the blocks of each slot; null blocks behind them. In a model with clips the last table has
    their blocks. Tables change when the next step's settings are taken."""
    slots_s: np.ndarray
    """The slot of each chunk's request in the tables."""
    samples_s: np.ndarray
    """True for the chunks that sample."""
    seeds_s2: np.ndarray
    """The bits of the high and low word of each seed."""
    top_k_s: np.ndarray
    prompt_lens_s: np.ndarray
    adapter_slots_s: np.ndarray
    pair_starts_s: np.ndarray
    """The position of a pair's second text; INT32_MAX for a single text."""
    count_rows_s: np.ndarray
    wants_s: np.ndarray
    """Bits of `Wants`."""
    vectors_s: np.ndarray
    """The number of each row's steering vector, 0 for none."""
    temperature_s: np.ndarray
    top_p_s: np.ndarray
    min_p_s: np.ndarray
    presence_s: np.ndarray
    frequency_s: np.ndarray
    repetition_s: np.ndarray
    vector_scales_s: np.ndarray

    def sampled(self, wants: Wants) -> np.ndarray:
        """Return which chunks sample and ask for any of these."""
        return self.samples_s & ((self.wants_s & int(wants)) != 0)


class KeptRows:
    """Settings and blocks of the requests that recently had rows, each in a slot."""

    def __init__(self, num_rows: int, num_groups: int, max_blocks: int, clip_blocks: int = 0) -> None:
        """Keep twice as many as a step has rows, so that requests that sit out a step need not be written again.

        A request has at most `max_blocks` blocks in each cache group, and its clip has `clip_blocks`.
        """
        num_slots = 2 * num_rows
        self._slots: dict[Owner, int] = {}
        self._free = list(range(num_slots))
        self._ints = np.zeros((num_slots, 9), np.int32)
        self._floats = np.zeros((num_slots, 7), np.float32)
        self._blocks: list[tuple[array[int], ...]] = [()] * num_slots
        """The blocks that each slot has in the tables."""
        self._tables = tuple(np.zeros((num_slots, max_blocks), np.int32) for _ in range(num_groups))
        self._clip_tables = tuple(np.zeros((num_slots, count), np.int32) for count in [clip_blocks] if count)

    def take(self, plan: StepPlan) -> RowSettings:
        """Return the settings of a step's chunks, and bring the tables up to date for them."""
        decodes, others, blocks = plan.decodes, plan.others, self._blocks
        owners = [*decodes.owners, *[chunk.owner for chunk in others]]
        try:
            slots = list(map(self._slots.__getitem__, owners))
        except KeyError:
            self._add(owners)
            slots = list(map(self._slots.__getitem__, owners))
        for slot, block_ids in zip(slots, [*decodes.block_ids, *[chunk.block_ids for chunk in others]], strict=True):
            if blocks[slot] is not block_ids:
                self._write_blocks(slot, block_ids)
        slots_s = to_int32(slots)
        ints, floats = self._ints[slots_s].T, self._floats[slots_s].T
        samples_s = np.ones(len(slots), bool)
        samples_s[len(decodes.starts) :] = [chunk.samples for chunk in others]
        return RowSettings((*self._tables, *self._clip_tables), slots_s, samples_s, ints[:2].T, *ints[2:], *floats)

    def _add(self, owners: Sequence[Owner]) -> None:
        """Give each owner a slot; those of others are given up if there are not enough."""
        new = [owner for owner in owners if owner not in self._slots]
        if len(new) > len(self._free):
            self._slots = {owner: self._slots[owner] for owner in owners if owner in self._slots}
            self._free = sorted(set(range(len(self._blocks))) - set(self._slots.values()))
        for owner in new:
            slot = self._slots[owner] = self._free.pop()
            self._write_settings(slot, owner)

    def _write_settings(self, slot: int, owner: Owner) -> None:
        params = owner.params
        high, low = (word - (word >> 31 << 32) for word in divmod(owner.seed, 1 << 32))
        self._ints[slot] = (
            high,
            low,
            params.top_k,
            owner.num_prompt_tokens,
            owner.adapter_slot,
            INT32_MAX if owner.pair_start is None else owner.pair_start,
            owner.count_row or 0,
            _wants(owner),
            0 if owner.steered is None else owner.steered.index,
        )
        for table in self._clip_tables:
            assert owner.clip_blocks is not None
            table[slot] = owner.clip_blocks
        self._floats[slot] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
            0.0 if owner.steered is None else owner.steered.scale,
        )

    def _write_blocks(self, slot: int, block_ids: tuple[array[int], ...]) -> None:
        self._blocks[slot] = block_ids
        for table, ids in zip(self._tables, block_ids, strict=True):
            table[slot, : len(ids)] = ids
            table[slot, len(ids) :] = 0


def to_int32(values: Sequence[int]) -> np.ndarray:
    """Return an int32 array of Python numbers; several times faster than np.array."""
    return np.frombuffer(array("i", values), np.int32)


def _wants(owner: Owner) -> Wants:
    params, wants = owner.params, Wants(0)
    if _truncates(params):
        wants |= Wants.TRUNCATION
    if params.logprobs is not None or params.logprob_token_ids:
        wants |= Wants.LOGPROBS
    if needs_token_counts(params):
        wants |= Wants.PENALTIES
    if params.logit_bias:
        wants |= Wants.BIAS
    if params.logprob_token_ids:
        wants |= Wants.ASKED_IDS
    return wants if owner.count_row is None else wants | Wants.COUNTS


def _truncates(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
