"""W3C's headers say which trace a request belongs to: https://www.w3.org/TR/trace-context/."""

from __future__ import annotations

from collections.abc import Mapping

from jaxllm.engine.online.async_llm import AsyncLLM

NAMES = ("traceparent", "tracestate")


def given_trace(engine: AsyncLLM, headers: Mapping[bytes, bytes]) -> dict[str, str] | None:
    """Return those of a request's headers that name its trace, for an engine that traces; for others None."""
    if engine.vllm_config.observability_config.otlp_traces_endpoint is None:
        return None
    given = {name: headers.get(name.encode()) for name in NAMES}
    return {name: value.decode("latin-1") for name, value in given.items() if value is not None}
