"""Run systemone-client against a server."""

from __future__ import annotations

import sys

from asked import STATE, TEAM, TEAMS, TONE, TONES, URGENT, check
from systemone import Choice, Client, Noul, Score


def main(url: str, key: str) -> None:
    questions = {"team": Choice(TEAM, dict(TEAMS)), "urgent": Noul(URGENT), "tone": Score(TONE, list(TONES))}
    with Client(url, api_key=key, model="smollm2") as client:
        response = client.system_one({"ticket": STATE}, questions)
    assert response.choices["team"].choice in TEAMS
    check(response.choices["team"].probabilities.values())
    assert 0 < response.nouls["urgent"].noul < 1
    assert response.scores["tone"].legend == {str(i): each for i, each in enumerate(TONES)}
    check(response.scores["tone"].probabilities.values())
    assert response.usage.input_tokens > response.usage.output_tokens > 0


if __name__ == "__main__":
    main(*sys.argv[1:])
