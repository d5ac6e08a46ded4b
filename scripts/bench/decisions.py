"""Measure questions about a state, asked by `LLM.decide` and by ordinary completions.

    scripts/bench.py decisions [--model MODEL] [--rounds 5] [--state-tokens 1000]

Eight questions of five options are asked about a state of 1,000 tokens, a new one each time. In turns:

    decide    one call of `LLM.decide`
    answers   eight completions at once, whose texts name an option at best, without any probability: greedy, 16 tokens
              at most, with the prefix cache
    chosen    the same with a grammar of the options, so that each text is one
    uncached  as answers, without the prefix cache
    scored    forty completions at once, each with an option at its end: their `prompt_logprobs`, which `echo` of a
              server returns too, give the same probabilities as `decide`

Writes benchmarks/results/decisions_speed.json with the seconds for a state, and how many times sooner `decide` is.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from fetch_models import MODELS, default_dir, fetch
from lib.machine import describe_sources, versions
from lib.results import make_parser, save

from jaxllm import LLM, SamplingParams
from jaxllm.decisions import read_questions
from jaxllm.engine.decisions.prompts import Template, ask
from jaxllm.inputs import TokensPrompt
from jaxllm.sampling_params import StructuredOutputsParams

NUM_QUESTIONS, MAX_TOKENS = 8, 16
OPTIONS = ("billing", "shipping", "account access", "a broken product", "praise")
WORDS = ("the", "card", "order", "was", "charged", "twice", "late", "box", "letter", "reply", "never", "here", "again")


def main() -> int:
    """Measure, print and write."""
    parser = make_parser(__doc__, "decisions_speed.json")
    parser.add_argument("--model", type=Path, help=".gguf or folder (default: SmolLM2-135M, fetched)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--state-tokens", type=int, default=1000)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    model = args.model or fetch(MODELS["smollm2"], default_dir())
    record = describe_sources() | {"versions": versions("jax"), "model": model.name, "dtype": args.dtype}
    with LLM(str(model), dtype=args.dtype, max_model_len=2048, max_num_batched_tokens=1024, max_num_seqs=64) as llm:
        llm.llm_engine.warm_up()
        record |= measure(llm, args.rounds, args.state_tokens)
    print(json.dumps(record, indent=1))
    save(args.json, record)
    return 0


def measure(llm: LLM, rounds: int, state_tokens: int) -> dict[str, Any]:
    """Return the medians of all ways of asking, which take turns; the first round is not counted."""
    ways: Mapping[str, Callable[[LLM, str], Any]] = {
        "decide": decide,
        "answers": answers,
        "chosen": chosen,
        "uncached": uncached,
        "scored": scored,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            state = make_state(llm, f"{number} {name}", state_tokens)
            start = perf_counter()
            way(llm, state)
            taken = perf_counter() - start
            if number:
                seconds[name].append(taken)
            print(f"round {number}, {name}: {taken:.3f} s", flush=True)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "state_tokens": state_tokens,
        "rounds": rounds,
        "seconds": {name: [round(each, 4) for each in values] for name, values in seconds.items()},
        "times_sooner_than": {
            name: round(each / medians["decide"], 2) for name, each in medians.items() if name != "decide"
        },
    }


def make_state(llm: LLM, seed: str, num_tokens: int) -> str:
    """Return a text of about `num_tokens` tokens that no other seed has."""
    chance, tokenizer = random.Random(seed), llm.llm_engine.front.require_tokenizer()
    text = " ".join(chance.choices(WORDS, k=2 * num_tokens))
    [ids] = tokenizer.encode([text], add_special_tokens=False)
    return tokenizer.decode(ids[:num_tokens], skip_special_tokens=False)


def questions() -> dict[str, Any]:
    """Return the questions, in the form of `decide`."""
    return {
        f"q{i}": {"type": "choice", "instructions": f"What is part {i} about?", "criteria": dict.fromkeys(OPTIONS)}
        for i in range(NUM_QUESTIONS)
    }


def prompts(llm: LLM, state: str) -> list[Any]:
    """Return the prompts of `decide`, one per question."""
    front, order = llm.llm_engine.front, range(len(OPTIONS))
    asked = read_questions(questions()).values()
    return [Template().render(front, ask(state, None, question, order)) for question in asked]


def decide(llm: LLM, state: str) -> Any:
    """Ask with `decide`."""
    return llm.decide(state, questions())


def answers(llm: LLM, state: str) -> Any:
    """Ask with completions of any text."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    return llm.generate(prompts(llm, state), params, use_tqdm=False)


def chosen(llm: LLM, state: str) -> Any:
    """Ask with completions that are one of the options."""
    grammar = StructuredOutputsParams(choice=list(OPTIONS))
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, structured_outputs=grammar)
    return llm.generate(prompts(llm, state), params, use_tqdm=False)


def uncached(llm: LLM, state: str) -> Any:
    """Ask with completions of any text that share nothing."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, skip_reading_prefix_cache=True)
    return llm.generate(prompts(llm, state), params, use_tqdm=False)


def scored(llm: LLM, state: str) -> Any:
    """Ask for the log-probabilities of each option as the end of a prompt."""
    front = llm.llm_engine.front
    ends: Sequence[list[int]] = front.require_tokenizer().encode(list(OPTIONS), add_special_tokens=False)
    before = [front.inputs.encode(prompt).token_ids for prompt in prompts(llm, state)]
    texts = [TokensPrompt(prompt_token_ids=[*ids, *end]) for ids in before for end in ends]
    return llm.generate(texts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0), use_tqdm=False)


if __name__ == "__main__":
    sys.exit(main())
