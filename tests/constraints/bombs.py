"""Compile and use grammars made to hurt, in a process of its own: `python -m tests.constraints.bombs TOKENIZER_JSON`.

Prints one JSON line per bomb: its name, the refusal or null, seconds to compile, worst seconds of one mask or token.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from jaxllm.constraints.bits import num_words
from jaxllm.constraints.compiler import GrammarCompiler
from jaxllm.constraints.matcher import Grammar
from jaxllm.exceptions import VLLMValidationError
from jaxllm.params.structured_outputs import StructuredOutputsParams
from jaxllm.text.tokenizer import Tokenizer

VOCAB_SIZE = 49_152
EOS = 2
NUM_TOKENS = 25


def chain(length: int, **more: Any) -> dict[str, Any]:
    """Return a chain of references, alone or inside `more`, as the value of its key "next"."""

    def link(reference: dict[str, str]) -> dict[str, Any]:
        return {**more, "properties": {"next": reference}, "required": ["next"]} if more else reference

    links = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "null"}}}


def nested(keyword: str, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for level in range(depth):
        schema = {keyword: [schema, {"type": "integer", "minimum": level}]}
    return schema


def doubled(depth: int) -> dict[str, Any]:
    """Return anyOf of the same thing twice, `depth` times: references keep it small, expanded it is 2**depth."""
    halves = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$ref": "#/$defs/d0", "$defs": {**halves, f"d{depth}": {"type": "object"}}}


def conditions(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"minimum": 3}
    for level in range(depth):
        schema = {"if": {"not": {"anyOf": [schema, {"const": level}]}}, "then": {"maximum": 9}}
    return schema


def contained(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"enum": ["x" * 1000]}
    for _ in range(depth):
        schema = {"type": "array", "contains": schema, "minContains": 60}
    return schema


def repeated(depth: int) -> dict[str, Any]:
    """Return the same dict twice in one, `depth` times: small in memory, endless as JSON."""
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"anyOf": [schema, schema]}
    return schema


def lark_chain(length: int, name: str = "r", item: str = "") -> str:
    rules = [f"start: {name}0", *(f"{name}{i}: {item}{name}{i + 1}" for i in range(length)), f'{name}{length}: "a"']
    return "\n".join(rules)


def bombs() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "(a|b)*a(a|b){30}", {"regex": "(a|b)*a(a|b){30}"}
    yield "(.|\\n)*a.{200}", {"regex": "(.|\\n)*a.{200}"}
    yield "repeats in repeats", {"regex": "((a{1,1000}){1,1000}){1,1000}"}
    yield "30,000 parentheses", {"regex": "(" * 30_000 + "a" + ")" * 30_000}
    yield "30,000 parentheses in a pattern", {"json": {"type": "string", "pattern": "(" * 30_000 + ")" * 30_000}}
    yield "60,000 alternatives", {"regex": "|".join(f"value {i}" for i in range(60_000))}
    yield "60,000 choices", {"choice": [f"value {i}" for i in range(60_000)]}
    yield "$ref chain 1,000", {"json": chain(1_000)}
    yield "$ref chain 1,000 of objects", {"json": chain(1_000, type="object")}
    yield "$ref chain 4,000 of objects", {"json": chain(4_000, type="object")}
    yield "$ref chain 16,000", {"json": chain(16_000)}
    yield "$ref circle of 9,000", {"json": {**chain(9_000), "$defs": chain(9_000)["$defs"] | {"a9000": {"$ref": "#"}}}}
    yield "anyOf doubled 25 times", {"json": doubled(25)}
    yield "oneOf nested 40 deep", {"json": nested("oneOf", 40)}
    yield "oneOf nested 300 deep", {"json": nested("oneOf", 300)}
    yield "anyOf nested 40 deep", {"json": nested("anyOf", 40)}
    yield "if nested 20 deep", {"json": conditions(20)}
    yield "one dict 2**40 times", {"json": repeated(40)}
    yield "oneOf of 20,000", {"json": {"oneOf": [{"minimum": i} for i in range(20_000)]}}
    yield "oneOf of 60", {"json": {"oneOf": [{"minimum": i} for i in range(60)]}}
    yield "contains in contains", {"json": contained(4)}
    yield "not a long enum", {"json": {"type": "string", "not": {"enum": [f"{i}" * 100 for i in range(900)]}}}
    yield "allOf of 12 anyOf", {"json": {"allOf": [nested("anyOf", 2) for _ in range(12)]}}
    yield "60,000-value enum", {"json": {"enum": [f"value {i}" for i in range(60_000)]}}
    yield "70,000-value enum", {"json": {"enum": list(range(70_000))}}
    yield "2,000 properties", {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(2_000)}}}
    yield "5,000 properties", {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(5_000)}}}
    yield "1,000,000 items", {"json": {"type": "array", "items": {"type": "null"}, "minItems": 10**6}}
    yield "string of 10**9", {"json": {"type": "string", "minLength": 10**9}}
    yield "multiples of 2 to 40", {"json": {"allOf": [{"type": "integer", "multipleOf": i} for i in range(2, 40)]}}
    yield "remote $ref", {"json": {"$ref": "https://json-schema.org/draft/2020-12/schema"}}
    yield "deep JSON", {"json": '{"items":' * 100_000 + "{}" + "}" * 100_000}
    yield "Lark chain 4,000", {"grammar": lark_chain(4_000)}
    yield "Lark chain 20,000", {"grammar": lark_chain(20_000)}
    yield "Lark terminals 4,000", {"grammar": lark_chain(4_000, "R", '"b" ')}
    yield "Lark parentheses", {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000}
    yield "Lark repeats", {"grammar": 'start: ("a" "b"){100000}'}
    yield "ambiguous", {"grammar": 'start: s\ns: s s | "a" | ""'}
    yield "unfinished strings", {"grammar": 'start: "' + '\\"' * 500_000}
    yield "blanks", {"grammar": "start" + " " * 1_000_000}
    yield "GBNF chain 20,000", {"grammar": lark_chain(20_000).replace(":", " ::=").replace("start", "root")}
    yield (
        "many triggers",
        {
            "structural_tag": json.dumps(
                {
                    "structures": [
                        {"begin": f"<f{i}>", "schema": {"type": "object"}, "end": "</f>"} for i in range(300)
                    ],
                    "triggers": [f"<f{i}" for i in range(300)],
                }
            )
        },
    )


def use(grammar: Grammar, seed: int) -> tuple[float, str | None]:
    """Walk a few tokens; return the worst time of one step and where the grammar gave up."""
    matcher, rng, worst = grammar.matcher(), random.Random(seed), 0.0
    bits_w = np.zeros(num_words(VOCAB_SIZE), np.int32)
    for _ in range(NUM_TOKENS):
        start = time.perf_counter()
        matcher.fill(bits_w)
        ids = np.flatnonzero(np.unpackbits(bits_w.view(np.uint8), bitorder="little"))
        ids = ids[ids != EOS]
        if matcher.error is None and ids.size:
            matcher.accept(int(ids[rng.randrange(ids.size)]))
        worst = max(worst, time.perf_counter() - start)
        if matcher.error is not None or not ids.size:
            break
    return worst, matcher.error


def refuse_network(*_: object) -> None:
    raise AssertionError("a grammar opened a socket")


def main() -> None:
    socket.socket.connect = refuse_network
    tokenizer = Tokenizer.of(PreTrainedTokenizerFast(tokenizer_file=sys.argv[1]))
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [EOS])
    compiler.check(StructuredOutputsParams(choice=["a"]))
    for name, fields in bombs():
        start = time.perf_counter()
        refusal, steps = None, [(0.0, None)]
        try:
            grammar = compiler.start(StructuredOutputsParams(**fields)).result()
            seconds = time.perf_counter() - start
            steps = [compiler.submit(partial(use, grammar, seed)).result() for seed in range(2)]
        except VLLMValidationError as error:
            refusal = str(error)
            seconds = time.perf_counter() - start
        worst, gave_up = max(steps, key=lambda step: step[0])
        line = {"name": name, "refusal": refusal, "seconds": seconds, "worst_step": worst, "gave_up": gave_up}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
