"""A request's span says what the request was, what became of it and how long it took; tracing never fails a request."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm import EngineArgs
from jaxllm.core_messages import EngineCoreOutput
from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import BeamSearchParams, SamplingParams
from jaxllm.text.tokenizer import Tokenizer
from tests.async_engine.support import greedy, ids, mock_llm, tiny_args
from tests.engine.fake_core import FakeCore, hashed_tokens
from tests.engine.otlp import HEADERS, PARENT, TRACE, Collector, collector, grpc_collector
from tests.engine.support import make_engine, make_llm


@pytest.fixture(autouse=True)
def _over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.fixture
def got() -> Iterator[Collector]:
    with collector() as it:
        yield it


def engine_of(core: FakeCore, tokenizer: Tokenizer, url: str) -> Any:
    return make_engine(core, tokenizer, otlp_traces_endpoint=url)


def test_a_span_is_what_the_request_was(core: FakeCore, tokenizer: Tokenizer, got: Collector) -> None:
    engine = engine_of(core, tokenizer, got.url)
    before = time.time()
    params = SamplingParams(n=2, temperature=0.5, top_p=0.9, max_tokens=6, seed=3)
    engine.add_request("mine", "hello", params, trace_headers=HEADERS)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
    after = time.time()
    engine.shutdown()
    (span,) = got.spans  # sent by the shutdown
    (final,) = outputs
    assert final.prompt_token_ids is not None
    assert (span.name, span.trace, span.parent, span.state) == ("llm_request", TRACE, PARENT, "vendor=1")
    assert (span.status, span.service) == (0, "jaxllm")
    expected = {
        "request.id": "mine",
        "response.model": "fake",
        "request.n": 2,
        "request.temperature": 0.5,
        "request.top_p": 0.9,
        "request.max_tokens": 6,
        "usage.num_sequences": 2,
        "usage.prompt_tokens": len(final.prompt_token_ids),
        "usage.completion_tokens": sum(len(each.token_ids) for each in final.outputs),
        "response.finish_reasons": [each.finish_reason for each in final.outputs],
    }
    assert {name: span[name] for name in expected} == expected
    stats = final.metrics
    assert stats is not None
    assert span["latency.time_to_first_token"] == stats.first_token_latency
    assert span["latency.time_in_queue"] == stats.scheduled_ts - stats.queued_ts
    assert span["latency.time_in_model_prefill"] == stats.first_token_ts - stats.scheduled_ts
    assert span["latency.time_in_model_decode"] == stats.last_token_ts - stats.first_token_ts
    assert span["latency.time_in_model_inference"] == stats.last_token_ts - stats.scheduled_ts
    assert span["latency.e2e"] == pytest.approx(span.end - span.start, abs=1e-5)
    assert before <= span.start <= span.end <= after
    assert len(span.attributes) == len(expected) + 6


def test_grpc_is_the_default(
    core: FakeCore, tokenizer: Tokenizer, got: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with grpc_collector() as other:
        engine = engine_of(core, tokenizer, other.url)
        engine.add_request("r", "hello", SamplingParams(max_tokens=2), trace_headers=HEADERS)
        while engine.has_unfinished_requests():
            engine.step()
        engine.shutdown()
    (span,) = other.spans
    assert (span["request.id"], span.parent, span.service) == ("r", PARENT, "mine")
    assert got.spans == []


def test_without_headers_each_request_has_a_trace_of_its_own(
    core: FakeCore, tokenizer: Tokenizer, got: Collector
) -> None:
    llm = make_llm(core, tokenizer, otlp_traces_endpoint=got.url)
    outputs = llm.generate(["a", "b"], SamplingParams(max_tokens=2))
    spans = got.wait(2)
    assert {span["request.id"] for span in spans} == {each.request_id for each in outputs}
    assert len({span.trace for span in spans}) == 2
    assert {span.parent for span in spans} == {""}
    llm.shutdown()


def test_a_trace_that_is_not_sampled_has_no_span(core: FakeCore, tokenizer: Tokenizer, got: Collector) -> None:
    engine = engine_of(core, tokenizer, got.url)
    for name, flag in (("no", "00"), ("yes", "01")):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flag}"}
        engine.add_request(name, "a", SamplingParams(max_tokens=1), trace_headers=headers)
    while engine.has_unfinished_requests():
        engine.step()
    engine.shutdown()
    assert [span["request.id"] for span in got.spans] == ["yes"]


def test_errors_and_aborts_are_told(tokenizer: Tokenizer, got: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort, the core's error, an output that cannot be made, and a step that fails."""
    core = FakeCore(lambda request: hashed_tokens(request, 260, 320))
    engine = engine_of(core, tokenizer, got.url)
    for name in ("aborted", "unmade"):
        engine.add_request(name, "a", SamplingParams(max_tokens=9))
    engine.step()
    engine.abort_request("aborted")
    state = engine.front.outputs._requests["unmade"]
    monkeypatch.setattr(type(state.sequences[0]), "update", lambda *_: 1 / 0)
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "error"
    monkeypatch.undo()
    engine.add_request("failed", "a", SamplingParams(max_tokens=9))

    def fail() -> EngineCoreOutput:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.front.outputs, "process_outputs", lambda _: fail())
    with pytest.raises(RuntimeError):
        engine.step()
    engine.shutdown()
    spans = {span["request.id"]: span for span in got.spans}
    assert {name: (span.status, span.message) for name, span in spans.items()} == {
        "aborted": (2, "abort"),
        "unmade": (2, "ZeroDivisionError: division by zero"),
        "failed": (2, "RuntimeError: the device is gone"),
    }
    assert spans["aborted"]["response.finish_reasons"] == ["abort"]
    assert spans["aborted"]["usage.completion_tokens"] == 1
    assert spans["failed"]["response.finish_reasons"] == ["error"]
    assert "gen_ai.latency.time_to_first_token" not in spans["failed"].attributes
    reasons = {each.labels["finished_reason"]: each.value for each in engine.get_metrics() if "success" in each.name}
    assert reasons == {"stop": 0, "length": 0, "abort": 1, "error": 2, "repetition": 0}


def test_a_beam_search_is_one_span(core: FakeCore, tokenizer: Tokenizer, got: Collector) -> None:
    llm = make_llm(core, tokenizer, otlp_traces_endpoint=got.url)
    (output,) = llm.beam_search(["hello"], BeamSearchParams(beam_width=2, max_tokens=3))
    llm.shutdown()
    (span,) = got.spans
    lengths = [len(each.tokens) - span["usage.prompt_tokens"] for each in output.sequences]
    assert (span["usage.num_sequences"], span["usage.completion_tokens"]) == (2, sum(lengths))
    assert span["response.finish_reasons"] == [each.finish_reason for each in output.sequences]
    assert "gen_ai.latency.time_to_first_token" not in span.attributes


def test_streams_of_an_asynchronous_engine(got: Collector) -> None:
    """One is read to its end, one is left, one is aborted, and one is cut off by the engine's end."""

    async def run() -> None:
        with mock_llm(tiny_args(otlp_traces_endpoint=got.url), tokens_per_second=500) as llm:
            assert await llm.is_tracing_enabled()
            async for _ in llm.generate(ids(), greedy(), "read", trace_headers=HEADERS):
                pass
            stream = llm.generate(ids(), greedy(max_tokens=100), "left", trace_headers=HEADERS)
            await anext(stream)
            await stream.aclose()
            await llm.add_request("aborted", ids(), greedy(max_tokens=100))
            await llm.abort("aborted")
            await llm.add_request("cut off", ids(), greedy(max_tokens=100))
            await llm.aclose()

    asyncio.run(run())
    spans = {span["request.id"]: span for span in got.spans}
    assert {name: span.status for name, span in spans.items()} == {"read": 0, "left": 2, "aborted": 2, "cut off": 2}
    assert {name for name, span in spans.items() if span.parent == PARENT} == {"read", "left"}
    assert spans["read"]["usage.completion_tokens"] == 8
    assert spans["cut off"]["response.finish_reasons"] == ["error"]
    assert spans["cut off"].message


def test_a_collector_that_is_away_costs_nothing_and_is_told_of_once(
    core: FakeCore, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    caplog.set_level(logging.INFO)
    engine = engine_of(core, tokenizer, f"http://127.0.0.1:{port}/v1/traces")

    def run(name: str) -> float:
        began = time.monotonic()
        engine.add_request(name, "a", SamplingParams(max_tokens=2))
        while engine.has_unfinished_requests():
            engine.step()
        return time.monotonic() - began

    def lines() -> list[str]:
        return [each.getMessage() for each in caplog.records if "trace" in each.name + each.getMessage()]

    def until(num_lines: int) -> None:
        deadline = time.monotonic() + 10
        while len(lines()) < num_lines:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    run("first")
    until(1)
    assert max(run(f"{i}") for i in range(20)) < 1.0
    assert [each[: each.index("/v1")] for each in lines()] == [f"traces do not reach http://127.0.0.1:{port}"]
    with collector(port):
        until(2)
        assert lines()[1].endswith("again")
    monkeypatch.setattr("jaxllm.engine.front.tracing.FLUSH_SECONDS", 0.5)
    began = time.monotonic()
    run("last")
    engine.shutdown()
    assert time.monotonic() - began < 2
    assert len(lines()) == 3


@pytest.mark.parametrize("headers", ["traceparent", {"traceparent": 1}, {1: "a"}, [("traceparent", "x")]])
def test_headers_that_are_none(core: FakeCore, tokenizer: Tokenizer, got: Collector, headers: Any) -> None:
    engine = engine_of(core, tokenizer, got.url)
    with pytest.raises(VLLMValidationError, match="trace_headers must be a mapping of strings") as caught:
        engine.add_request("r", "a", SamplingParams(), trace_headers=headers)
    assert caught.value.parameter == "trace_headers"
    engine.shutdown()


def test_headers_need_an_engine_that_traces(core: FakeCore, tokenizer: Tokenizer) -> None:
    engine = make_engine(core, tokenizer)
    with pytest.raises(VLLMValidationError, match="trace_headers needs an engine with otlp_traces_endpoint"):
        engine.add_request("r", "a", SamplingParams(), trace_headers=HEADERS)


def test_what_cannot_be_sent_to_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VLLMValidationError, match="otlp_traces_endpoint='localhost:4318' is no URL of HTTP"):
        EngineArgs(model="m", otlp_traces_endpoint="localhost:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(VLLMValidationError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is grpc or http/protobuf"):
        EngineArgs(model="m", otlp_traces_endpoint="http://localhost:4318")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
    EngineArgs(model="m", otlp_traces_endpoint="localhost:4317")  # gRPC
    with pytest.raises(VLLMValidationError, match=r"collect_detailed_traces=.* is not supported"):
        EngineArgs(model="m", collect_detailed_traces=["all"])


def test_without_the_package_the_way_out_is_named() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None
from jaxllm import EngineArgs
from jaxllm.exceptions import VLLMValidationError
EngineArgs(model="m")
try:
    EngineArgs(model="m", otlp_traces_endpoint="http://localhost:4318")
except VLLMValidationError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "otlp_traces_endpoint needs OpenTelemetry: pip install 'jaxllm[otel]'.\n"


@pytest.mark.engine
def test_engines_that_do_not_trace_do_not_import_it(tokenizer: Tokenizer) -> None:
    code = """
import sys
from tests.engine.fake_core import FakeCore
from tests.engine.support import byte_level, make_engine
make_engine(FakeCore(lambda _: []), byte_level())
import jaxllm.engine.online.async_llm
assert not any(name.startswith("opentelemetry") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
