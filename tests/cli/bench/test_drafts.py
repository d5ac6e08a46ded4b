"""`jaxllm bench serve` reads a server's drafts from its metrics, ours and vLLM's."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, generate_latest

from jaxllm.cli.bench.drafts import draft_figures, parse_drafts
from jaxllm.cli.bench.figures import Conditions, report, summarize
from jaxllm.core_messages import SpeculationStats
from jaxllm.engine.front.metrics import EngineMetrics
from jaxllm.server.operations.prometheus import EngineCollector
from tests.engine.test_metrics import stats

VLLM = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 2.0
vllm:num_preemptions_total{engine="0",model_name="m"} 5.0
"""
FIGURES = {
    "spec_decode_acceptance_rate": 40.0,
    "spec_decode_acceptance_length": 2.2,
    "spec_decode_num_drafts": 10,
    "spec_decode_draft_tokens": 30,
    "spec_decode_accepted_tokens": 12,
    "spec_decode_per_position_acceptance_rates": [0.7, 0.3, 0.2],
}


def test_vllms_metrics():
    assert draft_figures({}, parse_drafts(VLLM)) == FIGURES
    assert draft_figures(parse_drafts(VLLM), parse_drafts(VLLM)) == {}
    assert parse_drafts("# nothing\nvllm:num_preemptions_total 3\n") == {}


def test_our_metrics():
    """A server's own words are read back, and only what came in the run counts."""

    class Engine:
        """Stands in for an engine: its metrics alone are asked for."""

        def __init__(self, times: int) -> None:
            counts = SpeculationStats(
                num_drafts=10 * times,
                num_draft_tokens=30 * times,
                num_accepted_tokens=12 * times,
                num_accepted_tokens_per_pos=[7 * times, 3 * times, 2 * times],
            )
            self.get_metrics = EngineMetrics("m", 128, stats(speculation=counts)).snapshot

    texts = []
    for times in (2, 3):
        registry = CollectorRegistry()
        registry.register(EngineCollector(Engine(times), "vllm:"))  # pyright: ignore[reportArgumentType]
        texts.append(generate_latest(registry).decode())
    assert draft_figures(parse_drafts(texts[0]), parse_drafts(texts[1])) == FIGURES


def test_the_report():
    conditions = Conditions(math.inf, 1.0, None)
    lines = list(report(summarize([], 1.0, 0.0, conditions) | FIGURES, conditions))
    assert "Acceptance length:                       2.20" in lines
    assert "Position 2 acceptance (%):               20.00" in lines
    assert not any("cceptance" in line for line in report(summarize([], 1.0, 0.0, conditions), conditions))
