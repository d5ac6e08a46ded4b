"""Whisper without an engine equals HF in float32: the encoder's frames, whole decoders' prompts, and decodes."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import LayerLoop, Model
from pallas_kernels.paged_attention import AttentionBatch
from pallas_kernels.paged_attention.batches import ragged_batch
from pallas_kernels.paged_attention.tiles import XLA_TILES
from tests.models.running import ROWS, attention_of, chunk_inputs, int32, load
from tests.models.tiny import BLOCK_SIZE
from tests.models.whisper_cases import CASES, KEPT_FRAMES, Golden, read_case
from tests.quick import QUICK_COMPILE

pytestmark = pytest.mark.models

TOLERANCE = 1e-4
CROSS_IDS = (2, 5, 3, 6)
"""The blocks of a clip's frames, out of order."""
NUM_BLOCKS = 8


class Runner:
    """Runs one clip at a time over pools whose unwritten slots are NaN."""

    def __init__(self, name: str, loop: LayerLoop = LayerLoop.SCAN) -> None:
        self.case, self.model = read_case(name), read_case(name).make(loop)
        model = self.model
        assert model.encoder is not None
        self.encoder = model.encoder
        self.num_frames = model.encoder.settings.num_frames
        self.params, self.vision = load(model, self.case.tensors), load(model.encoder, self.case.tensors)
        self.attention = [attention_of(group) for group in model.plan.groups]
        self.encode = _compiled(model.encoder.encode)
        self.write = _compiled(lambda *args: model.write_frames(*args, attention=self.attention))
        self.step = _compiled(self._step)

    def hear(self, golden: Golden) -> tuple[np.ndarray, Any]:
        """Return the encoder's frames, and pools that hold their keys and values."""
        frames = self.encode(self.vision, golden.mels(self.encoder.settings.num_mels))
        plan, num_frames = self.model.plan, self.num_frames
        specs = tuple(
            op.pool_spec(plan.depth(group), NUM_BLOCKS) for op, group in zip(self.attention, plan.groups, strict=True)
        )
        pools = jax.tree.map(lambda array: jnp.full(array.shape, jnp.nan, array.dtype), specs)
        chunk, padding = [(num_frames, num_frames)], len(frames) - num_frames
        batch = ragged_batch(
            chunk, [CROSS_IDS], block_size=BLOCK_SIZE, query_tile=XLA_TILES.query, row_alignment=1, padding=padding
        )
        return np.asarray(frames), self.write(self.params, pools, frames, jax.tree.map(jnp.asarray, batch))

    def run(self, pools: Any, token_ids: np.ndarray, start: int) -> tuple[np.ndarray, Any]:
        """Run one chunk; return log-probabilities [tokens, v] and the pools."""
        tokens, batch = chunk_inputs(token_ids, start, start + len(token_ids))
        batches = [batch, cross_batch(batch, len(token_ids), self.num_frames)]
        logprobs, pools = self.step(self.params, pools, tokens, batches)
        return np.asarray(logprobs)[: len(token_ids)], pools

    def _step(self, params: Any, pools: Any, tokens: Any, batches: Any) -> Any:
        hidden_td, pools, _ = self.model.forward(params, pools, tokens, batches, attention=self.attention)
        return jax.nn.log_softmax(self.model.logits(params, hidden_td, hidden_td.shape[0])), pools


def _compiled(function: Any) -> Any:
    """Return a function that is compiled at its first call."""
    programs: list[Any] = []

    def call(*args: Any) -> Any:
        if not programs:
            programs.append(jax.jit(function).lower(*args).compile(compiler_options=dict(QUICK_COMPILE)))
        return programs[0](*args)

    return call


def cross_batch(batch: AttentionBatch, count: int, num_frames: int) -> AttentionBatch:
    """Return the batch of a chunk of `count` tokens for cross-attention: they stand for the last frames."""
    places = np.arange(num_frames - count, num_frames)
    slots = np.asarray(CROSS_IDS)[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
    return batch._replace(
        slots_t=int32(np.pad(slots, (0, ROWS - count))),
        block_tables_sm=int32([CROSS_IDS]),
        context_lens_s=int32([num_frames]),
    )


@cache
def runner(name: str) -> Runner:
    return Runner(name)


@pytest.mark.parametrize("name", CASES)
def test_frames_match_hf(name: str) -> None:
    run = runner(name)
    for golden in run.case.goldens:
        frames, _ = run.hear(golden)
        np.testing.assert_allclose(frames[: run.num_frames][KEPT_FRAMES], golden.encoded, rtol=0, atol=TOLERANCE)
        assert not frames[run.num_frames :].any()


@pytest.mark.parametrize("name", CASES)
def test_whole_sequences_match_hf(name: str) -> None:
    run = runner(name)
    for golden in run.case.goldens:
        _, pools = run.hear(golden)
        logprobs, _ = run.run(pools, golden.sequence, 0)
        np.testing.assert_allclose(logprobs, golden.logprobs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [64, 5, 1])
@pytest.mark.parametrize("name", CASES)
def test_greedy_decoding_matches_hf(name: str, chunk: int) -> None:
    run = runner(name)
    for golden in run.case.goldens:
        _, pools = run.hear(golden)
        logprobs: list[np.ndarray] = []
        for start in range(0, len(golden.prompt), chunk):
            some, pools = run.run(pools, golden.prompt[start : start + chunk], start)
            logprobs += list(some)
        tokens = [int(logprobs[-1].argmax())]
        while len(tokens) < len(golden.tokens):
            some, pools = run.run(pools, np.asarray(tokens[-1:]), len(logprobs))
            logprobs += list(some)
            tokens.append(int(some[-1].argmax()))
        assert tokens == golden.tokens.tolist()
        np.testing.assert_allclose(logprobs, golden.logprobs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("loop", [LayerLoop.UNROLL, LayerLoop.SWITCH, LayerLoop.IN_PLACE])
def test_other_loops_match_hf(loop: LayerLoop) -> None:
    run = Runner("large_v3", loop)
    golden = run.case.goldens[-1]
    _, pools = run.hear(golden)
    np.testing.assert_allclose(run.run(pools, golden.sequence, 0)[0], golden.logprobs, rtol=0, atol=TOLERANCE)


def test_all_tensors_are_read() -> None:
    case = read_case("base")
    model: Model = case.make()
    sources = {source for spec in model.specs.all_param_specs(case.tensors).values() for source in spec.sources}
    assert sources == set(case.tensors)
