"""Read a request's headers: its ids, its trace and its replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.checks import shown
from jaxllm.server.http.request_ids import shown_request_id

_TRACE_HEADERS = ("traceparent", "tracestate")
"""The headers that name a request's trace: https://www.w3.org/TR/trace-context/."""
RANK_HEADER = "X-data-parallel-rank"
_MAX_RANK_DIGITS = 18


class Caller(NamedTuple):
    """The ids of a request, its trace, and the replica it asks for."""

    request_id: str
    """The request's id in the engine and the log: the server's id, followed by the client's."""
    client_request_id: str | None = None
    """X-Request-Id, if it is well formed."""
    trace_headers: Mapping[str, str] | None = None
    data_parallel_rank: int | None = None

    @classmethod
    def of(
        cls, engine: AsyncLLM, headers: Mapping[bytes, bytes], request_id: str, client_request_id: str | None
    ) -> Caller:
        """Read the headers, whose names are in lower case. Raises VLLMValidationError for a bad value."""
        named = request_id if client_request_id is None else f"{request_id}-{client_request_id}"
        return cls(named, client_request_id, _trace(engine, headers), _rank(headers))

    def shown_id(self, prefix: str, body_id: str | None) -> str:
        """Return the id that the answer shows; `body_id` is the id in the request's body."""
        return f"{prefix}-{shown_request_id(self.client_request_id, body_id, self.request_id)}"


def _trace(engine: AsyncLLM, headers: Mapping[bytes, bytes]) -> dict[str, str] | None:
    """Return the headers that name a request's trace; None for an engine that does not trace."""
    if engine.vllm_config.observability_config.otlp_traces_endpoint is None:
        return None
    values = {name: headers.get(name.encode()) for name in _TRACE_HEADERS}
    return {name: value.decode("latin-1") for name, value in values.items() if value is not None}


def _rank(headers: Mapping[bytes, bytes]) -> int | None:
    """Return the number of the replica that the request asks for, if any."""
    value = headers.get(RANK_HEADER.lower().encode())
    if value is None:
        return None
    if not value.isdigit() or len(value) > _MAX_RANK_DIGITS:
        text = value.decode(errors="replace")
        message = f"{RANK_HEADER} must be the number of a replica, 0 or greater, got {shown(text)}."
        raise VLLMValidationError(message, parameter=RANK_HEADER, value=text)
    return int(value)
