"""Next tokens, which have no outputs of their own, among the outputs of a step."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from jaxllm.core_messages import EngineCoreOutput, NextTokens
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.fake_core import FakeCore, hashed_tokens
from tests.engine.support import make_engine
from tests.engine.test_core import ScriptedMasks, add, make_core, run_all


def test_tokens_of_a_step_before_a_failed_launch_come_before_the_ends() -> None:
    core, runner, scheduler = make_core(masks=ScriptedMasks())
    budget = SamplingParams(thinking_token_budget=50)
    add(core, "plain", max_tokens=40)
    for name in ("x", "y", "z"):  # of three, two have their tokens in the same steps
        add(core, name, max_tokens=40, params=budget)
        core.step()
        core.step()
    by_step: dict[int, list[str]] = {}
    for name in ("x", "y", "z"):
        by_step.setdefault(scheduler._requests[name].num_unknown, []).append(name)
    core.abort_requests(min(by_step.values(), key=len) if len(by_step) > 1 else [])
    for _ in range(4):
        if scheduler.waits_for_commit():
            break
        core.step()
    else:
        raise AssertionError("no step waits for the one before")
    runner.failure = RuntimeError("no launch")
    with pytest.raises(RuntimeError, match="no launch"):
        run_all(core)
    runner.failure = None
    step = core.step()
    ended = {output.request_id for output in step.outputs if output.finish_reason is not None}
    assert "plain" in ended
    assert not ended & set(step.next_tokens.sequence_ids)


def test_a_request_whose_text_fails_has_one_output(tokenizer: Tokenizer) -> None:
    engine = make_engine(FakeCore(lambda request: hashed_tokens(request, 250, 399)), tokenizer)
    params = SamplingParams.from_optional(n=2, max_tokens=20, output_kind=RequestOutputKind.FINAL_ONLY, seed=1)
    engine.add_request("r", "hello", params)
    engine.step()
    first, second = engine.front.outputs._sequences

    def fail(new_token_ids: Sequence[int]) -> str:
        raise ValueError("no text")

    engine.front.outputs._sequences[second].detokenizer.push = fail
    real = engine._core.step(wait=True)
    assert real is not None
    end = EngineCoreOutput(request_id=first, new_token_ids=[7], finish_reason="length")
    step = msgspec.structs.replace(real, outputs=[end], next_tokens=NextTokens([second], [7]))
    processed = engine.front.outputs.process_outputs(step)
    assert len(processed.outputs) == 1


def test_preemptions_are_not_forgotten_by_a_reset(tokenizer: Tokenizer) -> None:
    """`reset_prefix_cache` makes outputs of the next tokens, without the number of preemptions."""
    engine = make_engine(FakeCore(lambda request: hashed_tokens(request, 250, 399)), tokenizer)
    params = SamplingParams.from_optional(max_tokens=20, output_kind=RequestOutputKind.CUMULATIVE, stop=["zzz"])
    engine.add_request("r", "hello", params)
    engine.step()
    ((sequence_id, sequence),) = engine.front.outputs._sequences.items()
    sequence.stats.num_preemptions = 2
    real = engine._core.step(wait=True)
    assert real is not None
    outputs = NextTokens([sequence_id], [300]).outputs()
    [output] = engine.front.outputs.process_outputs(msgspec.structs.replace(real, outputs=outputs)).outputs
    assert output.metrics is not None
    assert output.metrics.num_preemptions == 2
