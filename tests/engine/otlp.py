"""A collector of traces in this process, for tests: OTLP over HTTP or gRPC. It keeps every span."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, override

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
"""The headers of a request that is a part of a trace."""
WAIT_SECONDS = 10.0


@dataclass
class Span:
    """A span as it came."""

    name: str
    trace: str
    parent: str
    state: str
    status: int
    """0 unset, 1 ok, 2 error."""
    message: str
    start: float
    end: float
    attributes: dict[str, Any]
    service: str

    def __getitem__(self, name: str) -> Any:
        """Return an attribute by its name without "gen_ai."."""
        return self.attributes[f"gen_ai.{name}"]


@dataclass
class Collector:
    """The spans that a collector has received."""

    url: str
    spans: list[Span] = field(default_factory=list)

    def wait(self, num_spans: int) -> list[Span]:
        """Return the spans once there are `num_spans`."""
        deadline = time.monotonic() + WAIT_SECONDS
        while len(self.spans) < num_spans:
            assert time.monotonic() < deadline, f"{len(self.spans)} spans have come, not {num_spans}"
            time.sleep(0.01)
        assert len(self.spans) == num_spans
        return sorted(self.spans, key=lambda span: span.start)


@contextlib.contextmanager
def collector(port: int = 0) -> Iterator[Collector]:
    """Run a collector."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.spans.extend(_spans(ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        got = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield got
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def grpc_collector() -> Iterator[Collector]:
    """Run a collector over gRPC."""
    got = Collector("")

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        @override
        def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
            got.spans.extend(_spans(request))
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    got.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield got
    finally:
        server.stop(None).wait()


def _spans(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in request.resource_spans:
        service = {each.key: _value(each.value) for each in resource.resource.attributes}["service.name"]
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    span.name,
                    span.trace_id.hex(),
                    span.parent_span_id.hex(),
                    span.trace_state,
                    span.status.code,
                    span.status.message,
                    span.start_time_unix_nano / 1e9,
                    span.end_time_unix_nano / 1e9,
                    {each.key: _value(each.value) for each in span.attributes},
                    service,
                )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
