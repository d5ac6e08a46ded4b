"""Report the server's load in ORCA's header `endpoint-load-metrics`, to load balancers that ask for it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from jaxllm.engine.front.metrics import PREFIX, Gauge
from jaxllm.engine.online.async_llm import AsyncLLM

_ASKED = b"endpoint-load-metrics-format"
"""The request's header: "text" or "json"."""
_TOLD = b"endpoint-load-metrics"
_NAMES = ("kv_cache_usage_perc", "num_requests_waiting")


def load_headers(engine: AsyncLLM, headers: Mapping[bytes, bytes]) -> tuple[tuple[bytes, bytes], ...]:
    """Return the header with the load, if the request's `headers` ask for it in a known form.

    With several replicas it is the fullest cache, and the sum of waiting requests.
    """
    form = headers.get(_ASKED, b"").lower()
    if form not in (b"text", b"json"):
        return ()
    gauges = [each for each in engine.get_metrics() if isinstance(each, Gauge)]
    values = [[each.value for each in gauges if each.name == PREFIX + name] for name in _NAMES]
    if not all(values):  # disable_log_stats
        return ()
    named = dict(zip(_NAMES, (float(max(values[0])), float(sum(values[1]))), strict=True))
    if form == b"json":
        return ((_TOLD, f"JSON {json.dumps({'named_metrics': named})}".encode()),)
    return ((_TOLD, f"TEXT {', '.join(f'named_metrics.{name}={value}' for name, value in named.items())}".encode()),)
