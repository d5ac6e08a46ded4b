"""Run LiteLLM's decisions, in both forms, against a server, as its hosted_vllm provider."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it would fetch prices

import litellm
from asked import STATE, TEAM, TEAMS, TONE, TONES, URGENT, check


def main(url: str, key: str) -> None:
    server = {"model": "hosted_vllm/smollm2", "api_base": url + "/v1", "api_key": key}
    questions: dict[str, Any] = {
        "team": {"type": "choice", "instructions": TEAM, "criteria": TEAMS},
        "urgent": {"type": "noul", "instructions": URGENT},
        "tone": {"type": "score", "instructions": TONE, "criteria": TONES},
    }
    response = litellm.systemone(**server, state={"ticket": STATE}, questions=questions)
    assert response.answers["team"].choice in TEAMS
    check(response.answers["team"].probabilities.values())
    assert 0 < response.answers["urgent"].noul < 1
    check(response.answers["tone"].probabilities.values())
    later = asyncio.run(litellm.asystemone(**server, state={"ticket": STATE}, questions=questions))
    assert later.answers == response.answers
    asked: list[Any] = [
        {"type": "predicate", "name": "urgent", "instructions": URGENT},
        {"type": "choice", "name": "refund", "instructions": TEAM, "choices": [{"value": "yes"}, {"value": True}]},
    ]
    urgent, refund = litellm.decisions(**server, input=STATE, questions=asked).answers
    assert 0 < urgent.probability < 1
    check(each.probability for each in refund.probabilities)


if __name__ == "__main__":
    main(*sys.argv[1:])
