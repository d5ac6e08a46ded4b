"""Compare `LLM.decide` with the log-probabilities of whole texts, and its rows with Hugging Face's decisions.

    scripts/check.py decisions [--sets 1000] [--smollm2-sets 20] [--hf-python DIR/hf/bin/python]

Random questions, with options of several tokens that begin alike, orders and calibration, are asked of a tiny model and
of SmolLM2 in float32. Each option's log-probability must be within 1e-5 of the sum over its tokens, which
`prompt_logprobs` scores as a whole text, in each order, and so must its probability, calibrated or not. An answer must
be the same to the bit alone with an empty cache and beside other states.

With `--hf-python` the pipeline of `transformers serve` answers questions on SmolLM2: the shares of its labels after its
prompts must be ours within 1e-4. It asks for letters, at most 26, and `decide` for the options themselves, so that the
answers need not be equal; the record has both. vLLM's route takes no Llama. Writes benchmarks/results/decisions.json.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fetch_models import MODELS, default_dir, fetch
from lib.machine import describe_sources, versions
from lib.results import RESULTS, make_parser, save
from peers.worker import Worker

from jaxllm import LLM, SamplingParams
from jaxllm.decisions import Question, read_questions
from jaxllm.engine.decisions.prompts import NULL_STATE, Template, ask, orders
from jaxllm.inputs import TokensPrompt
from tests.e2e.tiny_engine import CASE
from tests.e2e.tiny_tokenizer import save_tokenizer
from tests.models.tiny import folder

MOST_DIFFERENCE, MOST_HF_DIFFERENCE = 1e-5, 1e-4
CONTEXT = 2048
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ["no", "not", "not sure", "nothing", "billing", "billing and refunds", "ship", "shipping", "déjà vu", "你好"]
STATES = ["My card was charged twice. ", "Nobody answers me! ", "Thank you. ", "Wo ist mein Paket? ", '{"a": 1} ']
LONG_QUESTIONS = 6


def main() -> int:
    """Compare, print and write; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--sets", type=int, default=1000, help="sets of questions of a tiny model; default: 1000")
    parser.add_argument("--smollm2-sets", type=int, default=20, help="sets of SmolLM2; default: 20")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hf-python", metavar="PATH", help="Python of scripts/peers.sh DIR hf")
    args = parser.parse_args()
    record = describe_sources() | {"versions": versions("jax"), "seed": args.seed}
    smollm2 = fetch(MODELS["smollm2"], default_dir())
    with tempfile.TemporaryDirectory(prefix="check-decisions-") as scratch:
        with start(folder(CASE), tokenizer=save_tokenizer(Path(scratch)), chat_template=TEMPLATE) as llm:
            record["tiny"] = compare(llm, args.sets, args.seed)
        with start(smollm2) as llm:
            record["smollm2"] = compare(llm, args.smollm2_sets, args.seed)
            if args.hf_python:
                with Worker("decisions_hf", args.hf_python, {"gguf": str(smollm2)}, Path(scratch)) as hf:
                    record["hf"] = beside(llm, hf, args.seed)
    print(json.dumps(record, indent=1))
    save(args.json or RESULTS / "decisions.json", record)
    parts = [record["tiny"], record["smollm2"]]
    worst = max(each["largest_difference"] for each in parts)
    is_good = worst <= MOST_DIFFERENCE and not any(each["other_bits"] for each in parts)
    return 0 if is_good and record.get("hf", {}).get("largest_difference", 0) <= MOST_HF_DIFFERENCE else 1


def start(model: Path, **settings: Any) -> LLM:
    """Start an engine in float32."""
    return LLM(
        str(model), dtype="float32", max_model_len=CONTEXT, block_size=16, max_num_batched_tokens=1024, max_num_seqs=64,
        cudagraph_capture_sizes=[8, 64], enforce_eager=True, hf_overrides={"max_position_embeddings": CONTEXT},
        **settings,
    )  # fmt: skip


def compare(llm: LLM, num_sets: int, seed: int) -> dict[str, Any]:
    """Return how far decisions are from whole texts, and how many differ beside other states."""
    differences, other_bits, num_options = [0.0], 0, 0
    for number in range(num_sets):
        chance = random.Random(f"{seed} {number}")
        state, asked, options = random_set(chance)
        llm.reset_prefix_cache()
        [alone] = llm.decide(state, asked, **options)
        together = llm.decide(["other " + state, state, state + "!"], asked, **options)
        other_bits += together[1].answers != alone.answers
        expected = dict(whole_texts(llm, state, asked, options))
        without = dict(whole_texts(llm, NULL_STATE, asked, options)) if options["calibrate"] else {}
        for name, answer in alone.answers.items():
            values = expected[name]
            num_options += len(values)
            differences += [abs(answer.logprobs[option] - value) for option, value in values.items()]
            weights = {option: math.exp(p - without.get(name, {}).get(option, 0.0)) for option, p in values.items()}
            shares = {option: each / sum(weights.values()) for option, each in weights.items()}
            differences += [abs(answer.probabilities[option] - share) for option, share in shares.items()]
        if number % 50 == 49:
            print(f"{number + 1} sets, largest difference {max(differences):.1e}, {other_bits} others", flush=True)
    return {"sets": num_sets, "options": num_options} | {
        "largest_difference": float(f"{max(differences):.3g}"),
        "other_bits": other_bits,
    }


def random_set(chance: random.Random) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return a state, questions about it, and options of `decide`."""
    asked: dict[str, Any] = {}
    for i in range(chance.randint(1, 3)):
        kind = chance.choice(["choice", "choice", "score", "noul"])
        names = chance.sample(WORDS, chance.randint(2, len(WORDS)))
        criteria: Any = {name: chance.choice([None, "what it says"]) for name in names}
        if kind == "score":
            criteria = [f"level {j}" for j in range(chance.choice([2, 3, 12]))]
        elif kind == "noul":
            criteria = chance.choice([None, {"true": "so it is"}])
        asked[f"q{i}"] = {"type": kind, "instructions": f"Which one fits best, {i}?", "criteria": criteria}
    options = {"num_orders": chance.choice([1, 1, 2, 3]), "calibrate": chance.random() < 0.25}
    options["instructions"] = chance.choice([None, "Be fair."])
    return "".join(chance.choices(STATES, k=chance.randint(1, 6))), asked, options


def whole_texts(
    llm: LLM, state: str, asked: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each question's options with the logarithm of their mean probability over the orders, each one scored as
    the end of a whole text.
    """
    front = llm.llm_engine.front
    tokenizer, end_id = front.require_tokenizer(), Template().end_id(front)
    for name, question in read_questions(asked).items():
        spelled = [tokenizer.encode(list(each.spellings), add_special_tokens=False) for each in question.options]
        flat = [tokens for option in spelled for tokens in option]
        is_ended = any(a is not b and b[: len(a)] == a for a in flat for b in flat)
        ending = [end_id] if is_ended and end_id is not None else []
        texts: list[tuple[list[int], list[int]]] = []
        for order in orders(question, options["num_orders"]):
            prompt = Template().render(front, ask(state, options["instructions"], question, order))
            before = front.inputs.encode(prompt).token_ids
            texts += [(list(before), [*tokens, *ending]) for tokens in flat]
        yield name, _means(question, spelled, iter(scores(llm, texts)), len(texts) // len(flat))


def _means(question: Question, spelled: Sequence[Any], values: Iterator[float], num_orders: int) -> dict[str, float]:
    totals = dict.fromkeys((option.name for option in question.options), 0.0)
    for _ in range(num_orders):
        for option, spellings in zip(question.options, spelled, strict=True):
            totals[option.name] += sum(math.exp(next(values)) for _ in spellings) / num_orders
    return {name: math.log(total) for name, total in totals.items()}


def scores(llm: LLM, texts: Sequence[tuple[list[int], list[int]]]) -> list[float]:
    """Return the log-probability of the second part of each text after the first."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    prompts = [TokensPrompt(prompt_token_ids=before + after) for before, after in texts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        math.fsum((position or {})[each].logprob for position, each in zip(positions, after, strict=True))
        for (before, after), output in zip(texts, outputs, strict=True)
        for positions in [list(output.prompt_logprobs or [])[len(before) :]]
    ]


def beside(llm: LLM, hf: Worker, seed: int) -> dict[str, Any]:
    """Return how far the probabilities of HF's labels are from ours after the same prompts, and both answers."""
    differences, answers, agree = [0.0], [], []
    for number in range(LONG_QUESTIONS):
        chance = random.Random(f"{seed} hf {number}")
        state = "".join(chance.choices(STATES, k=8))
        asked = {
            "team": {"type": "choice", "instructions": "Which team?", "criteria": dict.fromkeys(WORDS[4:8])},
            "tone": {"type": "score", "instructions": "How upset?", "criteria": ["calm", "cross", "furious"]},
            "urgent": {"type": "noul", "instructions": "Is it urgent?"},
        }
        said = hf.call("decide", state, asked).value
        [ours] = llm.decide(state, asked)
        for name, theirs in said.items():
            labels, answer = theirs["labels"], theirs["answer"]
            params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=labels)
            [output] = llm.generate(TokensPrompt(prompt_token_ids=theirs["prompt"]), params, use_tqdm=False)
            [row] = output.outputs[0].logprobs or []
            weights = [math.exp(row[each].logprob) for each in labels]
            shares = [each / sum(weights) for each in weights]
            expected = list(answer["probabilities"].values()) if "probabilities" in answer else [answer["noul"]]
            if "probabilities" not in answer:  # its first label is yes
                shares = shares[:1]
            differences += [abs(a - b) for a, b in zip(shares, expected, strict=True)]
            mine = ours.answers[name].probabilities
            if name == "team":
                agree.append(answer["choice"] == ours.answers[name].choice)
            answers.append({"question": name, "hf": _brief(expected), "jaxllm": _brief(mine.values())})
    return hf.call("versions").value | {
        "largest_difference": float(f"{max(differences):.3g}"),
        "same_choice": statistics.mean(agree),
        "answers": answers,
    }


def _brief(values: Iterable[float]) -> str:
    return ", ".join(f"{each:.3f}" for each in values)


if __name__ == "__main__":
    sys.exit(main())
