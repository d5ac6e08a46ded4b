"""Send each request, at its end, as an OpenTelemetry span with vLLM's names to a collector by OTLP.

This is the one module that needs the extra `otel`; engines that trace nothing do not import it.
"""

from __future__ import annotations

import importlib
import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from jaxllm.config.environment import traces_protocol
from jaxllm.config.traces import EXPORTERS
from jaxllm.engine.front.input_processor import ProcessedRequest
from jaxllm.outputs import RequestStateStats
from jaxllm.utils.fork_safety import Home
from jaxllm.version import __version__

logger = logging.getLogger(__name__)

_SPAN_NAME = "llm_request"
FLUSH_SECONDS = 3.0
"""The time that an engine's last spans have to be sent at its end."""
_EXPORTERS_LOGS = (EXPORTERS["http/protobuf"], "opentelemetry.exporter.otlp.proto.grpc.exporter")
"""The loggers of the exporters, which log each attempt."""


class RequestTracer:
    """Makes the spans of an engine's requests. They are sent in a thread of their own: nothing waits for them.

    A tracer that nobody holds any more ends, as by `close`.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        """Send spans to `endpoint`, by the protocol that OpenTelemetry's environment variables name."""
        self._model = model
        exporter = importlib.import_module(EXPORTERS[traces_protocol()]).OTLPSpanExporter(endpoint=endpoint)
        collector = _Collector(exporter, endpoint)
        detected = OTELResourceDetector().detect().attributes
        resource = Resource.create({SERVICE_NAME: detected.get(SERVICE_NAME, "jaxllm")})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(collector))
        self._tracer = provider.get_tracer("jaxllm", __version__)
        self._propagator = TraceContextTextMapPropagator()
        closing, closed = threading.Event(), threading.Event()
        # At the exit of a program it is too late to start a thread.
        threading.Thread(target=_flush, args=(provider, closing, closed), name="jaxllm-traces", daemon=True).start()
        self._finish = weakref.finalize(self, _end, Home(), collector, closing, closed)

    def on_end(
        self,
        request: ProcessedRequest,
        stats: RequestStateStats,
        finish_reasons: Sequence[str],
        now: float,
        problem: str | None = None,
    ) -> None:
        """Make the span of a request that has ended, unless it is a part of another; `now` is time.time().

        `stats` are those of all its sequences together. An end by "error" or "abort" is the span's error, with
        `problem` saying what it was.
        """
        if request.trace is None:
            return
        span = self._tracer.start_span(
            _SPAN_NAME,
            context=self._propagator.extract({name.lower(): value for name, value in request.trace.items()}),
            kind=SpanKind.SERVER,
            attributes=self._attributes(request, stats, finish_reasons) | _latencies(stats, now),
            start_time=round(stats.arrival_time * 1e9),
        )
        failed = next((reason for reason in ("error", "abort") if reason in finish_reasons), None)
        if failed is not None:
            span.set_status(Status(StatusCode.ERROR, problem or failed))
        span.end(round(now * 1e9))

    def close(self) -> None:
        """Send what has not been sent, for some seconds, and end. May be called twice."""
        self._finish()

    def _attributes(
        self, request: ProcessedRequest, stats: RequestStateStats, finish_reasons: Sequence[str]
    ) -> dict[str, Any]:
        params = request.params
        return {
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens or request.core.max_tokens,
            "gen_ai.request.n": params.n,
            "gen_ai.usage.num_sequences": len(finish_reasons),
            "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
            "gen_ai.usage.completion_tokens": stats.num_generation_tokens,
            "gen_ai.response.finish_reasons": list(finish_reasons),
        }


def _latencies(stats: RequestStateStats, now: float) -> dict[str, float]:
    """Return how long a request and its parts took, in seconds; one without a token, or a search, has no parts."""
    latencies = {"e2e": now - stats.arrival_time}
    if stats.first_token_ts:
        latencies |= {
            "time_in_queue": stats.scheduled_ts - stats.queued_ts,
            "time_to_first_token": stats.first_token_latency,
            "time_in_model_prefill": stats.first_token_ts - stats.scheduled_ts,
            "time_in_model_decode": stats.last_token_ts - stats.first_token_ts,
            "time_in_model_inference": stats.last_token_ts - stats.scheduled_ts,
        }
    return {f"gen_ai.latency.{name}": seconds for name, seconds in latencies.items()}


class _Collector(SpanExporter):
    """An exporter around another: of a collector that cannot be reached it tells once, and again when it can be."""

    def __init__(self, inner: SpanExporter, endpoint: str) -> None:
        self._inner, self._endpoint = inner, endpoint
        self._is_lost = self._is_ended = False
        self._thread: int | None = None
        """The thread that sends."""
        for name in _EXPORTERS_LOGS:
            logging.getLogger(name).addFilter(self)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans. Those that cannot be sent are lost."""
        self._thread = threading.get_ident()
        try:
            result = self._inner.export(spans)
        except Exception as error:  # noqa: BLE001 - whatever it is, requests go on
            self._tell(f"{type(error).__name__}: {error}")
            return SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS and self._is_lost:
            self._is_lost = False
            logger.info("traces reach %s again", self._endpoint)
        return result

    def shutdown(self) -> None:
        """End; the other exporter complains of a second call."""
        if not self._is_ended:
            self._is_ended = True
            self._inner.shutdown()
            for name in _EXPORTERS_LOGS:
                logging.getLogger(name).removeFilter(self)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Return the other exporter's result."""
        return self._inner.force_flush(timeout_millis)

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell of a complaint of the exporter's in a line of our own, instead of its lines for each attempt."""
        if record.thread != self._thread or record.levelno < logging.WARNING:
            return True
        self._tell(record.getMessage())
        return False

    def _tell(self, problem: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            logger.warning(
                "traces do not reach %s, and are lost meanwhile; requests go on: %s", self._endpoint, problem
            )


def _flush(provider: TracerProvider, closing: threading.Event, closed: threading.Event) -> None:
    """Wait for the end, and send what has not been sent."""
    closing.wait()
    provider.shutdown()
    closed.set()


def _end(home: Home, collector: _Collector, closing: threading.Event, closed: threading.Event) -> None:
    """End a tracer, in the process that it was made in: others have none of its threads."""
    if not home.is_here:
        return
    closing.set()
    if not closed.wait(FLUSH_SECONDS):
        collector.shutdown()
