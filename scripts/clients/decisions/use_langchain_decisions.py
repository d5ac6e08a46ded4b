"""Run LangChain's OpenAIDecisions against a server."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from asked import STATE, TEAM, TEAMS, TONE, TONES, URGENT, check
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai.decisions import Choice, OpenAIDecisions, Predicate, Score


def main(url: str, key: str) -> None:
    decisions = OpenAIDecisions(model="smollm2", base_url=url + "/v1", api_key=key, max_retries=0)
    questions: dict[str, Any] = {
        "team": Choice(instructions=TEAM, choices=dict(TEAMS)),
        "urgent": Predicate(instructions=URGENT),
        "tone": Score(instructions=TONE, levels=list(TONES)),
    }
    response = decisions.invoke({"input": STATE, "questions": questions})
    assert response.choices["team"].choice in TEAMS
    check(response.choices["team"].probabilities.values())
    assert 0 < response.predicates["urgent"].probability < 1
    check(response.scores["tone"].probabilities.values())
    assert not response.refusals
    later = asyncio.run(decisions.ainvoke({"input": [HumanMessage(STATE)], "questions": questions}))
    assert later.answers == response.answers
    talk = [HumanMessage(STATE), AIMessage("I am sorry.")]
    assert decisions.invoke({"input": talk, "questions": questions}).answers.keys() == questions.keys()


if __name__ == "__main__":
    main(*sys.argv[1:])
