"""Run OpenAI's package against a server: `decisions.create`, and a request that is refused."""

from __future__ import annotations

import sys
from typing import Any

import openai
from asked import STATE, TEAM, TEAMS, TONE, TONES, URGENT, check

QUESTIONS: list[Any] = [
    {"type": "predicate", "name": "urgent", "instructions": URGENT},
    {
        "type": "choice",
        "name": "team",
        "instructions": TEAM,
        "choices": [{"value": name, "description": each or ""} for name, each in TEAMS.items()],
    },
    {
        "type": "choice",
        "name": "refund",
        "instructions": "Is a refund due?",
        "choices": [{"value": value} for value in (True, False)],
    },
    {"type": "score", "instructions": TONE, "levels": [{"label": each} for each in TONES]},
]


def main(url: str, key: str) -> None:
    client = openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)
    decision = client.decisions.create(model="smollm2", input=STATE, questions=QUESTIONS)
    urgent, team, refund, tone = decision.answers
    assert urgent.type == "predicate"
    assert 0 < urgent.probability < 1
    assert team.type == refund.type == "choice"
    assert team.choice in TEAMS
    assert [each.value for each in team.probabilities] == list(TEAMS)
    check(each.probability for each in team.probabilities)
    assert isinstance(refund.choice, bool)
    check(each.probability for each in refund.probabilities)
    assert tone.type == "score"
    assert (tone.name, [each.label for each in tone.probabilities]) == (None, TONES)
    assert 0 < tone.score < 2
    usage = decision.usage
    assert usage.input_tokens > usage.input_tokens_details.cached_tokens > 0
    parts: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": STATE}]}]
    assert client.decisions.create(model="smollm2", input=parts, questions=QUESTIONS).answers == decision.answers
    message = ""
    try:
        client.decisions.create(model="smollm2", input=STATE, questions=QUESTIONS[:1] * 300)
    except openai.BadRequestError as error:
        message = str(error)
    assert "questions" in message


if __name__ == "__main__":
    main(*sys.argv[1:])
