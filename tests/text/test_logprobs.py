"""Log-probabilities of outputs and prompts come in both containers, with what else a core may report."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from jaxllm.core_messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    PromptLogprobs,
    RequestError,
    SchedulerStats,
    TokenLogprobs,
)
from jaxllm.engine.offline.llm_engine import LLMEngine
from jaxllm.logprobs import FlatLogprobs, Logprob
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.fake_core import FakeCore
from tests.engine.support import byte_level, make_engine

CUMULATIVE, DELTA, FINAL = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
PROMPT = [300, 301, 302, 303]
COUNTS: dict[str, Any] = dict.fromkeys(SchedulerStats.__struct_fields__, 0)
COUNTS["speculation"] = COUNTS["tiers"] = None
STATS = SchedulerStats(**COUNTS)


class ScriptedCore(FakeCore):
    """Reports what it was given, one step after the other."""

    def __init__(self, *steps: list[EngineCoreOutput]) -> None:
        super().__init__(lambda _request: [])
        self.steps = list(steps)

    def add_request(self, request: EngineCoreRequest) -> None:
        self.seen.append(request)

    def has_unfinished_requests(self) -> bool:
        return bool(self.steps)

    def step(self) -> EngineCoreOutputs:
        return EngineCoreOutputs(outputs=self.steps.pop(0), stats=STATS, timestamp=time.monotonic())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


def token(request_id: str, *token_ids: int, reason: str | None = None, **fields: Any) -> EngineCoreOutput:
    """Report of a sequence; the core knows the first request as "0", the next as "1"."""
    return EngineCoreOutput(request_id=request_id, new_token_ids=list(token_ids), finish_reason=reason, **fields)


def scored(position: int, *asked: float, top: int = 2) -> TokenLogprobs:
    """Say of the prompt's token that it ranks third, at -position, behind tokens 1 and 2, and what was asked for."""
    ids = [PROMPT[position], *range(1, top + 1), *range(50, 50 + len(asked))]
    return TokenLogprobs(ids, [-float(position), *(-0.25 * i for i in range(1, top + 1)), *asked], 3)


def chunk(request_id: str, start: int, *positions: TokenLogprobs) -> EngineCoreOutput:
    return token(request_id, new_prompt_logprobs=PromptLogprobs(start, list(positions)))


def start(core: FakeCore, tokenizer: Tokenizer | None, **params: Any) -> LLMEngine:
    engine = make_engine(core, tokenizer)
    engine.add_request("r", PROMPT, SamplingParams(**params))
    return engine


def drain(engine: LLMEngine, core: FakeCore) -> list[list[RequestOutput]]:
    steps: list[list[RequestOutput]] = []
    while core.has_unfinished_requests():
        steps.append(engine.step())
    return steps


def expected(tokenizer: Tokenizer, position: int) -> dict[int, Logprob]:
    show = tokenizer.token_string
    token_id = PROMPT[position]
    return {
        token_id: Logprob(-float(position), 3, show(token_id)),
        1: Logprob(-0.25, 1, show(1)),
        2: Logprob(-0.5, 2, show(2)),
    }


def whole_prompt(request_id: str = "0") -> list[list[EngineCoreOutput]]:
    """Report a prompt in chunks, one of them twice, as after a preemption; then two tokens."""
    return [
        [chunk(request_id, 1, scored(1))],
        [chunk(request_id, 1, scored(1), scored(2))],
        [token(request_id, 9, new_prompt_logprobs=PromptLogprobs(3, [scored(3)]))],
        [token(request_id, 9, reason="length")],
    ]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL])
def test_prompt_logprobs(tokenizer: Tokenizer, kind: RequestOutputKind, flat: bool) -> None:
    core = ScriptedCore(*whole_prompt())
    engine = start(core, tokenizer, prompt_logprobs=2, output_kind=kind, flat_logprobs=flat)
    steps = drain(engine, core)
    want = [None, *(expected(tokenizer, position) for position in (1, 2, 3))]
    if flat:
        want[0] = {}
    shown = [[list(output.prompt_logprobs or []) for output in step] for step in steps]
    if kind is FINAL:
        assert shown == [[], [], [], [want]]
    else:
        assert shown == [[], [], [want], [want if kind is CUMULATIVE else []]]
    last = steps[-1][0]
    assert isinstance(last.prompt_logprobs, FlatLogprobs if flat else list)
    assert last.prompt_token_id_logprobs is None
    assert last.outputs[0].logprobs is None


def test_prompt_logprobs_come_from_the_first_of_n(tokenizer: Tokenizer) -> None:
    steps = whole_prompt("0")
    steps[2].append(token("0#1", 8))
    steps[3].append(token("0#1", 8, reason="length"))
    for kind in (DELTA, FINAL):
        core = ScriptedCore(*steps)
        engine = start(core, tokenizer, n=2, prompt_logprobs=2, output_kind=kind)
        outputs = [output for step in drain(engine, core) for output in step]
        assert len(outputs[0].prompt_logprobs or []) == 4
        assert [len(output.prompt_logprobs or []) for output in outputs[1:]] == [0] * (len(outputs) - 1)
        assert outputs[-1].finished


def test_values_of_prompt_logprob_token_ids(tokenizer: Tokenizer) -> None:
    """The values are a matrix of their own, from the position after prompt_logprob_start on."""
    step = [chunk("0", 1, scored(1), scored(2, -9.0, -10.0), scored(3, -11.0, -math.inf))]
    core = ScriptedCore(step, [token("0", 9, reason="length")])
    ids: dict[str, Any] = {"prompt_logprob_token_ids": [[50, 51], [50]], "output_kind": FINAL}
    output = drain(start(core, tokenizer, prompt_logprobs=2, prompt_logprob_start=1, **ids), core)[-1][0]
    assert output.prompt_logprobs == [None, *(expected(tokenizer, position) for position in (1, 2, 3))]
    assert output.prompt_token_id_logprobs is not None
    assert output.prompt_token_id_logprobs.dtype == np.float32
    assert output.prompt_token_id_logprobs.tolist() == [[-9.0, -10.0], [-11.0, -math.inf]]

    core = ScriptedCore([chunk("0", 3, scored(3, -11.0, -12.0, top=0))], [token("0", 9, reason="length")])
    ids["prompt_logprob_token_ids"] = np.array([[50, 51]])
    output = drain(start(core, tokenizer, prompt_logprob_start=2, **ids), core)[-1][0]
    assert output.prompt_logprobs is None
    assert output.prompt_token_id_logprobs is not None
    assert output.prompt_token_id_logprobs.tolist() == [[-11.0, -12.0]]


def test_a_prompt_cut_short_by_an_error(tokenizer: Tokenizer) -> None:
    core = ScriptedCore(
        [chunk("0", 1, scored(1))], [token("0", reason="error", error=RequestError("invalid", "no more room"))]
    )
    (output,) = drain(start(core, tokenizer, prompt_logprobs=2, output_kind=DELTA), core)[-1]
    assert output.prompt_logprobs == [None, expected(tokenizer, 1), None, None]
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason, completion.text) == ("error", "no more room", "")
    assert output.finished


def test_an_error_hurts_only_its_own_request(tokenizer: Tokenizer) -> None:
    core = ScriptedCore(
        [token("0", 301), token("1", 302)],
        [
            token("0", reason="error", error=RequestError("invalid", "nothing may follow")),
            token("1", 303, reason="length"),
        ],
    )
    engine = make_engine(core, tokenizer)
    for name in "ab":
        engine.add_request(name, PROMPT, SamplingParams(output_kind=FINAL))
    first, second = drain(engine, core)[-1]
    assert (first.outputs[0].finish_reason, first.outputs[0].stop_reason) == ("error", "nothing may follow")
    assert (first.outputs[0].token_ids, first.outputs[0].text) == ([301], tokenizer.token_string(301))
    assert (second.outputs[0].finish_reason, second.outputs[0].token_ids) == ("length", [302, 303])


def test_a_repetition_keeps_its_text(tokenizer: Tokenizer) -> None:
    core = ScriptedCore([token("0", 301)], [token("0", 301, reason="repetition", stop_reason="repetition_detected")])
    (output,) = drain(start(core, tokenizer, output_kind=FINAL), core)[-1]
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("repetition", "repetition_detected")
    assert completion.text == tokenizer.backend.decode([301, 301])


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL])
def test_decoded_tokens_hold_whole_characters(tokenizer: Tokenizer, kind: RequestOutputKind, flat: bool) -> None:
    """A token that ends inside a character has no text, and the one that completes it has all of it, as in vLLM."""
    smile = tokenizer.backend.encode("😀", add_special_tokens=False).ids
    a, b = tokenizer.encode(["a", "b"], add_special_tokens=False)
    ids = a + smile + b
    texts = ["a", "", "", "", "😀", "b"]
    positions = [TokenLogprobs([each, *b], [-1.0, -2.0], 2) for each in ids]
    first = token("0", ids[0], new_logprobs=positions[:1], new_prompt_logprobs=PromptLogprobs(1, positions[1:]))
    steps = [[token("0", each, new_logprobs=[row])] for each, row in zip(ids[1:-1], positions[1:-1], strict=True)]
    core = ScriptedCore([first], *steps, [token("0", ids[-1], new_logprobs=positions[-1:], reason="length")])
    engine = make_engine(core, tokenizer)
    params = SamplingParams(logprobs=1, prompt_logprobs=1, flat_logprobs=flat, output_kind=kind, max_tokens=6)
    engine.add_request("r", ids, params)
    outputs = [output for step in drain(engine, core) for output in step]

    def decoded(positions: Iterable[dict[int, Logprob] | None]) -> list[list[str | None]]:
        return [[each.decoded_token for each in position.values()] for position in positions if position]

    want = [[text, "b"] for text in texts[:-1]] + [["b"]]
    shown = [decoded(output.outputs[0].logprobs or []) for output in outputs]
    assert (list(itertools.chain(*shown)) if kind is DELTA else shown[-1]) == want
    prompts = [decoded(output.prompt_logprobs or []) for output in outputs]
    assert (prompts[0] if kind is DELTA else prompts[-1]) == want[1:]


@pytest.mark.parametrize("flat", [False, True])
def test_logprob_token_ids(tokenizer: Tokenizer, flat: bool) -> None:
    """They come in place of the most likely ones, as in vLLM, and their ranks are their places in the list."""
    for logprobs in (None, 2):
        core = FakeCore(lambda _request: [301])
        fields = {"logprob_token_ids": [7, 1], "max_tokens": 1, "flat_logprobs": flat, "output_kind": FINAL}
        completion = drain(start(core, tokenizer, logprobs=logprobs, **fields), core)[-1][0].outputs[0]
        assert completion.logprobs is not None
        (position,) = completion.logprobs
        assert [(each, entry.logprob) for each, entry in position.items()] == [(301, -5.0), (7, -7.0), (1, -1.0)]
        assert [each.rank for each in position.values()] == [5, 1, 2]
        assert [each.decoded_token for each in position.values()] == [tokenizer.token_string(each) for each in position]
        assert completion.cumulative_logprob == -5.0

    fields["logprob_token_ids"] = [7, 301]
    core = FakeCore(lambda _request: [301])
    completion = drain(start(core, tokenizer, **fields), core)[-1][0].outputs[0]
    assert completion.logprobs is not None
    assert [(each, entry.rank) for each, entry in completion.logprobs[0].items()] == [(301, 2), (7, 1)]


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL])
def test_flat_logprobs_hold_the_same(tokenizer: Tokenizer, kind: RequestOutputKind) -> None:
    def positions(flat: bool) -> list[list[Any]]:
        core = FakeCore(lambda _request: [300, 301, 302])
        fields = {"logprobs": 3, "max_tokens": 3, "output_kind": kind}
        engine = start(core, tokenizer, flat_logprobs=flat, **fields)
        outputs = [output for step in drain(engine, core) for output in step]
        assert all(isinstance(each.outputs[0].logprobs, FlatLogprobs) is flat for each in outputs)
        return [list(output.outputs[0].logprobs or []) for output in outputs]

    assert positions(flat=True) == positions(flat=False)


@pytest.mark.parametrize(
    ("interval", "lengths"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 4, 7]), (4, [1, 5, 7]), (99, [1, 7])]
)
def test_stream_interval(tokenizer: Tokenizer, interval: int, lengths: list[int]) -> None:
    """The first token and the end come at once; whatever comes later is collected."""

    def outputs(kind: RequestOutputKind, n: int = 1) -> list[RequestOutput]:
        core = FakeCore(lambda request: list(range(301, 320)))
        fields = {"max_tokens": 7, "logprobs": 1, "stream_interval": interval, "n": n}
        engine = start(core, tokenizer, output_kind=kind, **fields)
        return [output for step in drain(engine, core) for output in step]

    whole = outputs(CUMULATIVE)
    assert [len(output.outputs[0].token_ids) for output in whole] == lengths
    deltas = outputs(DELTA)
    news = [after - before for before, after in zip([0, *lengths], lengths, strict=False)]
    assert [len(output.outputs[0].token_ids) for output in deltas] == news
    assert [len(output.outputs[0].logprobs or []) for output in deltas] == news
    assert "".join(output.outputs[0].text for output in deltas) == whole[-1].outputs[0].text
    assert [[len(each.token_ids) for each in output.outputs] for output in outputs(DELTA, 2)] == [[k, k] for k in news]
