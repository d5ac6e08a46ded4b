"""Outputs of n sequences are merged and streamed in each kind, with log-probabilities, times and stop reasons."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from jaxllm.core_messages import RequestError
from jaxllm.engine.front.metrics import Counter, Histogram
from jaxllm.engine.offline.llm_engine import LLMEngine
from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.fake_core import FakeCore, hashed_tokens
from tests.engine.support import make_engine

CUMULATIVE, DELTA, FINAL = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def says(tokenizer: Tokenizer, text: str, eos: bool = True) -> FakeCore:
    """Return a core that answers every prompt with `text`, one token per character."""
    ids = [token_id for letter in text for token_id in tokenizer.backend.encode(letter).ids]
    return FakeCore(lambda _request: ids + [0] * 200 if eos else (ids * 200)[:200])


def drain(engine: LLMEngine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def run(core: FakeCore, tokenizer: Tokenizer | None, prompt: Any = "hello", **params: Any) -> list[RequestOutput]:
    engine = make_engine(core, tokenizer)
    engine.add_request("r", prompt, SamplingParams.from_optional(**params))
    outputs = drain(engine)
    assert not core.requests
    assert engine.step() == []
    return outputs


def test_final_only(tokenizer: Tokenizer) -> None:
    (output,) = run(says(tokenizer, "hi all"), tokenizer, max_tokens=None, output_kind=FINAL)
    assert (output.request_id, output.prompt, output.finished) == ("r", "hello", True)
    assert output.prompt_token_ids == tokenizer.encode(["hello"])[0]
    assert output.num_cached_tokens == 3
    (completion,) = output.outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("hi all", "stop", None)
    assert completion.token_ids[-1] == 0
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"stop": ["a", "he"]}, {"logprobs": 2}])
def test_all_kinds_agree(tokenizer: Tokenizer, n: int, params: dict[str, Any]) -> None:
    """Deltas added up, and the last cumulative output, are the final output."""
    common = {"n": n, "max_tokens": 12, "seed": 5, **params}

    def streamed(kind: RequestOutputKind) -> list[RequestOutput]:
        core = FakeCore(lambda request: hashed_tokens(request, 250, 399))
        return run(core, tokenizer, output_kind=kind, **common)

    (final,) = streamed(FINAL)
    cumulative, deltas = streamed(CUMULATIVE), streamed(DELTA)
    assert cumulative[-1].outputs == final.outputs
    added = copy.deepcopy(deltas[0])
    for delta in deltas[1:]:
        added.add(delta, aggregate=True)
    added.outputs.sort(key=lambda completion: completion.index)
    assert added.outputs == final.outputs
    assert added.finished
    for outputs in (cumulative, deltas):
        assert len(outputs) > 1
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert [completion.index for completion in final.outputs] == list(range(n))
    for output in cumulative:
        assert [completion.index for completion in output.outputs] == list(range(n))
    texts = {completion.text for completion in final.outputs}
    assert len(texts) == 1 if params.get("temperature") == 0.0 or n == 1 else len(texts) > 1


def test_cumulative_outputs_do_not_change_later(tokenizer: Tokenizer) -> None:
    outputs = run(says(tokenizer, "abcdef"), tokenizer, logprobs=1)
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == [1, 2, 3, 4, 5, 6, 7]
    assert [len(output.outputs[0].logprobs or ()) for output in outputs] == lengths
    assert [output.metrics and output.metrics.num_generation_tokens for output in outputs] == lengths
    assert [output.outputs[0].text for output in outputs][:3] == ["a", "ab", "abc"]


def test_stop_string_aborts_in_the_core(tokenizer: Tokenizer) -> None:
    core = says(tokenizer, "say END and more")
    (output,) = run(core, tokenizer, max_tokens=None, stop=["END", "zzz"], output_kind=FINAL)
    assert core.aborted == ["0"]
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("say ", "stop", "END")
    core = says(tokenizer, "say END and more")
    kept = run(core, tokenizer, max_tokens=None, stop="END", include_stop_str_in_output=True, output_kind=FINAL)
    assert kept[0].outputs[0].text == "say END"


def test_stop_string_with_the_last_token_needs_no_abort(tokenizer: Tokenizer) -> None:
    core = says(tokenizer, "abEND!!")
    (output,) = run(core, tokenizer, max_tokens=5, stop="END", output_kind=FINAL)
    assert core.aborted == []
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("ab", "END")


def test_stop_ends_one_of_n(tokenizer: Tokenizer) -> None:
    ids = {letter: tokenizer.backend.encode(letter).ids[0] for letter in "ax"}
    core = FakeCore(lambda request: [ids["x" if request.request_id == "0#1" else "a"]] * 20)
    (output,) = run(core, tokenizer, n=3, max_tokens=4, stop="xx", output_kind=FINAL)
    assert [completion.text for completion in output.outputs] == ["aaaa", "", "aaaa"]
    assert [completion.finish_reason for completion in output.outputs] == ["length", "stop", "length"]
    assert core.aborted == ["0#1"]
    assert output.metrics is not None
    assert output.metrics.num_generation_tokens == 10


def test_stop_token_id(tokenizer: Tokenizer) -> None:
    letter = tokenizer.backend.encode("c").ids[0]
    (output,) = run(says(tokenizer, "abcde"), tokenizer, stop_token_ids=[letter], output_kind=FINAL)
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("ab", "stop", letter)


def test_length_and_ignore_eos(tokenizer: Tokenizer) -> None:
    (output,) = run(says(tokenizer, "ab"), tokenizer, ignore_eos=True, max_tokens=6, output_kind=FINAL)
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, len(completion.token_ids)) == ("ab", "length", 6)
    shown = run(
        says(tokenizer, "ab"), tokenizer, ignore_eos=True, max_tokens=4, skip_special_tokens=False, output_kind=FINAL
    )
    assert shown[0].outputs[0].text == "ab<|end|><|end|>"


def test_half_a_character_at_the_end_is_not_shown(tokenizer: Tokenizer) -> None:
    for max_tokens in range(2, 6):  # of the last one's four bytes none to three
        deltas = run(says(tokenizer, "é🎉"), tokenizer, max_tokens=max_tokens, output_kind=DELTA)
        assert [output.outputs[0].text for output in deltas] == ["", "é", "", "", ""][:max_tokens]
        (final,) = run(says(tokenizer, "é🎉"), tokenizer, max_tokens=max_tokens, output_kind=FINAL)
        assert final.outputs[0].text == "é"
        assert len(final.outputs[0].token_ids) == max_tokens


def test_without_detokenizing(tokenizer: Tokenizer) -> None:
    (output,) = run(says(tokenizer, "abc"), tokenizer, detokenize=False, logprobs=1, output_kind=FINAL)
    completion = output.outputs[0]
    assert (completion.text, len(completion.token_ids)) == ("", 4)
    assert all(each.decoded_token is None for entry in completion.logprobs or () for each in entry.values())
    (output,) = run(FakeCore(lambda _request: [9] * 99), None, prompt=[1, 2], max_tokens=3, output_kind=FINAL)
    assert (output.prompt, output.outputs[0].text, output.outputs[0].token_ids) == (None, "", [9, 9, 9])


def test_logprobs(tokenizer: Tokenizer) -> None:
    core = FakeCore(lambda _request: [300, 301, 302])
    (output,) = run(core, tokenizer, logprobs=3, max_tokens=3, output_kind=FINAL)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert completion.cumulative_logprob == -1.0 - 5.0 - 1.0
    first, second, _ = completion.logprobs
    assert list(first) == [300, 0, 1]  # the sampled token is among the three
    assert [each.rank for each in first.values()] == [1, 2, 3]
    assert list(second) == [301, 0, 1, 2]
    assert [each.rank for each in second.values()] == [5, 1, 2, 3]
    assert second[301].logprob == -5.0
    assert second[301].decoded_token == tokenizer.backend.decode([301])
    assert second[0].decoded_token == "<|end|>"
    only = run(FakeCore(lambda _request: [301]), tokenizer, logprobs=0, max_tokens=1, output_kind=FINAL)
    assert list((only[0].outputs[0].logprobs or [{}])[0]) == [301]


def test_all_logprobs(tokenizer: Tokenizer) -> None:
    engine = make_engine(FakeCore(lambda _request: [300], vocab_size=1000), tokenizer, max_logprobs=1000)
    engine.add_request("r", "a", SamplingParams(logprobs=-1, max_tokens=1))
    assert len((drain(engine)[-1].outputs[0].logprobs or [{}])[0]) == 1000


def test_metrics_of_a_request(tokenizer: Tokenizer) -> None:
    engine = make_engine(says(tokenizer, "abc"), tokenizer)
    engine.add_request("r", "hello", SamplingParams(output_kind=FINAL), arrival_time=1000.0)
    metrics = drain(engine)[0].metrics
    assert metrics is not None
    assert (metrics.num_generation_tokens, metrics.num_preemptions, metrics.arrival_time) == (4, 2, 1000.0)
    assert 0 < metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts < metrics.last_token_ts
    assert metrics.first_token_latency > 1e8


@pytest.mark.parametrize("n", [1, 3])
def test_abort(tokenizer: Tokenizer, n: int) -> None:
    core = says(tokenizer, "ab", eos=False)
    engine = make_engine(core, tokenizer)
    for name in ("a", "b", "c"):
        engine.add_request(name, "hello", SamplingParams(n=n, max_tokens=9, output_kind=FINAL))
    engine.step()
    engine.abort_request("a")
    engine.abort_request(["c", "unknown", "a"])
    assert len(core.aborted) == 2 * n
    assert engine.get_num_unfinished_requests() == 1
    assert [output.request_id for output in drain(engine)] == ["b"]
    assert not core.requests


def test_an_id_may_come_again_while_the_core_still_has_the_old_request(tokenizer: Tokenizer) -> None:
    """The core knows requests by names of the engine's own: late tokens go to nobody."""
    a, b = (tokenizer.backend.encode(letter).ids[0] for letter in "ab")
    core = FakeCore(lambda request: [a if request.request_id == "0" else b] * 200)
    engine = make_engine(core, tokenizer)
    engine.add_request("r", "hello", SamplingParams(max_tokens=9))
    engine.step()
    core.abort_requests = lambda sequence_ids: None  # the core goes on for a while
    engine.abort_request("r")
    engine.add_request("r", "hello", SamplingParams(max_tokens=2, output_kind=FINAL))
    assert [output.outputs[0].text for output in drain(engine)] == ["bb"]


def test_an_abort_spares_the_sequences_that_have_ended(tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.backend.encode(letter).ids[0] for letter in "ab")
    core = FakeCore(lambda request: [a if request.request_id == "0" else b] * 200)
    engine = make_engine(core, tokenizer)
    engine.add_request("r", "hello", SamplingParams(n=2, max_tokens=9, stop_token_ids=[a]))
    engine.step()
    engine.abort_request("r")
    assert core.aborted == ["0#1"]


def test_outputs_of_aborted_requests_are_dropped(tokenizer: Tokenizer) -> None:
    """A step in flight, or the core's own report of the abort, may still name them."""
    core = says(tokenizer, "ab", eos=False)
    engine = make_engine(core, tokenizer)
    engine.add_request("a", "hello", SamplingParams(max_tokens=9))
    core.abort_requests = lambda sequence_ids: None  # the core goes on for a while
    engine.abort_request("a")
    assert engine.step() == []


def test_request_ids_are_unique(tokenizer: Tokenizer) -> None:
    engine = make_engine(says(tokenizer, "ab"), tokenizer)
    engine.add_request("a", "hello", SamplingParams())
    with pytest.raises(VLLMValidationError, match="request_id 'a' is in use"):
        engine.add_request("a", "hello", SamplingParams())
    assert len(drain(engine)) == 3
    engine.add_request("a", "hello", SamplingParams())
    with pytest.raises(VLLMValidationError, match="request_id must be a string"):
        engine.add_request(3, "hello", SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(VLLMValidationError, match=r"must be a .*LoRARequest"):
        engine.add_request("b", "hello", SamplingParams(), lora_request=object())


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL])
def test_a_request_that_the_core_refuses_ends_whole(
    tokenizer: Tokenizer, kind: RequestOutputKind, is_known: bool
) -> None:
    """Also where the core knows of none of its sequences, since it could not read the request."""
    core = says(tokenizer, "ab")
    engine = make_engine(core, tokenizer)
    for name in ("bad", "good"):
        engine.add_request(name, "hello", SamplingParams(n=3, output_kind=kind))
    if not is_known:
        core.requests = {name: each for name, each in core.requests.items() if name.startswith("1")}
    core.fail("0", RequestError("invalid", "no such thing", "stop"))
    first = [output for output in engine.step() if output.request_id == "bad"]
    assert [output.finished for output in first] == [True]
    ends = [(each.index, each.finish_reason, each.stop_reason, each.text) for each in first[0].outputs]
    assert ends == [(index, "error", "no such thing", "a" if is_known and index else "") for index in range(3)]
    assert core.aborted == (["0#1", "0#2"] if is_known else [])
    last = drain(engine)[-1]
    assert (last.request_id, last.finished, len(last.outputs)) == ("good", True, 3)
    errors = [each for each in engine.get_metrics() if each.labels.get("finished_reason") == "error"]
    assert [getattr(each, "value", None) for each in errors] == [3]


@pytest.mark.parametrize("part", ["on_first_token", "on_finished_sequence", "output"])
def test_a_failure_over_one_request_is_its_own(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Its metrics or its output cannot be made: it ends with an error, and the others never hear of it."""
    core = says(tokenizer, "abcd")
    engine = make_engine(core, tokenizer)
    for name in ("good", "bad"):
        engine.add_request(name, "hello", SamplingParams(n=2, seed=1, output_kind=FINAL))
    bad = engine.front.outputs._requests["bad"]
    owner = type(bad) if part == "output" else type(engine.front.metrics.of(0))
    real, take = getattr(owner, part), engine.front.outputs._take
    taken: list[Any] = []

    def remember(sequence: Any, *args: Any) -> bool:
        taken.append(sequence.owner)
        return take(sequence, *args)

    def fail(*args: Any, **options: Any) -> Any:
        if taken[-1] is bad:
            raise ArithmeticError("no number")
        return real(*args, **options)

    monkeypatch.setattr(engine.front.outputs, "_take", remember)
    monkeypatch.setattr(owner, part, fail)
    outputs = {output.request_id: output for output in drain(engine)}
    assert [(each.text, each.finish_reason) for each in outputs["good"].outputs] == [("abcd", "stop")] * 2
    ends = [(each.finish_reason, each.stop_reason) for each in outputs["bad"].outputs]
    assert ends == [("error", "ArithmeticError: no number")] * 2
    assert not core.requests


class TextReader:
    """Takes plain text, at every step or at every second one."""

    def __init__(self, every: int) -> None:
        self.texts: list[str] = []
        self.num_tokens = 0
        self._every, self._num_asked = every, 0

    def text_writer(self) -> Callable[[str, int], None] | None:
        """Return what takes the next text."""
        self._num_asked += 1
        return None if self._num_asked % self._every else self._take

    def _take(self, text: str, num_tokens: int) -> None:
        self.texts.append(text)
        self.num_tokens += num_tokens


@pytest.mark.parametrize("every", [1, 2])
def test_text_that_goes_straight_to_its_reader_is_counted_and_shown_once(tokenizer: Tokenizer, every: int) -> None:
    def read(reader: TextReader | None) -> tuple[str, int, list[Any]]:
        engine = make_engine(says(tokenizer, "abcdé🎉efg"), tokenizer)
        engine.add_request("r", "hello", SamplingParams(max_tokens=99, output_kind=DELTA))
        engine.front.outputs._requests["r"].sequences[0].text_reader = reader
        text, num_tokens = "", 0
        while engine.has_unfinished_requests():
            shown = engine.step()
            if reader is not None:
                text, num_tokens = text + "".join(reader.texts), num_tokens + reader.num_tokens
                reader.texts, reader.num_tokens = [], 0
            text += "".join(output.outputs[0].text for output in shown)
            num_tokens += sum(len(output.outputs[0].token_ids) for output in shown)
        counted = [
            (each.name, each.value if isinstance(each, Counter) else each.count)
            for each in engine.get_metrics()
            if isinstance(each, Counter | Histogram)
        ]
        return text, num_tokens, counted

    plain = read(None)
    assert plain[0] == "abcdé🎉efg"
    assert read(TextReader(every)) == plain
