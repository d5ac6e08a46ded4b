"""Structural tags, both of vLLM's forms, as Lark: free text in which certain strings open constrained parts.

The older form is `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, the newer one
`{"type": "structural_tag", "format": {"type": ...}}` with the formats of `_FORMATS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.constraints.gbnf import gbnf_to_lark
from jaxllm.constraints.lark import check_lark, is_gbnf, literal, regex_literal
from jaxllm.constraints.schemas.json_schema import check_nesting, parse_json, schema_text
from jaxllm.constraints.schemas.rewrites import OneOf
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.grammar_checks import refuse
from jaxllm.params.structured_outputs import StructuredOutputsParams

_FORMATS: Mapping[str, dict[str, type]] = {
    "const_string": {"value": str},
    "json_schema": {"json_schema": object},
    "regex": {"pattern": str},
    "grammar": {"grammar": str},
    "any_text": {},
    "sequence": {"elements": list},
    "or": {"elements": list},
    "tag": {"begin": str, "content": dict, "end": str},
    "triggered_tags": {"triggers": list, "tags": list},
    "tags_with_separator": {"tags": list, "separator": str},
}
_OPTIONAL: Mapping[str, dict[str, type]] = {
    "any_text": {"excluded_str": list},
    "triggered_tags": {"at_least_one": bool, "stop_after_first": bool},
    "tags_with_separator": {"at_least_one": bool, "stop_after_first": bool},
}


def structural_tag_grammar(params: StructuredOutputsParams, special_tokens: Mapping[str, int], *, one_of: OneOf) -> str:
    """Return llguidance's grammar for params.structural_tag. Special tokens in its strings become tokens, not text."""
    tag = parse_json("structural_tag", params.structural_tag or "")
    check_nesting("structural_tag", tag)
    if not isinstance(tag, dict):
        raise _refuse("it must be a JSON object.")
    writer = _Writer(params, special_tokens, one_of)
    return writer.grammar(_modern(tag) if "structures" in tag else _get(tag, "format", dict))


def _refuse(message: str) -> VLLMValidationError:
    return refuse("structural_tag", message)


def _get(owner: dict[str, Any], key: str, kind: type) -> Any:
    value = owner.get(key)
    if key not in owner or not isinstance(value, kind):
        wanted = {str: "a string", list: "a list", dict: "an object", bool: "true or false"}.get(kind, "a value")
        raise _refuse(f"{key!r} of {owner.get('type', 'the structural tag')!r} must be {wanted}.")
    return value


def _modern(tag: dict[str, Any]) -> dict[str, Any]:
    """Translate the older form into a format of the newer one."""
    tags: list[dict[str, Any]] = []
    for structure in _get(tag, "structures", list):
        if not isinstance(structure, dict) or "schema" not in structure:
            raise _refuse("each of 'structures' must be an object with begin, schema and end.")
        content = {"type": "json_schema", "json_schema": structure["schema"]}
        tags.append({"type": "tag", "begin": structure.get("begin"), "content": content, "end": structure.get("end")})
    return {"type": "triggered_tags", "triggers": _get(tag, "triggers", list), "tags": tags}


class _Writer:
    """Collects Lark rules.

    Each format is written for the text that closes it: "" if something else follows, None at the end of the output. A
    format of free text must know its close, and writes it too.
    """

    def __init__(self, params: StructuredOutputsParams, special_tokens: Mapping[str, int], one_of: OneOf) -> None:
        self._params = params
        self._one_of = one_of
        self._special_tokens = special_tokens
        names = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else None
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []
        self._write: Mapping[str, Callable[[dict[str, Any], str | None], tuple[str, bool]]] = {
            "any_text": lambda form, close: (self._free_text(_strings(form, "excluded_str"), close), True),
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
        }

    def grammar(self, form: dict[str, Any]) -> str:
        """Write the whole grammar, as JSON of llguidance's list of grammars."""
        start = self._closed(form, None)
        text = "\n".join([f"start: {start}", *self._rules])
        check_lark("structural_tag", text)
        return json.dumps({"grammars": [{"name": "structural_tag", "lark_grammar": text}, *self._grammars]})

    def _rule(self, body: str, *, terminal: bool = False, options: str = "") -> str:
        name = f"{'T' if terminal else 'r'}{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _closed(self, form: Any, close: str | None) -> str:
        """Write a format and its close."""
        body, is_closed = self._format(form, close)
        return body if is_closed or not close else f"{body} {self._text(close)}"

    def _format(self, form: Any, close: str | None) -> tuple[str, bool]:
        """Write a format; return it and whether its close was written with it."""
        kind = form.get("type") if isinstance(form, dict) else None
        if not isinstance(kind, str) or kind not in _FORMATS:
            raise _refuse(f"format type {kind!r} is not supported; there are {', '.join(_FORMATS)}.")
        for key, wanted in _FORMATS[kind].items():
            _get(form, key, wanted)
        optional = _OPTIONAL.get(kind, {})
        for key in form:
            if key in optional:
                _get(form, key, optional[key])
            elif key != "type" and key not in _FORMATS[kind]:
                raise _refuse(f"{kind} has no {key!r}.")
        if kind in self._write:
            return self._write[kind](form, close)
        return self._constrained(kind, form), False

    def _constrained(self, kind: str, form: dict[str, Any]) -> str:
        if kind == "const_string":
            return self._text(form["value"])
        if kind == "json_schema":
            schema = form["json_schema"]
            return self._rule(f"%json {schema_text('structural_tag', schema, self._params, one_of=self._one_of)}")
        if kind == "regex":
            return self._rule(regex_literal("structural_tag", form["pattern"]), terminal=True)
        if kind == "grammar":
            text = gbnf_to_lark(form["grammar"]) if is_gbnf(form["grammar"]) else form["grammar"]
            check_lark("structural_tag", text)
            self._grammars.append({"name": f"grammar{len(self._grammars)}", "lark_grammar": text})
            return f"@grammar{len(self._grammars) - 1}"
        return self._tags_with_separator(form)

    def _sequence(self, form: dict[str, Any], close: str | None) -> tuple[str, bool]:
        *others, last = form["elements"] or [{"type": "const_string", "value": ""}]
        written = [self._format(element, "")[0] for element in others]
        body, is_closed = self._format(last, close)
        return " ".join([*written, body]), is_closed

    def _or(self, form: dict[str, Any], close: str | None) -> tuple[str, bool]:
        if not form["elements"]:
            raise _refuse("or needs at least one element.")
        return self._any_of([self._closed(element, close) for element in form["elements"]]), True

    def _tag(self, form: dict[str, Any], close: str | None, skip: str = "") -> tuple[str, bool]:
        """Write begin, content and end, without the part `skip` of begin that is already written."""
        begin, end = self._text(form["begin"][len(skip) :]), form["end"]
        if end:
            return f"{begin} {self._closed(form['content'], end)}", False
        body, is_closed = self._format(form["content"], close)
        return f"{begin} {body}", is_closed

    def _whole_tags(self, form: dict[str, Any]) -> list[dict[str, Any]]:
        tags = [{"type": "tag", **tag} if isinstance(tag, dict) else tag for tag in form["tags"]]
        if not tags or any(not isinstance(tag, dict) or tag["type"] != "tag" for tag in tags):
            raise _refuse(f"{form['type']} needs a list of tags.")
        return tags

    def _tags_with_separator(self, form: dict[str, Any]) -> str:
        tag = self._any_of([self._format(tag, "")[0] for tag in self._whole_tags(form)])
        more = "" if form.get("stop_after_first") else f" ({self._text(form['separator'])} {tag})*"
        return f"({tag}{more})" + ("" if form.get("at_least_one") else "?")

    def _triggered_tags(self, form: dict[str, Any], close: str | None) -> tuple[str, bool]:
        triggers = _strings(form, "triggers")
        headers = {trigger: self._trigger(trigger, triggers) for trigger in triggers}
        tags: list[str] = []
        for tag in (whole := self._whole_tags(form)):
            self._format(tag, "")  # checks it
            trigger = next((trigger for trigger in triggers if tag["begin"].startswith(trigger)), None)
            if trigger is None:
                raise _refuse(f"begin {tag['begin']!r} starts with none of the triggers.")
            tags.append(f"{headers[trigger]} {self._tag(tag, '', trigger)[0]}")
        tag = self._any_of(tags)
        first = self._any_of([self._format(one, "")[0] for one in whole]) if form.get("at_least_one") else ""
        if form.get("stop_after_first"):
            only = first or tag
            closed = f"{only} {self._text(close)}" if close else only
            return (closed if first else self._any_of([closed, self._free_text(triggers, close)])), True
        return f"{first} {tag}* {self._free_text(triggers, close)}", True

    def _any_of(self, bodies: list[str]) -> str:
        return self._rule(" | ".join(bodies))

    def _trigger(self, trigger: str, triggers: list[str]) -> str:
        """Write free text up to the first occurrence of this trigger."""
        return self._free_text([other for other in triggers if other != trigger], trigger)

    def _free_text(self, excluded: list[str], close: str | None) -> str:
        """Write text without any of `excluded` up to the first `close`."""
        if close == "":
            raise _refuse("any_text and triggered_tags must come last, or directly inside a tag that has an end.")
        banned = [text for text in excluded if self._special is None or not self._special.search(text)]
        text = "/(?s:.*)/"
        if banned:
            text += f" & ~/(?s:.*)({'|'.join(map(_escaped, banned))})(?s:.*)/"
        special = self._special.search(close) if self._special and close else None
        if special is None or close is None:
            text = self._rule(text, terminal=True)
            return text if close is None else self._rule(f"{text} {literal(close)}", options="[lazy]")
        # What comes before the special token ends the text, in which the token cannot be.
        start = special.start()
        before = f"/(?s:.*){_escaped(close[:start])}/" if start else ""
        text = self._rule(f"{text} & {before}" if before else text, terminal=True)
        return f"{text} {self._text(close[start:])}"

    def _text(self, text: str) -> str:
        """Write a string of text and special tokens."""
        pieces: list[str] = []
        offset = 0
        for match in self._special.finditer(text) if self._special else ():
            pieces += [literal(text[offset : match.start()])] if match.start() > offset else []
            pieces.append(f"<[{self._special_tokens[match[0]]}]>")
            offset = match.end()
        pieces += [literal(text[offset:])] if len(text) > offset or not pieces else []
        return " ".join(pieces)


def _strings(form: dict[str, Any], key: str) -> list[str]:
    values = form.get(key, [])
    if not isinstance(values, list) or any(not isinstance(value, str) or not value for value in values):
        raise _refuse(f"{key} must be a list of non-empty strings.")
    if key == "triggers" and not values:
        raise _refuse("triggers must not be empty.")
    return values


def _escaped(text: str) -> str:
    """Write a string as a regular expression between slashes."""
    return "".join(f"\\u{{{ord(character):X}}}" for character in text)
