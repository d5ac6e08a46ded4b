"""Check before an engine starts that traces can be sent to a collector."""

from __future__ import annotations

import importlib.util

from jaxllm.config.environment import traces_protocol
from jaxllm.exceptions import VLLMValidationError

EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
"""The modules that send spans, by the protocol's name."""


def check_traces_endpoint(endpoint: str | None) -> None:
    """Raise VLLMValidationError unless traces can be sent to an endpoint, as far as this is known without contact."""
    if endpoint is None:
        return
    protocol = traces_protocol()
    if not all(map(_is_installed, ("opentelemetry.sdk.trace", EXPORTERS[protocol]))):
        message = "otlp_traces_endpoint needs OpenTelemetry: pip install 'jaxllm[otel]'."
        raise VLLMValidationError(message, parameter="otlp_traces_endpoint", value=endpoint)
    if protocol == "http/protobuf" and not endpoint.startswith(("http://", "https://")):
        message = (
            f"otlp_traces_endpoint={endpoint!r} is no URL of HTTP: give one such as http://localhost:4318/v1/traces, "
            "or set OTEL_EXPORTER_OTLP_TRACES_PROTOCOL to grpc."
        )
        raise VLLMValidationError(message, parameter="otlp_traces_endpoint", value=endpoint)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a parent package is missing
        return False
