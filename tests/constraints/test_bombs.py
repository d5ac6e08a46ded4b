"""Grammars made to exhaust the stack, memory or time: each compiles or is refused soon, and the process lives on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.constraints.bombs import bombs
from tests.constraints.grammar_walks import smollm2_tokenizer

pytestmark = pytest.mark.constraints

# What must not compile, with the limit or keyword that the refusal names.
REFUSED = {
    "30,000 parentheses": "150 parentheses",
    "30,000 parentheses in a pattern": "150 parentheses",
    "$ref chain 16,000": "10000 levels",
    "oneOf nested 300 deep": "100 levels",
    "70,000-value enum": "enum",
    "one dict 2**40 times": "characters",
    "oneOf of 20,000": "too large",
    "contains in contains": "contains",
    "5,000 properties": "properties",
    "remote $ref": "remote references",
    "deep JSON": "json",
    "Lark chain 20,000": "10000 levels",
    "GBNF chain 20,000": "10000 levels",
    "Lark parentheses": "150 parentheses",
}
COMPILES = {
    "(a|b)*a(a|b){30}",
    "60,000 choices",
    "$ref chain 1,000",
    "$ref chain 1,000 of objects",
    "60,000-value enum",
    "anyOf nested 40 deep",
    "Lark chain 4,000",
}


@pytest.fixture(scope="module")
def outcomes(
    smollm2_path: str, tmp_path_factory: pytest.TempPathFactory, repository: Path
) -> dict[str, dict[str, Any]]:
    """Run all bombs in one process: one that dies takes the others' outcomes with it, and fails the tests."""
    tokenizer = tmp_path_factory.mktemp("bombs") / "tokenizer.json"
    smollm2_tokenizer(smollm2_path).backend.save(str(tokenizer))
    command = [sys.executable, "-m", "tests.constraints.bombs", str(tokenizer)]
    done = subprocess.run(command, check=False, cwd=repository, capture_output=True, text=True, timeout=200)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (done.returncode, lines[-1:], done.stderr[-2000:])
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", [name for name, _ in bombs()])
def test_bomb(outcomes: dict[str, dict[str, Any]], name: str):
    outcome = outcomes[name]
    assert outcome["seconds"] < 6.0  # the deadline, and a thread's start
    assert outcome["worst_step"] < 2.0
    if name in REFUSED:
        assert REFUSED[name] in outcome["refusal"]
    elif name in COMPILES:
        assert outcome["refusal"] is None
    elif outcome["refusal"] is not None:
        assert outcome["refusal"].startswith("structured_outputs.")
        assert len(outcome["refusal"]) < 600
