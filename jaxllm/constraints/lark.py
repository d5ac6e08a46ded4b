"""Lark grammars for llguidance: tell them from GBNF, write literals, and bound grammars before they are compiled."""

from __future__ import annotations

import json
import re

from jaxllm.params.grammar_checks import check_depth, check_parentheses

# Takes linear time on any text: an unterminated string or regular expression extends to the end of the line.
_TOKEN = re.compile(
    r"""
    (?P<space> \s+ | //[^\n]* | \#[^\n]* )
  | (?P<string> "(?:\\.|[^"\\\n])*"?i? | <[^<>\s]{0,200}> )
  | (?P<regex> /(?:\\.|[^/\\\n])+/?[a-z]* )
  | (?P<rule> [A-Za-z_][\w-]* ) (?: \[[^][\n]{0,1000}\] | \{[\w,\s]{0,1000}\} | \.\d+ )? \s* :
  | (?P<name> [A-Za-z_][\w-]* )
  | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)


def check_lark(parameter: str, text: str) -> None:
    """Raise VLLMValidationError for a grammar whose rules or parentheses nest too deep."""
    graph: dict[str, list[str]] = {}
    rule = ""
    marks: list[str] = []
    for match in _TOKEN.finditer(text):
        if match["rule"]:
            rule = match["rule"]
            graph.setdefault(rule, [])
        elif match["name"]:
            graph.setdefault(rule, []).append(match["name"])
        elif match["regex"]:
            check_parentheses(parameter, match["regex"])
        elif match["other"] in ("(", ")"):
            marks.append(match["other"])
    check_parentheses(parameter, "".join(marks))
    for end in [end for ends in graph.values() for end in ends]:
        graph.setdefault(end, [])
    check_depth(parameter, "rules", graph)


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is GBNF (`name ::= ...`) rather than Lark (`name: ...`)."""
    code = re.sub(r'"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])+/?|#[^\n]*', "", text)
    return "::=" in code


def literal(text: str) -> str:
    """Write a string as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def regex_literal(parameter: str, pattern: str) -> str:
    """Write a regular expression in Lark's form, between slashes."""
    from llguidance import regex_to_lark

    check_parentheses(parameter, pattern)
    return f"/{regex_to_lark(pattern, use_ascii='')}/"
