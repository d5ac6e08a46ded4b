"""Turn `StructuredOutputsParams` into the text that llguidance compiles."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from jaxllm.constraints.gbnf import gbnf_to_lark
from jaxllm.constraints.lark import check_lark, is_gbnf, literal
from jaxllm.constraints.schemas.json_schema import check_schemas_inside, schema_text
from jaxllm.constraints.schemas.rewrites import OneOf
from jaxllm.constraints.structural_tag import structural_tag_grammar
from jaxllm.params.grammar_checks import check_parentheses, refuse
from jaxllm.params.structured_outputs import StructuredOutputsParams


def grammar_key(params: StructuredOutputsParams) -> bytes:
    """Return a digest, equal for equal params; the order of a schema's keys matters."""
    return hashlib.sha256(msgspec.msgpack.encode(params)).digest()


def grammar_text(
    params: StructuredOutputsParams, special_tokens: Mapping[str, int], *, one_of: OneOf = OneOf.KEPT
) -> str:
    """Return the grammar for llguidance. Raises VLLMValidationError if it exceeds a limit or cannot be read."""
    from llguidance import LLMatcher

    kind = params.kind
    if kind == "json":
        return LLMatcher.grammar_from_json_schema(schema_text("json", params.json, params, one_of=one_of))
    if kind == "json_object":
        if params.json_object is not True:
            raise refuse(kind, "it must be True, or left out for one of the other constraints.")
        return LLMatcher.grammar_from_json_schema(schema_text("json_object", {"type": "object"}, params))
    if kind == "regex":
        check_parentheses("regex", params.regex or "")
        return LLMatcher.grammar_from_regex(params.regex or "")
    if kind == "choice":
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(map(literal, params.choice or ()))}")
    if kind == "grammar":
        text = params.grammar or ""
        text = gbnf_to_lark(text) if is_gbnf(text) else text
        check_lark("grammar", text)
        check_schemas_inside("grammar", text)
        return LLMatcher.grammar_from_lark(text)
    return structural_tag_grammar(params, special_tokens, one_of=one_of)
