"""Check that drafts change no token, over random requests: all sampling fields, grammars, preemption, random batches.

    scripts/check.py speculation [--requests 2000] [--methods ngram suffix draft_model mtp eagle3]

Each request is run by an engine without drafts, and by one for each method, beside others and with so few KV blocks
that they preempt each other. Tokens, texts, log-probabilities and ends must be the same to the bit. The models are tiny
with random weights; their outputs repeat themselves enough for drafts to be both right and wrong. One model is also its
own draft model, which would never pay off, so guesses of models count as free. Guesses of draft heads with random
weights, and of another model, would hardly ever be right: most of them are replaced by the tokens that follow.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.sampling_params import StructuredOutputsParams
from tests.e2e.guessing import Guesses
from tests.e2e.inside import scheduler_of
from tests.e2e.tiny_tokenizer import save_tokenizer

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
MODEL = DATA / "tiny" / "llama3_tied"
CONTEXT = 256
TABLE: dict[str, list[Any]] = {
    "temperature": [0.0, 0.0, 0.3, 1.0, 2.0],
    "top_k": [0, 0, 3, 40],
    "top_p": [1.0, 1.0, 0.7],
    "min_p": [0.0, 0.0, 0.1],
    "presence_penalty": [0.0, 0.0, 0.8, -0.5],
    "frequency_penalty": [0.0, 0.0, 0.5],
    "repetition_penalty": [1.0, 1.0, 1.2],
    "logit_bias": [None, None, {30: 3.0, 40: -5.0}],
    "bad_words": [None, None, ["a", "th", "e1"]],
    "allowed_token_ids": [None, None, None, list(range(20, 120))],
    "stop_token_ids": [None, None, [33, 34, 35]],
    "stop": [None, None, ["b", "12"]],
    "min_tokens": [0, 0, 5],
    "logprobs": [None, 2, 5],
    "prompt_logprobs": [None, None, None, 1],
    "ignore_eos": [True, False],
    "n": [1, 1, 1, 2],
}
"""The values that each field of a request takes, most of them several times so that most requests use a few."""


class Method(NamedTuple):
    """A method of speculation, and the model that it speeds up."""

    config: dict[str, Any]
    model: Path = MODEL
    replaced: bool = False
    """True if most guesses are replaced by right ones."""


HYBRID = DATA / "tiny" / "qwen3_next"
"""A model with recurrent state, which a wrong draft would spoil."""
METHODS = {
    "ngram": Method({"method": "ngram"}),
    "suffix": Method({"method": "suffix"}),
    "draft_model": Method({"method": "draft_model", "model": str(MODEL)}),
    "mtp": Method({"method": "mtp"}, DATA / "heads" / "mtp_deepseek_v3", True),
    "eagle3": Method({"method": "eagle3", "model": str(DATA / "heads" / "eagle3")}, DATA / "tiny" / "llama2", True),
    "hybrid": Method({"method": "ngram"}, HYBRID),
    "hybrid_suffix": Method({"method": "suffix"}, HYBRID),
    "hybrid_mtp": Method({"method": "mtp"}, DATA / "heads" / "mtp_qwen3_5", True),
    "hybrid_draft_model": Method({"method": "draft_model", "model": str(MODEL)}, HYBRID, True),
}
type Request = tuple[list[int], SamplingParams]
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "([a-f0-9]{2}-){1,12}z"},
    {"choice": ["yes yes yes", "no no no", "yes no"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
              "required": ["a", "b"]}},
    {"grammar": 'root ::= ("ab" | "cd")+ "."'},
]  # fmt: skip


def main() -> int:
    """Run the requests; returns the exit status, 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    requests = [make_request(random.Random(f"{args.seed} {number}")) for number in range(args.requests)]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = save_tokenizer(Path(folder))
        num_different, references = 0, dict[Path, list[Any]]()
        for method in args.methods:
            model = METHODS[method].model
            if model not in references:
                references[model], _ = run(requests, tokenizer, args.seed, model)
            expected = references[model]
            answers = answers_of(requests, expected) if METHODS[method].replaced else {}
            outputs, counts = run(requests, tokenizer, args.seed + 1, model, METHODS[method].config, answers)
            different = [
                number for number, pair in enumerate(zip(expected, outputs, strict=True)) if pair[0] != pair[1]
            ]
            for number in different[:5]:
                print(f"{method}: request {number} differs: {requests[number]}\n{expected[number]}\n{outputs[number]}")
            num_different += len(different)
            print(f"{method}: {len(different)} of {len(requests)} differ; {counts}", flush=True)
    return int(num_different > 0)


def make_request(rng: random.Random) -> Request:
    """Return a prompt that repeats itself, and settings that use a few fields."""
    words = [rng.randrange(7, 256) for _ in range(rng.randrange(2, 10))]
    prompt = (words * 20)[: rng.randrange(3, 80)]
    fields = {name: value for name, values in TABLE.items() if (value := rng.choice(values)) is not None}
    if rng.random() < 0.3:
        fields["structured_outputs"] = StructuredOutputsParams(**rng.choice(GRAMMARS))
        fields.pop("allowed_token_ids", None)  # which could leave nothing
        fields.pop("bad_words", None)
    max_tokens = rng.randrange(6, 60)
    return prompt, SamplingParams(**fields, max_tokens=max_tokens, seed=rng.randrange(2**32))


def run(
    requests: Sequence[Request],
    tokenizer: str,
    seed: int,
    model: Path,
    drafts: dict[str, Any] | None = None,
    answers: Mapping[tuple[int, ...], list[list[int]]] = MappingProxyType({}),
) -> tuple[list[Any], dict[str, int]]:
    """Run all requests in random batches; return their exact outputs, and counts of drafts.

    Guesses of a model count as free; with `answers` to prompts, most guesses are made right.
    """
    rng, results, position = random.Random(seed), {}, 0
    order = list(range(len(requests)))
    rng.shuffle(order)
    settings: dict[str, Any] = {"max_model_len": CONTEXT, "max_num_seqs": 32, "block_size": 16, "max_logprobs": 5}
    settings |= {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 128, "disable_log_stats": True}
    with LLM(str(model), tokenizer=tokenizer, speculative_config=drafts, **settings) as llm:
        if answers:
            Guesses(scheduler_of(llm)).answers.update(answers)
        elif drafts is not None and "model" in drafts:
            speculation = scheduler_of(llm)._speculation
            assert speculation is not None
            speculation._cost = lambda num_rows: 0.0  # noqa: ARG005
        while position < len(order):
            some = order[position : position + rng.choice([1, 3, 8, 30])]
            position += len(some)
            prompts: Any = [{"prompt_token_ids": requests[number][0]} for number in some]
            outputs = llm.generate(prompts, [requests[number][1] for number in some], use_tqdm=False)
            results |= {number: exact(output) for number, output in zip(some, outputs, strict=True)}
        counted = {each.name.removeprefix("vllm:"): getattr(each, "value", None) for each in llm.get_metrics()}
    names = ("num_preemptions", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    return [results[number] for number in range(len(requests))], {name: counted.get(name) or 0 for name in names}


def answers_of(requests: Sequence[Request], expected: Sequence[Any]) -> dict[tuple[int, ...], list[list[int]]]:
    """Return the outputs of each prompt."""
    pairs = zip(requests, expected, strict=True)
    return {tuple(prompt): [token_ids for token_ids, *_ in outputs] for (prompt, _), (outputs, _) in pairs}


def exact(output: RequestOutput) -> Any:
    """Return a request's outputs, log-probabilities to the bit."""

    def shown(positions: Any) -> Any:
        return [each and [(token, entry.logprob.hex(), entry.rank) for token, entry in each.items()]
                for each in positions or ()]  # fmt: skip

    outputs = [
        (list(each.token_ids), each.text, each.finish_reason, each.stop_reason, shown(each.logprobs))
        for each in output.outputs
    ]
    return outputs, shown(output.prompt_logprobs)


if __name__ == "__main__":
    sys.exit(main())
