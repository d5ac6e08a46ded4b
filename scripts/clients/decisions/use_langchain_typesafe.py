"""Run LangChain's TypeSafeClassifier against a server, which then stands in for TypeSafe's System One."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from asked import STATE, TEAM, TEAMS, TONE, TONES, URGENT, check
from langchain_typesafe import Choice, Noul, Score, TypeSafeClassifier


def main(url: str, key: str) -> None:
    classifier = TypeSafeClassifier(model="smollm2", base_url=url, api_key=key)
    questions: dict[str, Any] = {
        "team": Choice(instructions=TEAM, criteria=dict(TEAMS)),
        "urgent": Noul(instructions=URGENT),
        "tone": Score(instructions=TONE, criteria=list(TONES)),
    }
    response = classifier.invoke({"state": {"ticket": STATE}, "questions": questions})
    assert response.choices["team"].choice in TEAMS
    check(response.choices["team"].probabilities.values())
    assert 0 < response.nouls["urgent"].noul < 1
    check(response.scores["tone"].probabilities.values())
    later = asyncio.run(classifier.ainvoke({"state": {"ticket": STATE}, "questions": questions}))
    assert later.answers == response.answers


if __name__ == "__main__":
    main(*sys.argv[1:])
