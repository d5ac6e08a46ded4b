"""GBNF, the EBNF of llama.cpp and xgrammar, turned into Lark.

Covered: `name ::= a | b`, literals, character classes, `.`, groups, `* + ? {m} {m,} {m,n}`, `#` comments, `\\n \\t
\\xHH \\uHHHH \\UHHHHHHHH` escapes. The start is `root`. Parts that involve no recursion become terminals, that is
regular expressions: llguidance splits text into terminals greedily, so `[a-z]+ "b"` as two of them could never end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxllm.constraints.lark import literal
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.grammar_checks import check_depth, refuse
from jaxllm.params.limits import MAX_PARENTHESES

_TOKEN = re.compile(
    r"""
    (?P<space> (?: \s | \#[^\n]* )+ )
  | (?P<rule> [A-Za-z_][\w-]* (?= \s* ::= ) ) \s* ::=
  | (?P<name> [A-Za-z_][\w-]* )
  | (?P<literal> "(?: \\. | [^"\\\n] )*" )
  | (?P<class> \[ (?: \\. | [^\]\\] )* \] )
  | (?P<repeat> [*+?] | \{ \s* \d{1,9} \s* (?: , \s* (?: \d{1,9} )? \s* )? \} )
  | (?P<mark> [()|.] )
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_PLAIN_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **{character: character for character in "\"'\\/[]-^.()|*+?{}"}}


class _Token(NamedTuple):
    kind: str
    text: str
    offset: int


class _Part(NamedTuple):
    """One item of a sequence: Lark text (kind "terminal"), a rule's name ("rule") or a group ("group")."""

    kind: str
    text: str = ""
    group: list[list[_Part]] = []  # noqa: RUF012 - never changed
    repeat: str = ""


def gbnf_to_lark(text: str) -> str:
    """Translate a grammar. Raises VLLMValidationError, with the line, for unsupported syntax."""
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise refuse("grammar", "GBNF starts at the rule `root`, which is missing.")
    graph = {name: list(dict.fromkeys(_names(alternatives))) for name, alternatives in rules.items()}
    for name, ends in graph.items():
        for end in ends:
            if end not in rules:
                raise refuse("grammar", f"rule {end!r}, used by {name!r}, is not defined.")
    check_depth("grammar", "rules", graph)
    return _Writer(rules, _recursive(graph)).lark()


def _names(alternatives: list[list[_Part]]) -> Iterator[str]:
    for sequence in alternatives:
        for part in sequence:
            if part.kind == "rule":
                yield part.text
            else:
                yield from _names(part.group)


def _recursive(graph: dict[str, list[str]]) -> set[str]:
    """Find the rules that contain themselves or lead to such a rule, by removing all other rules."""
    left = {name: set(ends) for name, ends in graph.items()}
    users: dict[str, list[str]] = {name: [] for name in graph}
    for name, ends in graph.items():
        for end in ends:
            users[end].append(name)
    ready = [name for name, ends in left.items() if not ends]
    while ready:
        done = ready.pop()
        del left[done]
        for user in users[done]:
            left[user].discard(done)
            if not left[user]:
                ready.append(user)
    return set(left)


class _Parser:
    def __init__(self, text: str) -> None:
        self._source = text
        self._tokens: list[_Token] = []
        offset = 0
        while offset < len(text):
            match = _TOKEN.match(text, offset)
            if match is None:
                raise self._error(offset, f"{text[offset : offset + 10]!r} is not understood")
            kind = match.lastgroup or ""
            if kind != "space":
                self._tokens.append(_Token(kind, match[kind], offset))
            offset = match.end()
        self._tokens.append(_Token("end", "", len(text)))
        self._at = 0

    def _error(self, offset: int, what: str) -> VLLMValidationError:
        line = self._source.count("\n", 0, offset) + 1
        return refuse("grammar", f"line {line}: {what} (GBNF; Lark grammars define rules with `:`).")

    def rules(self) -> dict[str, list[list[_Part]]]:
        """Parse `name ::= alternatives`, any number of times."""
        rules: dict[str, list[list[_Part]]] = {}
        while (token := self._next()).kind != "end":
            if token.kind != "rule":
                raise self._error(token.offset, f"expected `name ::=`, got {token.text!r}")
            if token.text in rules:
                raise self._error(token.offset, f"rule {token.text!r} is defined twice")
            rules[token.text] = self._alternatives(0)
        return rules

    def _next(self) -> _Token:
        token = self._tokens[self._at]
        self._at += 1
        return token

    def _alternatives(self, depth: int) -> list[list[_Part]]:
        """Parse up to a closing parenthesis (depth > 0), the next rule or the end, which is not consumed."""
        if depth > MAX_PARENTHESES:
            raise self._error(self._tokens[self._at].offset, f"more than {MAX_PARENTHESES} nested parentheses")
        alternatives: list[list[_Part]] = [[]]
        while True:
            token = self._tokens[self._at]
            if token.kind in ("rule", "end") or token.text == ")":
                if (token.text == ")") != (depth > 0):
                    raise self._error(token.offset, "parentheses do not match")
                return alternatives
            self._at += 1
            if token.text == "|" and token.kind == "mark":
                alternatives.append([])
            elif token.kind == "repeat":
                if not alternatives[-1] or alternatives[-1][-1].repeat:
                    raise self._error(token.offset, f"{token.text!r} has nothing to repeat")
                alternatives[-1][-1] = alternatives[-1][-1]._replace(repeat=re.sub(r"\s", "", token.text))
            else:
                alternatives[-1].append(self._part(token, depth))

    def _part(self, token: _Token, depth: int) -> _Part:
        if token.text == "(" and token.kind == "mark":
            group = self._alternatives(depth + 1)
            self._at += 1
            return _Part("group", group=group)
        if token.kind == "name":
            return _Part("rule", token.text)
        if token.kind == "literal":
            return _Part("terminal", literal(self._unescaped(token)))
        if token.kind == "class":
            return _Part("terminal", self._character_class(token))
        return _Part("terminal", r"/(?s:.)/")

    def _unescaped(self, token: _Token) -> str:
        return _ESCAPE.sub(lambda match: self._character(match, token), token.text[1:-1])

    def _character(self, match: re.Match[str], token: _Token) -> str:
        code = match[1] or match[2] or match[3]
        if code is not None:
            number = int(code, 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise self._error(token.offset, f"{match[0]} is no character")
            return chr(number)
        if match[4] not in _PLAIN_ESCAPES:
            raise self._error(token.offset, f"escape {match[0]!r} is not known")
        return _PLAIN_ESCAPES[match[4]]

    def _character_class(self, token: _Token) -> str:
        """Rewrite `[...]` as a regular expression with every character written by its number."""
        inside = token.text[1:-1]
        negated = inside.startswith("^")
        inside = inside[negated:]
        units: list[str] = []
        offset = 0
        while offset < len(inside):
            match = _ESCAPE.match(inside, offset)
            offset = match.end() if match else offset + 1
            is_range = match is None and inside[offset - 1] == "-" and 0 < offset - 1 < len(inside) - 1
            units.append("-" if is_range else _code(self._character(match, token) if match else inside[offset - 1]))
        if not units:
            raise self._error(token.offset, "an empty character class matches nothing")
        return f"/[{'^' if negated else ''}{''.join(units)}]/"


def _code(character: str) -> str:
    return f"\\u{{{ord(character):X}}}"


class _Writer:
    """Writes rules as Lark: rules without recursion, and such stretches of other rules, become terminals."""

    def __init__(self, rules: dict[str, list[list[_Part]]], recursive: set[str]) -> None:
        self._rules = rules
        self._recursive = recursive
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._extra: list[str] = []

    def lark(self) -> str:
        lines = [f"start: {self._name('root')}"]
        for name, alternatives in self._rules.items():
            write = self._alternatives if name in self._recursive else self._terminals
            lines.append(f"{self._name(name)}: {write(alternatives)}")
        return "\n".join([*lines, *self._extra]) + "\n"

    def _name(self, rule: str) -> str:
        return f"{'r' if rule in self._recursive else 'R'}{self._numbers[rule]}"

    def _is_terminal(self, part: _Part) -> bool:
        if part.kind == "rule":
            return part.text not in self._recursive
        return all(self._is_terminal(inner) for sequence in part.group for inner in sequence)

    def _terminals(self, alternatives: list[list[_Part]]) -> str:
        return " | ".join(" ".join(map(self._terminal, sequence)) or '""' for sequence in alternatives)

    def _terminal(self, part: _Part) -> str:
        if part.kind == "group":
            return f"({self._terminals(part.group)}){part.repeat}"
        return (self._name(part.text) if part.kind == "rule" else part.text) + part.repeat

    def _alternatives(self, alternatives: list[list[_Part]]) -> str:
        return " | ".join(self._sequence(sequence) for sequence in alternatives)

    def _sequence(self, sequence: list[_Part]) -> str:
        """Write a sequence; neighbours without recursion become one terminal."""
        written: list[str] = []
        stretch: list[_Part] = []
        for part in [*sequence, None]:
            if part is not None and self._is_terminal(part):
                stretch.append(part)
                continue
            if stretch:
                name = f"T{len(self._extra)}"
                self._extra.append(f"{name}: {self._terminals([stretch])}")
                written.append(name)
                stretch = []
            if part is not None:
                inner = f"({self._alternatives(part.group)})" if part.kind == "group" else self._name(part.text)
                written.append(inner + part.repeat)
        return " ".join(written) or '""'
