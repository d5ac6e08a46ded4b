"""What is kept of rows from step to step is what packing each step from scratch gives.

The plans are a scheduler's: requests come, grow, are preempted and admitted again, give blocks back and end, and there
are more of them than slots.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxllm.constraints.bits import RowMask
from jaxllm.core_messages import Clip, EngineCoreRequest
from jaxllm.execution.batch import StepInputs, build, build_next, is_next
from jaxllm.execution.kept_rows import KeptRows
from jaxllm.execution.packing import BatchShape, Bucket, BufferPool, CrossShape, StepBuffers, allocate
from jaxllm.execution.rows import least_sampling
from jaxllm.pooling_params import PoolingParams
from jaxllm.scheduling.config import GroupConfig, SchedulerConfig
from jaxllm.scheduling.plan import Owner, StepKind, StepPlan
from tests.execution.test_batch import make_chunk
from tests.scheduling.simulation import VOCAB_SIZE, Simulation, make_config
from tests.scheduling.test_simulation import TINY, workload

WINDOW = GroupConfig(num_blocks=17, window=9)
CLIPS: dict[str, Any] = {"num_clip_blocks": 97, "clip_blocks": 16}
"""Few blocks, so that clips come and go; a clip has as many frames as a request may have tokens."""
NUM_FRAMES = 63
MASK = RowMask(np.full(-(-VOCAB_SIZE // 32), 5, np.int32), None)


class Counted(KeptRows):
    """Rows that count how often they are written, and how often slots are given up for others."""

    num_taken = num_settings = num_blocks = num_overflows = 0

    def take(self, plan: StepPlan) -> Any:
        self.num_taken += plan.num_chunks
        before = self._slots
        taken = super().take(plan)
        self.num_overflows += self._slots is not before
        return taken

    def _write_settings(self, slot: int, owner: Owner) -> None:
        self.num_settings += 1
        super()._write_settings(slot, owner)

    def _write_blocks(self, slot: int, block_ids: Any) -> None:
        self.num_blocks += 1
        super()._write_blocks(slot, block_ids)


class Packed(Simulation):
    """Pack each step with what is kept or from the step before, and from scratch. Some steps have masks."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        num_groups = len(config.groups)
        bucket = Bucket(config.max_num_batched_tokens, config.num_rows)
        cross = CrossShape(NUM_FRAMES, config.clip_blocks, 2) if config.clip_blocks else None
        self.shape = BatchShape(
            bucket, config.max_model_len // config.block_size, (4,) * num_groups, (None,) * num_groups, 1, cross=cross
        )
        self.kept, self.pool = self.make_kept(), BufferPool()
        self.last: StepInputs | None = None
        self.rng = random.Random(1)
        self.num_continued = 0

    def make_kept(self) -> Counted:
        config = self.config
        return Counted(config.max_num_seqs, len(config.groups), self.shape.max_blocks, config.clip_blocks)

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None:
            masks: list[RowMask | None] = [MASK if self.rng.random() < 0.05 else None for _ in range(plan.num_rows)]
            fresh = self._pack(plan, masks, self.make_kept(), allocate(self.shape))
            last = self.last
            if last is not None and is_next(plan, last, masks):
                self.last = build_next(plan, last, self.config.block_size, self.pool)
                self.num_continued += 1
            else:
                self.last = self._pack(plan, masks, self.kept, self.pool.take(self.shape))
                self._check_settings(plan, masks)
            for array, expected in zip(_arrays(self.last), _arrays(fresh), strict=True):
                np.testing.assert_array_equal(array, expected)
            if last is not None:
                self.pool.end(last.buffers)
            for free in self.pool._free[self.shape]:
                free.ints.fill(-7)
                free.floats.fill(np.nan)
        return plan

    def _pack(self, plan: StepPlan, masks: list[RowMask | None], kept: KeptRows, buffers: StepBuffers) -> StepInputs:
        return build(plan, buffers, self.config.block_size, VOCAB_SIZE, masks, kept.take(plan))

    def _check_settings(self, plan: StepPlan, masks: list[RowMask | None]) -> None:
        """Assert that the settings that are kept are those of new rows, and ask for as much."""
        settings, expected = (super(Counted, kept).take(plan) for kept in (self.kept, self.make_kept()))
        for table, other in zip(settings.tables, expected.tables, strict=True):
            np.testing.assert_array_equal(table[settings.slots_s], other[expected.slots_s])
        for array, other in zip(settings[2:], expected[2:], strict=True):
            np.testing.assert_array_equal(array, other)
        if plan.kind is StepKind.SAMPLE:
            assert least_sampling(plan, settings, masks) is least_sampling(plan, expected, masks)


def _arrays(inputs: StepInputs) -> list[np.ndarray]:
    """Return the buffers and the rare arrays of a step; empty ones where no row uses them."""
    return [
        inputs.buffers.ints,
        inputs.buffers.floats,
        *(np.zeros(0) if rare is None else rare for rare in inputs.rare),
    ]


def varied(seed: int) -> list[EngineCoreRequest]:
    """Return requests that differ in all that a row keeps."""
    rng = random.Random(seed)
    requests: list[EngineCoreRequest] = []
    for request in workload(seed, 30):
        params = msgspec.structs.replace(
            request.sampling_params,
            temperature=rng.choice([0.0, 0.5, 1.0]),
            top_k=rng.choice([0, 3, 9]),
            top_p=rng.choice([1.0, 0.5]),
            min_p=rng.choice([0.0, 0.25]),
            presence_penalty=rng.choice([0.0, 0.0, 1.5]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
            logprobs=rng.choice([None, None, 2]),
            logit_bias=rng.choice([None, None, {3: 2.0}]),
        )
        adapter = rng.choice([None, 1, 2, 3]) if request.fork_of is None else None
        salt = request.cache_salt if adapter is None else f"adapter {adapter}"
        changed = msgspec.structs.replace(request, sampling_params=params, seed=rng.randrange(2**64))
        donors = {each.request_id: each for each in requests}
        if request.fork_of is not None:
            donor = donors[request.fork_of]
            adapter, salt = donor.adapter, donor.cache_salt
        elif rng.random() < 0.1:
            changed = msgspec.structs.replace(changed, pooling_params=PoolingParams(task="embed"), keeps_blocks=False)
        requests.append(msgspec.structs.replace(changed, adapter=adapter, cache_salt=salt))
    return requests


@pytest.mark.scheduling
@pytest.mark.parametrize(
    ("others", "overlap"), [([], 1), ([WINDOW], 0), ([WINDOW], 1)], ids=["one group", "a window", "a window, overlap"]
)
def test_rows_are_as_if_packed_from_scratch(others: list[GroupConfig], overlap: int) -> None:
    simulation = Packed(make_config(**TINY, others=others, num_adapter_slots=2))
    simulation.run_arriving(varied(0), 0, overlap)
    kept = simulation.kept
    assert simulation.scheduler.stats().num_steps > 200
    assert simulation.scheduler.stats().num_preemptions >= 5
    assert kept.num_overflows >= 2
    assert simulation.num_continued > 20
    assert 2 * kept.num_settings < kept.num_blocks < kept.num_taken, "it keeps little"


@pytest.mark.scheduling
@pytest.mark.parametrize("overlap", [0, 1])
def test_rows_with_clips_are_as_if_packed_from_scratch(overlap: int) -> None:
    """Requests hear one of seven clips, and blocks hold six; those with the same one share its blocks."""
    simulation = Packed(make_config(**TINY, **CLIPS, num_adapter_slots=2))
    simulation.run_arriving(with_clips(varied(1), 1), 0, overlap)
    assert simulation.scheduler.stats().num_preemptions >= 5
    assert simulation.num_continued > 20
    assert simulation.kept.num_overflows >= 2


def with_clips(requests: list[EngineCoreRequest], seed: int) -> list[EngineCoreRequest]:
    """Return the requests with one of seven clips each; a fork has its donor's."""
    rng, clips = random.Random(seed), dict[str | None, Clip]()
    for request in requests:
        new = Clip(key=b"%d" % rng.randrange(7), mels=b"", num_frames=NUM_FRAMES)
        clips[request.request_id] = clips.get(request.fork_of, new)
    return [msgspec.structs.replace(request, clip=clips[request.request_id]) for request in requests]


def test_no_slot_has_two_requests() -> None:
    """Some requests stay on, others come and go: more of them at once than rows, and more over time than slots."""
    rng, kept, num_new = random.Random(0), Counted(4, 1, 6), 0
    chunks = [make_chunk(str(row), 0, [1], [1 + row], seed=row) for row in range(6)]
    for _ in range(200):
        row = rng.randrange(1, 6)  # the first one stays
        num_new += 1
        chunks[row] = make_chunk("new", 0, [1], [1 + row, num_new], seed=10 + num_new)
        some = StepPlan(0, (chunks[0], *rng.sample(chunks[1:], 3)), 0)
        settings, expected = kept.take(some), KeptRows(4, 1, 6).take(some)
        np.testing.assert_array_equal(settings.tables[0][settings.slots_s], expected.tables[0][expected.slots_s])
        for values, others in zip(settings[2:], expected[2:], strict=True):
            np.testing.assert_array_equal(values, others)
    assert kept.num_overflows >= 20
    assert kept.num_settings < num_new + 100
