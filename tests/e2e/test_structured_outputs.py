"""Structured outputs of a real model are valid at temperature 1, in full batches, with chunks and preemptions."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest

from jaxllm import LLM, CompletionOutput, RequestOutput, SamplingParams
from jaxllm.constraints.compiler import GrammarCompiler
from jaxllm.constraints.matcher import Grammar
from jaxllm.exceptions import VLLMValidationError
from jaxllm.sampling_params import StructuredOutputsParams
from tests.constraints.grammar_walks import make_compiler
from tests.constraints.schema_corpus import FOLDER, Case, corpus
from tests.e2e.inside import scheduler_of

pytestmark = pytest.mark.engine

NUM_SEQS = 64
CHUNK = 16
"""The number of prompt tokens that fit in one step; every prompt has more."""
BLOCK_SIZE = 16
NUM_BLOCKS = 2 * NUM_SEQS
"""Enough blocks for prompts, but too few for outputs, even short ones."""
MAX_TOKENS = 180

PATTERNS = (
    r"[a-z]{2,8}",
    r"\d{3}-\d{4}",
    r"(Mr|Ms)\. [A-Z][a-z]{1,8}",
    r"#[0-9a-f]{6}",
    r"(yes|no|maybe)(, (yes|no|maybe)){0,2}",
    r"[01]{8}",
    r"v\d{1,2}\.\d{1,2}\.\d{1,2}",
    r'"[^"\\\n]{0,12}"',
)
CHOICES = (
    ("positive", "negative", "neutral"),
    ("A", "AB", "ABC", "B"),
    ("a longer sentence, with a comma", "a longer word"),
    ("日本", "Ελλάδα", "🙂"),
    ('say "hi"', "back\\slash", "tab\t"),
    (" leading space", "trailing space "),
    ("0", "1", "10", "100"),
    ("one",),
)


@pytest.fixture(scope="module")
def llm(smollm2_path: str) -> Iterator[LLM]:
    with LLM(
        smollm2_path,
        max_model_len=256,
        max_num_seqs=NUM_SEQS,
        max_num_batched_tokens=4 * NUM_SEQS,
        cudagraph_capture_sizes=[8, NUM_SEQS],
        long_prefill_token_threshold=CHUNK,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=NUM_BLOCKS,
        disable_log_stats=True,
        enforce_eager=True,
    ) as llm:
        yield llm


def prompt(number: int, what: str) -> str:
    """Return a request's prompt, which takes more than one chunk."""
    return f"Question {number}. Reply with a short {what} and nothing else.\nAnswer: "


def sampled(constraint: StructuredOutputsParams, seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=MAX_TOKENS, structured_outputs=constraint, **more)


def generate(llm: LLM, what: Sequence[str], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    """Run all requests at once."""
    prompts = [prompt(number, text) for number, text in enumerate(what)]
    return llm.generate(prompts, list(params), use_tqdm=False)


def refusal(compiler: GrammarCompiler, case: Case) -> str | None:
    """Return why a schema is refused, or None."""
    try:
        compiler.check(StructuredOutputsParams(json=case.schema))
    except VLLMValidationError as error:
        return str(error) if error.parameter == "json" else f"about {error.parameter}: {error}"
    return None


class Run(NamedTuple):
    """The outcome of one call of all kinds, shuffled."""

    json: list[tuple[Case, CompletionOutput]]
    regex: list[tuple[str, CompletionOutput]]
    choice: list[tuple[Sequence[str], CompletionOutput]]
    refused: dict[str, str]


@pytest.fixture(scope="module")
def run(llm: LLM, smollm2_path: str) -> Run:
    """Run the corpus, and patterns and choices among it."""
    compiler = make_compiler(smollm2_path)
    reasons = {case.name: refusal(compiler, case) for case in corpus()}
    jobs: list[tuple[str, Any, StructuredOutputsParams]] = [
        ("json", case, StructuredOutputsParams(json=case.schema)) for case in corpus() if reasons[case.name] is None
    ]
    for index in range(NUM_SEQS):
        pattern, texts = PATTERNS[index % len(PATTERNS)], CHOICES[index % len(CHOICES)]
        jobs.append(("regex", pattern, StructuredOutputsParams(regex=pattern)))
        jobs.append(("choice", texts, StructuredOutputsParams(choice=list(texts))))
    random.Random(0).shuffle(jobs)
    params = [sampled(constraint, seed) for seed, (_, _, constraint) in enumerate(jobs)]
    result = Run([], [], [], {name: reason for name, reason in reasons.items() if reason is not None})
    for (kind, subject, _), request in zip(jobs, generate(llm, [kind for kind, _, _ in jobs], params), strict=True):
        getattr(result, kind).append((subject, request.outputs[0]))
    assert scheduler_of(llm).stats().num_preemptions > 0
    return result


def test_json_schemas(run: Run) -> None:
    num_schemas = len(run.json) + len(run.refused)
    cut_off = [case.name for case, out in run.json if out.finish_reason == "length"]
    wrong = {
        case.name: (out.finish_reason, out.text)
        for case, out in run.json
        if out.finish_reason != "length" and (out.finish_reason != "stop" or not case.is_valid(out.text))
    }
    print(f"\n{len(run.json)} of {num_schemas} schemas taken, {len(cut_off)} outputs cut off: {cut_off}")
    assert wrong == {}
    assert run.refused == json.loads((FOLDER / "refused.json").read_text())
    assert num_schemas == 250
    assert len(run.refused) <= 0.15 * num_schemas
    assert len(cut_off) <= 0.05 * len(run.json)


def test_regex_and_choice(run: Run) -> None:
    assert {out.finish_reason for _, out in [*run.regex, *run.choice]} == {"stop"}
    assert all(re.fullmatch(pattern, out.text) for pattern, out in run.regex)
    assert all(out.text in texts for texts, out in run.choice)


def test_beside_other_parameters(llm: LLM) -> None:
    """n > 1, penalties, min_tokens, bad words, stop strings and truncation keep the output within its grammar."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 10},
            "ages": {"type": "array", "items": {"enum": [1, 22, 333]}, "maxItems": 3},
        },
        "required": ["name", "ages"],
        "additionalProperties": False,
    }
    case = Case("beside others", schema)
    beside: list[dict[str, Any]] = [
        {"n": 4},
        {"presence_penalty": 1.5, "frequency_penalty": 1.5, "repetition_penalty": 1.2},
        {"min_tokens": 40},  # yields where the grammar is complete
        {"bad_words": ["a", "e"]},
        {"top_p": 0.9, "top_k": 50, "min_p": 0.01, "logprobs": 3},
        {"logit_bias": {2: 50.0}},  # EOS wanted, but not allowed before the end
        {"ignore_eos": True},
        {"stop": ["]"], "include_stop_str_in_output": True},
    ]
    params = [sampled(StructuredOutputsParams(json=schema), seed, **more) for seed, more in enumerate(beside * 8)]
    outputs = generate(llm, ["JSON object"] * len(params), params)
    num_cut = 0
    for index, request in enumerate(outputs):
        for out in request.outputs:
            more = beside[index % len(beside)]
            if out.finish_reason == "length":
                num_cut += 1
                continue
            assert out.finish_reason == "stop", (more, out)
            text = out.text + "}" if "stop" in more else out.text
            assert case.is_valid(text), (more, out)
    assert num_cut <= 0.05 * sum(len(request.outputs) for request in outputs)


def test_json_object_and_grammars(llm: LLM) -> None:
    gbnf = 'root ::= "[" item ("," item)* "]"\nitem ::= [0-9]{1,3} | root'
    lark = 'start: WORD ("-" WORD)~1..2\nWORD: /[a-z]{1,6}/'
    tag = {
        "type": "triggered_tags",
        "triggers": ["<n>"],
        "tags": [{"begin": "<n>", "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}}, "end": "</n>"}],
        "at_least_one": True,
        "stop_after_first": True,
    }
    kinds = [
        (StructuredOutputsParams(json_object=True), lambda text: isinstance(json.loads(text), dict)),
        (StructuredOutputsParams(grammar=gbnf), lambda text: isinstance(json.loads(text), list) or "[0" in text),
        (StructuredOutputsParams(grammar=lark), re.compile("[a-z]{1,6}(-[a-z]{1,6}){1,2}").fullmatch),
        (StructuredOutputsParams(structural_tag=json.dumps({"format": tag})), re.compile("<n>[12]</n>").fullmatch),
    ]
    params = [sampled(kinds[index % len(kinds)][0], index) for index in range(NUM_SEQS)]
    outputs = [request.outputs[0] for request in generate(llm, ["text"] * NUM_SEQS, params)]
    ended = [(index, out.text) for index, out in enumerate(outputs) if out.finish_reason == "stop"]
    assert len(ended) > NUM_SEQS // 2  # free JSON has no bound
    assert {index % len(kinds) for index, _ in ended} >= {2, 3}
    assert all(kinds[index % len(kinds)][1](text) for index, text in ended), ended


def test_a_refused_schema_stops_nobody(llm: LLM) -> None:
    bad = sampled(StructuredOutputsParams(json={"type": "array", "uniqueItems": True}), 0)
    good = sampled(StructuredOutputsParams(choice=["a", "b"]), 0)
    with pytest.raises(VLLMValidationError, match="uniqueItems"):
        llm.generate(["x", "y"], [good, bad], use_tqdm=False)
    assert llm.generate("x", good, use_tqdm=False)[0].outputs[0].text in ("a", "b")


def test_a_grammar_that_compiles_slowly_keeps_nobody_waiting(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, proceed = threading.Event(), threading.Event()
    compile_now, submit_now = GrammarCompiler._compile, GrammarCompiler._submit

    def compile_late(self: GrammarCompiler, *args: Any) -> Any:
        compiling.set()
        assert proceed.wait(300)
        return compile_now(self, *args)

    def submit_patiently(self: GrammarCompiler, params: StructuredOutputsParams) -> Future[Grammar]:
        monkeypatch.setattr(self, "_deadline_seconds", 600.0)  # meanwhile a step's program may have to be compiled
        return submit_now(self, params)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_late)
    monkeypatch.setattr(GrammarCompiler, "_submit", submit_patiently)
    engine = llm.llm_engine
    engine.add_request("plain", "One, two,", SamplingParams(temperature=0, max_tokens=5))
    engine.add_request("good", "A digit:", sampled(StructuredOutputsParams(regex="[0-9]{3}"), 0))
    engine.add_request("bad", "A list:", sampled(StructuredOutputsParams(json={"uniqueItems": True}), 0))
    finished: dict[str, RequestOutput] = {}

    def run_until(name: str) -> None:
        while name not in finished:
            finished.update({output.request_id: output for output in engine.step() if output.finished})

    run_until("plain")
    assert compiling.is_set()
    assert set(finished) == {"plain"}
    proceed.set()
    run_until("good")
    run_until("bad")
    assert re.fullmatch("[0-9]{3}", finished["good"].outputs[0].text)
    out = finished["bad"].outputs[0]
    assert out.finish_reason == "error"
    assert "uniqueItems" in str(out.stop_reason)
