"""Read a run's speculative-decoding figures from a server's metrics, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxllm.cli.client.openai_client import OpenAIClient

_PREFIX = "vllm:spec_decode_num_"

type _DraftCounts = Mapping[str, float]
"""The counters by their names; those per position have it at the end."""


async def read_drafts(client: OpenAIClient) -> _DraftCounts:
    """Return the server's counters since its start; empty if it makes no drafts or has no metrics."""
    try:
        return parse_drafts(await client.metrics() or "")
    except ValueError:  # the address serves another kind of page
        return {}


def parse_drafts(text: str) -> _DraftCounts:
    """Parse the draft counters in Prometheus' text format; engines of one server are added up."""
    from prometheus_client.parser import text_string_to_metric_families  # part of the extra that the client needs too

    counts: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix(_PREFIX).removesuffix("_total")
            if sample.name.startswith(_PREFIX) and not name.endswith("_created"):
                key = f"{name} {sample.labels['position']}" if "position" in sample.labels else name
                counts[key] = counts.get(key, 0.0) + sample.value
    return counts


def draft_figures(before: _DraftCounts, after: _DraftCounts) -> dict[str, Any]:
    """Return the figures of a run from the counters before and after it; empty if it had no drafts."""
    counts = {name: count - before.get(name, 0.0) for name, count in after.items()}
    num_drafts, num_tokens = counts.get("drafts", 0.0), counts.get("draft_tokens", 0.0)
    if not num_drafts or not num_tokens:
        return {}
    accepted = counts.get("accepted_tokens", 0.0)
    by_position = {int(name.split()[1]): count for name, count in counts.items() if " " in name}
    return {
        "spec_decode_acceptance_rate": 100 * accepted / num_tokens,
        "spec_decode_acceptance_length": 1 + accepted / num_drafts,
        "spec_decode_num_drafts": int(num_drafts),
        "spec_decode_draft_tokens": int(num_tokens),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [by_position[each] / num_drafts for each in sorted(by_position)],
    }


def draft_lines(figures: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the labels and values of the report on drafts, if there were any."""
    if "spec_decode_num_drafts" not in figures:
        return
    yield "Acceptance rate (%)", figures["spec_decode_acceptance_rate"]
    yield "Acceptance length", figures["spec_decode_acceptance_length"]
    yield "Drafts", figures["spec_decode_num_drafts"]
    yield "Draft tokens", figures["spec_decode_draft_tokens"]
    yield "Accepted tokens", figures["spec_decode_accepted_tokens"]
    for position, rate in enumerate(figures["spec_decode_per_position_acceptance_rates"]):
        yield f"Position {position} acceptance (%)", 100 * rate
