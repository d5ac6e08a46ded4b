"""Between steps blocks are copied, and rows of the token counts are filled."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.execution.programs.background import Programs
from jaxllm.execution.programs.compiler import COPIES
from jaxllm.execution.programs.shapes import Upkeep
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduling.plan import StepPlan
from pallas_kernels.paged_attention import KVPool, copy_blocks
from tests.execution.support import make_compiler, make_group, make_runner
from tests.execution.test_batch import make_chunk

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("quick_compile")]


class CutOff:
    """Stands in for programs: each is interrupted once it has taken its arguments."""

    def __init__(self, programs: Programs) -> None:
        self._programs, self.keys = programs, programs.keys

    def get(self, key: Any) -> Callable[..., None]:
        program = self._programs.get(key)

        def cut_off(*arguments: Any) -> None:
            program(*arguments)
            raise KeyboardInterrupt

        return cut_off


def random_pool(num_layers: int, num_blocks: int) -> KVPool:
    rng = np.random.default_rng(0)
    [spec] = make_compiler(num_layers).caches.specs(num_blocks)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape).astype(x.dtype)), spec)


def test_blocks_are_copied_in_every_layer_and_nothing_else_changes() -> None:
    num_layers, num_blocks = 3, 9
    pool = random_pool(num_layers, num_blocks)
    pairs = [(2, 5), (2, 8), (7, 1), (0, 0)]
    got = copy_blocks(pool, *jnp.array(pairs).T, num_layers=num_layers)
    for before, after in zip(pool, got, strict=True):
        expected = np.array(before).reshape(num_layers, num_blocks, *before.shape[1:])
        for source, target in pairs:
            expected[:, target] = expected[:, source]
        np.testing.assert_array_equal(np.asarray(after).reshape(expected.shape), expected)


def test_more_copies_than_one_program_takes() -> None:
    runner = make_runner(num_blocks=4 * COPIES)
    pool = random_pool(2, 4 * COPIES)
    runner.launcher.pools = (pool,)
    before = [np.array(x) for x in pool]
    pairs = [(1 + i, 2 * COPIES + i) for i in range(COPIES + 3)]
    chunk = make_chunk("a", 0, [5], [4 * COPIES - 1])
    runner.run(StepPlan(0, (chunk,), 0, copies=(tuple(pairs),)), [None]).result()
    for old, new in zip(before, runner.launcher.pools[0], strict=True):
        for source, target in pairs:
            np.testing.assert_array_equal(np.asarray(new)[target], old[source])
        np.testing.assert_array_equal(np.asarray(new)[1 : 2 * COPIES], old[1 : 2 * COPIES])


def test_a_step_copies_before_it_runs() -> None:
    """A token after a copied context samples what it samples after the original."""
    runner = make_runner(num_blocks=33)
    params = SamplingParams(temperature=0, logprobs=1)
    ids = [5, 9, 200, 31, 77]
    run = lambda plan: runner.run(plan, [None] * len(plan.chunks)).result()  # noqa: E731
    run(StepPlan(0, (make_chunk("a", 0, ids, [3], params=params),), 0))
    original = run(StepPlan(1, (make_chunk("a", 5, [8], [3], params=params),), 0))
    fork = StepPlan(2, (make_chunk("b", 5, [8], [7], params=params),), 0, copies=(((3, 7),),))
    assert run(fork).logprobs == original.logprobs
    empty = run(StepPlan(3, (make_chunk("c", 5, [8], [9], params=params),), 0))
    assert empty.logprobs != original.logprobs


def test_pool_and_counts_are_aliased() -> None:
    compiler = make_compiler()
    copy, fill = (compiler.compile(key, 33).memory_analysis() for key in (Upkeep.COPY_BLOCKS, Upkeep.SET_COUNTS))
    assert copy is not None
    assert fill is not None
    assert copy.alias_size_in_bytes >= make_group().block_bytes * 33
    assert fill.alias_size_in_bytes >= compiler.counts_spec().size * 2


def test_counts_follow_a_request_through_its_row() -> None:
    runner = make_runner()
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    counts = lambda row: {int(i): int(c) for i, c in enumerate(np.asarray(runner.launcher._counts)[row]) if c}  # noqa: E731
    history = array("i", [5, 9, 5, 200])
    chunk = make_chunk("a", 0, [5, 9, 5, 200], [3], params=params, count_row=2, history=history, num_prompt_tokens=3)
    token = runner.run(StepPlan(0, (chunk,), 0), [None]).result().token_ids[0]
    prompt = 0x8000
    assert counts(2) == {5: prompt, 9: prompt, 200: 1} | {token: 1 + (token == 200)}
    assert counts(1) == {}
    again = runner.run(StepPlan(1, (make_chunk("a", 4, [token], [3], params=params, count_row=2),), 0), [None]).result()
    [next_token] = again.token_ids
    assert counts(2)[next_token] == 1 + (next_token in (token, 200))
    other = make_chunk("b", 0, [1, 2], [4], params=params, count_row=2, history=array("i", [1, 2]), samples=False)
    runner.run(StepPlan(2, (other,), 0), [None]).result()
    assert counts(2) == {1: prompt, 2: prompt}, "the next request in a row starts with its own tokens"


def test_the_state_is_made_anew_after_a_step_that_was_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's inputs are gone: they were donated to it."""
    runner = make_runner()
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    chunk = make_chunk("a", 0, [5, 9], [3], params=params, count_row=2, history=array("i", [5, 9]))
    plan = StepPlan(0, (chunk,), 0)
    expected = runner.run(plan, [None]).result()
    with monkeypatch.context() as patch:
        patch.setattr(runner.launcher, "programs", CutOff(runner.programs))
        with pytest.raises(KeyboardInterrupt):
            runner.run(plan, [None])
    with pytest.raises(RuntimeError, match="deleted"):
        runner.run(plan, [None])
    runner.reset()
    assert runner.run(plan, [None]).result() == expected
