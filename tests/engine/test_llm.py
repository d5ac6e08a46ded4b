"""The facade keeps batches in order, has vLLM's defaults, refuses before anything runs, and survives interrupts."""

from __future__ import annotations

import gc
import inspect
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from jaxllm.core_messages import RequestError
from jaxllm.engine.front.metrics import Histogram
from jaxllm.engine.transport.engine_ready import EngineReady
from jaxllm.exceptions import VLLMValidationError
from jaxllm.llm import LLM
from jaxllm.outputs import PoolingRequestOutput, RequestOutput
from jaxllm.resolve.engine_args import EngineArgs
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.fake_core import FakeCore
from tests.engine.support import make_llm, make_ready


def test_one_prompt_and_many(llm: LLM) -> None:
    (single,) = llm.generate("hello", use_tqdm=False)
    assert (single.request_id, single.prompt, single.finished) == ("0", "hello", True)
    assert len(single.outputs[0].token_ids) == 16
    assert len(llm.generate([1, 2, 3], use_tqdm=False)) == 1
    assert llm.generate([], use_tqdm=False) == []
    # Later requests finish first, and only four run at a time.
    params = [SamplingParams(max_tokens=30 - 3 * i) for i in range(10)]
    outputs = llm.generate([f"prompt {i}" for i in range(10)], params, use_tqdm=False)
    assert [output.request_id for output in outputs] == [str(i) for i in range(2, 12)]
    assert [output.prompt for output in outputs] == [f"prompt {i}" for i in range(10)]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [30 - 3 * i for i in range(10)]
    assert all(each.output_kind is RequestOutputKind.CUMULATIVE for each in params)


def test_default_params(core: FakeCore, tokenizer: Tokenizer) -> None:
    llm = make_llm(core, tokenizer, default_sampling_params={"temperature": 0.6, "top_p": 0.9, "max_tokens": 5})
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_p=0.9, max_tokens=5)
    (output,) = llm.generate("hello", use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5
    assert core.seen[0].sampling_params.temperature == 0.6
    llm.generate("hello", SamplingParams(), use_tqdm=False)
    assert core.seen[1].sampling_params.temperature == 1.0


def test_lengths_must_agree(llm: LLM, core: FakeCore) -> None:
    with pytest.raises(VLLMValidationError, match=r"prompts \(2\) and sampling_params \(3\)"):
        llm.generate(["a", "b"], [SamplingParams()] * 3)
    with pytest.raises(VLLMValidationError, match=r"prompts \(2\) and priority \(1\)"):
        llm.generate(["a", "b"], priority=[1])
    assert core.seen == []


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ("", r"prompts\[3\]: The decoder prompt cannot be empty"),
        ([5000], r"prompts\[3\]: Token id 5000"),
        (None, r"prompts\[3\]"),
    ],
)
def test_a_bad_prompt_stops_the_batch_before_it_runs(llm: LLM, core: FakeCore, bad: Any, match: str) -> None:
    with pytest.raises(VLLMValidationError, match=match):
        llm.generate(["a", "b", "c", bad, "d"])
    assert core.seen == []
    assert not llm.llm_engine.has_unfinished_requests()
    assert [output.request_id for output in llm.generate(["a", "b"], use_tqdm=False)] == ["0", "1"]


def test_a_core_that_fails_while_requests_are_added(llm: LLM, core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    add = core.add_request

    def fail_third(request: Any) -> None:
        if len(core.seen) == 2:
            raise RuntimeError("full")
        add(request)

    monkeypatch.setattr(core, "add_request", fail_third)
    with pytest.raises(RuntimeError, match="full"):
        llm.generate(["a", "b", "c", "d"])
    assert not core.requests
    assert not llm.llm_engine.has_unfinished_requests()


def test_unsupported_arguments_are_refused(llm: LLM, core: FakeCore) -> None:
    with pytest.raises(VLLMValidationError, match="lora_request"):
        llm.generate("a", lora_request=[None, None])
    with pytest.raises(VLLMValidationError, match="'mm_processor_kwargs' is not supported: the model takes text only"):
        llm.generate("a", mm_processor_kwargs={"x": 1})
    with pytest.raises(VLLMValidationError, match="tokenization_kwargs has no 'padding'"):
        llm.generate("a", tokenization_kwargs={"padding": True})
    llm.generate("a", lora_request=[None], use_tqdm=False)


def test_signatures_are_vllms() -> None:
    def names(method: Any) -> list[str]:
        return list(inspect.signature(method).parameters)[1:]

    assert " ".join(names(LLM.generate)) == (
        "prompts sampling_params use_tqdm lora_request priority tokenization_kwargs mm_processor_kwargs"
    )
    assert " ".join(names(LLM.chat)) == (
        "messages sampling_params use_tqdm lora_request priority chat_template chat_template_content_format "
        "add_generation_prompt continue_final_message tools chat_template_kwargs tokenization_kwargs "
        "mm_processor_kwargs"
    )
    assert names(LLM.enqueue_chat) == names(LLM.chat)
    arguments = inspect.signature(LLM.__init__).parameters
    assert list(arguments)[:4] == ["self", "model", "runner", "convert"]
    assert set(arguments) - {"self", "kwargs"} <= set(EngineArgs.__dataclass_fields__)


def test_the_constructor_packs_engine_args(
    core: FakeCore, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[EngineArgs] = []

    def start_core(
        args: EngineArgs, _usage: str, on_tokenizer: Callable[[Tokenizer | None], None]
    ) -> tuple[FakeCore, EngineReady]:
        seen.append(args)
        on_tokenizer(tokenizer)
        return core, make_ready(model=args.model, seed=args.seed)

    startup = ModuleType("jaxllm.engine.core.startup")
    startup.start_core = start_core  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxllm.engine.core.startup", startup)
    llm = LLM("some/model", seed=3, dtype="float32", max_num_seqs=8, hf_overrides=None)
    assert (seen[0].model, seen[0].seed, seen[0].dtype, seen[0].max_num_seqs) == ("some/model", 3, "float32", 8)
    assert len(llm.generate("hello", use_tqdm=False)) == 1
    again = LLM.from_engine_args(EngineArgs(model="other"))
    assert again.model_config.model == "other"
    with pytest.raises(VLLMValidationError, match="has no argument 'max_num_seq'"):
        LLM("some/model", max_num_seq=8)
    with pytest.raises(VLLMValidationError, match="trust_remote_code"):
        LLM("some/model", trust_remote_code=True)


def test_enqueue_and_wait(llm: LLM) -> None:
    first = llm.enqueue(["a", "b"], SamplingParams(max_tokens=3))
    second = llm.enqueue("c", SamplingParams(max_tokens=30))
    assert (first, second) == (["0", "1"], ["2"])
    # A call in between returns its own outputs only; what was enqueued is kept.
    (between,) = llm.generate("d", SamplingParams(max_tokens=8), use_tqdm=False)
    assert between.request_id == "3"
    assert [output.prompt for output in llm.wait_for_completion(use_tqdm=False)] == ["a", "b", "c"]
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_streaming_by_hand(llm: LLM) -> None:
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=6, output_kind=RequestOutputKind.DELTA)
    assert engine.add_request("mine", "hello", params) == "mine"
    text, steps = "", 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            text += output.outputs[0].text
            steps += 1
    assert steps == 6
    assert len(text) > 6


class Bar:
    """Records what tqdm is asked to do."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.postfix: str = options["postfix"]
        self.n = 0
        self.closed = False

    def update(self, count: int) -> None:
        self.n += count

    def refresh(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def test_progress(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    bars: list[Bar] = []

    def make(**options: Any) -> Bar:
        bars.append(Bar(**options))
        return bars[-1]

    llm.generate(["a", "b", "c"], SamplingParams(n=2), use_tqdm=make)
    (bar,) = bars
    assert (bar.options["total"], bar.n, bar.closed) == (3, 3, True)
    assert bar.postfix.startswith("est. speed input: ")
    assert "output: 0.00" not in bar.postfix
    llm.generate(["a"], use_tqdm=True)
    assert "Processed prompts: 100%" in capsys.readouterr().err
    llm.generate(["a"], use_tqdm=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("how", ["raised in a step", "Ctrl-C"])
def test_interrupt_leaves_the_engine_usable(llm: LLM, core: FakeCore, how: str) -> None:
    kept = llm.enqueue("kept", SamplingParams(max_tokens=20))

    def interrupt(step: int) -> None:
        if step == 5:
            core.before_step = lambda step: None
            if how == "raised in a step":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGINT)

    core.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c", "d", "e"], SamplingParams(n=2, max_tokens=30), use_tqdm=False)
    assert core.num_steps == (6 if how == "Ctrl-C" else 5)  # Ctrl-C waits for the step's end
    assert list(core.requests) == kept
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (output,) = llm.generate("after", SamplingParams(max_tokens=4), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    assert [output.prompt for output in llm.wait_for_completion(use_tqdm=False)] == ["kept"]


def test_second_interrupt_comes_at_once(llm: LLM, core: FakeCore) -> None:
    reached: list[int] = []

    def interrupt_twice(step: int) -> None:
        core.before_step = lambda step: None
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        reached.append(step)

    core.before_step = interrupt_twice
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", use_tqdm=False)
    assert reached == []
    assert not llm.llm_engine.has_unfinished_requests()


def test_interrupt_while_requests_are_added(llm: LLM, core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = llm.enqueue("kept", SamplingParams(max_tokens=2))
    add = core.add_request

    def interrupt_third(request: Any) -> None:
        add(request)
        if len(core.seen) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(core, "add_request", interrupt_third)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c", "d", "e"], use_tqdm=False)
    assert list(core.requests) == kept
    assert [output.request_id for output in llm.generate(["a", "b"], use_tqdm=False)] == ["1", "2"]


def test_interrupts_while_requests_are_aborted(llm: LLM, core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    abort = core.abort_requests

    def interrupt(request_ids: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        abort(request_ids)

    monkeypatch.setattr(core, "abort_requests", interrupt)
    core.before_step = lambda step: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], use_tqdm=False)
    assert not core.requests


@pytest.mark.parametrize("delay", [0.0, 0.1], ids=["", "the hook takes its time"])
def test_an_interrupt_dropped_while_an_engine_is_made_comes_again(
    monkeypatch: pytest.MonkeyPatch, delay: float
) -> None:
    class SlowThread(threading.Thread):
        def start(self) -> None:
            super().start()
            time.sleep(delay)

    def interrupt(phase: str, _: Any) -> None:
        if phase == "stop" and gc.callbacks.count(interrupt):
            gc.callbacks.remove(interrupt)
            signal.raise_signal(signal.SIGINT)

    def resolve(_: EngineArgs, **__: Any) -> None:
        gc.callbacks.append(interrupt)
        gc.collect()
        time.sleep(10)
        pytest.fail("the interrupt was lost")

    monkeypatch.setattr("jaxllm.engine.core.startup.resolve", resolve)
    monkeypatch.setattr("jaxllm.utils.interrupts.threading.Thread", SlowThread)
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: None)
    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        LLM("any")
    assert sys.unraisablehook is before


def test_failing_step_aborts_the_call(llm: LLM, core: FakeCore) -> None:
    def fail(step: int) -> None:
        if step == 2:
            core.before_step = lambda step: None
            raise RuntimeError("device")

    core.before_step = fail
    with pytest.raises(RuntimeError, match="device"):
        llm.generate(["a", "b"], use_tqdm=False)
    assert not core.requests
    assert len(llm.generate(["a", "b"], use_tqdm=False)) == 2


@pytest.mark.parametrize("call", ["generate", "chat", "enqueue"])
def test_a_request_that_fails_in_the_core(
    llm: LLM, core: FakeCore, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """Alone it raises; among others the output says so, and one line of the log does."""

    def fail(step: int) -> None:
        core.before_step = lambda step: None
        for sequence_id in [each for each in core.requests if core.requests[each].prompt_token_ids[-1] in bad]:
            core.fail(sequence_id, RequestError("invalid", "no such adapter"))

    def run(prompts: list[list[int]]) -> list[RequestOutput]:
        core.before_step = fail
        if call == "chat":
            return llm.chat([[{"role": "user", "content": "hi"}] for _ in prompts], use_tqdm=False)
        if call == "generate":
            return llm.generate(prompts, use_tqdm=False)
        llm.enqueue(prompts)
        return llm.wait_for_completion(use_tqdm=False)

    bad = range(1000) if call == "chat" else range(10)
    with pytest.raises(RuntimeError, match=r"\[0\]: no such adapter"):
        run([[1]])
    assert not caplog.records
    outputs = run([[50], [1], [2]])
    failed = [output.outputs[0] for output in outputs if output.outputs[0].finish_reason == "error"]
    assert {each.stop_reason for each in failed} == {"no such adapter"}
    assert len(failed) == (3 if call == "chat" else 2)
    assert [len(each.outputs[0].token_ids) for each in outputs[:1]] == ([0] if call == "chat" else [16])
    [record] = caplog.records
    assert f"{len(failed)} of 3" in record.getMessage()
    assert "no such adapter" in record.getMessage()


def test_failing_progress_bar_aborts_the_call(llm: LLM, core: FakeCore) -> None:
    def refuse(**options: Any) -> Bar:
        raise RuntimeError("no terminal")

    with pytest.raises(RuntimeError, match="no terminal"):
        llm.generate(["a", "b"], use_tqdm=refuse)
    assert not core.requests
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(llm.generate("a", use_tqdm=False)) == 1


def test_pooling_methods_refuse_in_vllms_words(llm: LLM) -> None:
    for method in ("encode", "embed", "classify", "score"):
        name = "score" if method == "score" else "encode"  # as in vLLM, where the others call it
        words = rf"LLM\.{name}\(\) is only supported for pooling models\. Try passing `--runner pooling` to use the "
        with pytest.raises(VLLMValidationError, match=words + "model as a pooling model"):
            getattr(llm, method)("a", *(["b"] if method == "score" else []))


def test_priorities_reach_the_core(core: FakeCore, tokenizer: Tokenizer) -> None:
    llm = make_llm(core, tokenizer, policy="priority")
    llm.generate(["a", "b"], priority=[3, -1], use_tqdm=False)
    assert [request.priority for request in core.seen] == [3, -1]


def test_one_priority_holds_for_every_prompt(core: FakeCore, tokenizer: Tokenizer) -> None:
    llm = make_llm(core, tokenizer, policy="priority")
    hello = [{"role": "user", "content": "hello"}]
    llm.generate(["a", "b"], priority=7, use_tqdm=False)
    llm.chat([hello, hello], priority=-2, use_tqdm=False)
    llm.chat(hello, priority=np.array([4]), use_tqdm=False)  # type: ignore[arg-type]
    llm.enqueue_chat(hello, priority=1)
    assert [request.priority for request in core.seen] == [7, 7, -2, -2, 4, 1]


@pytest.mark.parametrize("priority", ["high", 1.5, {"a": 1}, ["high"], [None], True])
def test_priorities_of_wrong_types(core: FakeCore, tokenizer: Tokenizer, priority: Any) -> None:
    llm = make_llm(core, tokenizer, policy="priority")
    with pytest.raises(VLLMValidationError, match=r"priority(\[0\])? must be an integer") as error:
        llm.generate(["a"], priority=priority, use_tqdm=False)
    assert error.value.parameter == "priority"
    assert core.seen == []


def test_arguments_of_wrong_types(llm: LLM, core: FakeCore) -> None:
    for bad in (0, None, "yes", []):
        methods: list[Any] = [llm.generate, llm.enqueue, llm.chat, llm.enqueue_chat]
        for method in methods:
            with pytest.raises(VLLMValidationError, match="use_tqdm must be True, False or a callable"):
                method([{"role": "user", "content": "a"}], use_tqdm=bad)
    for bad in (3, "truncation", [1], {1: 2}):
        with pytest.raises(VLLMValidationError, match="tokenization_kwargs must be a dict with strings as keys"):
            llm.generate("a", tokenization_kwargs=bad)  # type: ignore[arg-type]
    for bad in (5, None, [1], [["a"]], b"a", np.array(5)):
        with pytest.raises(VLLMValidationError, match="request_ids must be a string or strings"):
            llm.llm_engine.abort_request(bad)  # type: ignore[arg-type]
    for bad in (int, "RequestOutput", (PoolingRequestOutput,), np.array([1, 2])):
        with pytest.raises(VLLMValidationError, match="output_type must be RequestOutput"):
            llm.wait_for_completion(bad)
    assert llm.wait_for_completion((RequestOutput, PoolingRequestOutput), use_tqdm=False) == []
    assert core.seen == []


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        (np.array(5), "prompts must be one prompt or a list"),
        ([np.array(5)], "token id|prompts|a prompt is"),
        ({"prompt_token_ids": np.array(5)}, "'prompt_token_ids' must be a list of integers"),
        ({"prompt_token_ids": np.array([[1, 2], [3, 4]])}, "token ids must be integers"),
        (np.array([[[1, 2]]]), "token ids must be integers"),
        (np.array([1.5, 2.5]), "token ids must be integers"),
        (np.array([True]), "token ids must be integers"),
    ],
)
def test_arrays_that_are_no_prompts(llm: LLM, core: FakeCore, prompt: Any, match: str) -> None:
    with pytest.raises(VLLMValidationError, match=match):
        llm.generate(prompt, use_tqdm=False)
    assert core.seen == []


def test_rows_of_an_array_are_prompts(llm: LLM) -> None:
    outputs = llm.generate(np.array([[1, 2], [3, 4]]), use_tqdm=False)  # type: ignore[arg-type]
    assert [output.prompt_token_ids for output in outputs] == [[1, 2], [3, 4]]


def test_same_seed_same_output(core: FakeCore, tokenizer: Tokenizer) -> None:
    def tokens(llm: LLM, **params: Any) -> list[list[int]]:
        outputs = llm.generate(["a", "a"], SamplingParams(max_tokens=9, **params), use_tqdm=False)
        return [list(completion.token_ids) for output in outputs for completion in output.outputs]

    llm = make_llm(core, tokenizer, seed=11)
    first, second = tokens(llm)
    assert first != second
    assert tokens(llm) != [first, second]
    assert tokens(make_llm(core, tokenizer, seed=11)) == [first, second]
    assert tokens(make_llm(core, tokenizer, seed=12)) != [first, second]
    seeded = tokens(llm, seed=4, n=2)
    assert seeded[:2] == seeded[2:]
    assert seeded[0] != seeded[1]
    greedy = tokens(llm, temperature=0.0, n=3)
    assert all(each == greedy[0] for each in greedy)


def test_an_engine_that_nobody_holds_is_shut_down(core: FakeCore, tokenizer: Tokenizer) -> None:
    llm = make_llm(core, tokenizer)
    engine = llm.llm_engine
    del llm
    assert core.num_shutdowns == 0
    del engine
    assert core.num_shutdowns == 1


def test_odds_and_ends(llm: LLM, core: FakeCore, tokenizer: Tokenizer) -> None:
    assert llm.get_tokenizer() is tokenizer.hf
    assert llm.get_world_size() == 3
    assert llm.reset_prefix_cache() is True
    assert core.num_resets == 1
    llm.enqueue("a")
    assert llm.reset_prefix_cache() is False
    assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True) is True
    with pytest.raises(VLLMValidationError, match="reset_running_requests must be True or False"):
        llm.reset_prefix_cache("yes")  # type: ignore[arg-type]
    llm.wait_for_completion(use_tqdm=False)
    assert llm.reset_mm_cache() is None
    with llm:
        pass
    assert core.num_shutdowns == 1
    bare = make_llm(core, None)
    assert bare.generate([1, 2], use_tqdm=False)[0].outputs[0].text == ""
    with pytest.raises(VLLMValidationError, match="no tokenizer"):
        bare.get_tokenizer()


def test_metrics(llm: LLM, tokenizer: Tokenizer) -> None:
    prompts = ["story of the dog", "lazy 123 fox"]
    llm.generate(prompts, SamplingParams(n=2, max_tokens=4), use_tqdm=False)
    metrics = llm.get_metrics()
    values = {
        (metric.name.removeprefix("vllm:"), *list(metric.labels.values())[2:]): getattr(metric, "value", None)
        for metric in metrics
    }
    num_prompt_tokens = 2 * sum(map(len, tokenizer.encode(prompts)))
    assert values["prompt_tokens",] == num_prompt_tokens
    assert values["prompt_tokens_cached",] == values["prompt_tokens_by_source", "local_cache_hit"] == 12
    assert values["prompt_tokens_by_source", "local_compute"] == num_prompt_tokens - 12
    assert values["generation_tokens",] == 16
    assert (values["request_success", "length"], values["request_success", "abort"]) == (4, 0)
    assert (values["num_requests_running",], values["num_requests_waiting",]) == (0, 5)
    assert [values["num_requests_waiting_by_reason", reason] for reason in ("capacity", "deferred")] == [0, 5]
    assert values["kv_cache_usage_perc",] == 0.04
    assert values["prefix_cache_hits",] == values["prompt_tokens_cached_by_source", "device"] == 2
    histograms = {metric.name.removeprefix("vllm:"): metric for metric in metrics if isinstance(metric, Histogram)}
    assert histograms["time_to_first_token_seconds"].count == 4
    assert histograms["inter_token_latency_seconds"].count == 12
    generated = histograms["request_generation_tokens"]
    assert (generated.count, generated.sum) == (4, 16)
    assert (generated.buckets["2.0"], generated.buckets["5.0"], generated.buckets["+Inf"]) == (0, 4, 4)
    assert (histograms["request_params_n"].count, histograms["request_max_num_generation_tokens"].sum) == (2, 8)
    assert histograms["request_prompt_tokens"].sum == num_prompt_tokens
    assert histograms["request_prefill_kv_computed_tokens"].sum == num_prompt_tokens - 12
    assert histograms["request_num_preemptions"].sum == 8
    # Four steps, the first with what was computed of the prompts.
    assert (histograms["iteration_tokens_total"].count, histograms["iteration_tokens_total"].sum) == (
        4,
        num_prompt_tokens - 12 + 16,
    )


def test_a_failure_while_outputs_are_taken_in_ends_everything(
    llm: LLM, core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that went on would miss a part of a step."""
    engine = llm.llm_engine
    for name in ("a", "b"):
        engine.add_request(name, {"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=4))
    engine.step()

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.front.outputs, "process_outputs", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert not engine.has_unfinished_requests()
    assert not core.requests
    engine.add_request("a", {"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=1))
    assert [output.request_id for output in engine.step()] == ["a"]


def test_a_notebook_shows_what_an_llm_is() -> None:
    shown = repr(make_llm(FakeCore(lambda _: [1]), None, skip_tokenizer_init=True))
    assert re.fullmatch(r"LLM\(model='.*', dtype='\w+', max_model_len=\d+, max_num_seqs=\d+\)", shown)
