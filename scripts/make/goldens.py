"""Write the goldens of a real model: prompts, and HF Transformers' outputs in float32.

Needs an environment with torch, transformers and gguf (`scripts/peers.sh DIR hf`):

    DIR/hf/bin/python scripts/make.py goldens greedy MODEL.gguf tests/data/goldens/NAME.json
    DIR/hf/bin/python scripts/make.py goldens logprobs MODEL.gguf tests/data/goldens/NAME-logprobs.json

`greedy` writes greedy tokens with their log-probabilities; `logprobs` fewer tokens, but every prompt token's
log-probability and rank too. The prompts are cut from texts of Python's standard library and this repository, and are
in the file, so that the tests need neither torch nor the texts.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_TOKENS = 64
TOP = 5
LONG = (390, 420, 470, 530, 600, 700, 850, 1000, 1200, 1500)
SCORED = (3, 4, 5, 7, 9, 13, 17, 24, 33, 47, 64, 90, 128, 129, 200, 390)
NUM_SCORED_TOKENS = 16
NEAR = 1e-4
SHORT = (3, 4, 5, 7, 9, 13, 17, 24, 33, 47, 64, 90, 127, 128, 129, 200, 260)
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    [
        {"role": "user", "content": "Name three prime numbers."},
        {"role": "assistant", "content": "2, 3 and 5."},
        {"role": "user", "content": "And three more?"},
    ],
    [{"role": "user", "content": "Übersetze ins Englische: Der Fluß fließt über die Brücke. 🌊"}],
    [{"role": "user", "content": "Write a Python function that reverses a string."}],
)


def texts() -> list[str]:
    """Return long texts of several kinds: prose, code and other scripts."""
    licence = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    code = inspect.getsource(json.decoder)
    words = [
        "sea",
        "wind",
        "山",
        "river",
        "μικρός",
        "light",
        "дом",
        "stone",
        "été",
        "night",
        "川",
        "fire",
        "über",
        "moon",
    ]
    rng = random.Random(0)
    return [licence, code, " ".join(rng.choice(words) for _ in range(3000))]


def make_prompts(tokenizer: Any) -> list[str]:
    """Return prompts of given lengths in tokens, then the chats if the model has a template."""
    lengths = LONG + SHORT if tokenizer.chat_template else LONG + SHORT + (300, 75, 20, 11, 6)
    prompts = [tokenizer.decode(ids) for ids in cut_prompts(tokenizer, lengths, random.Random(1))]
    if tokenizer.chat_template:
        prompts += [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in CHATS]
    return prompts


def cut_prompts(tokenizer: Any, lengths: Sequence[int], rng: random.Random) -> list[list[int]]:
    """Return pieces of these lengths, the texts taking turns."""
    sources = [tokenizer(text, add_special_tokens=False).input_ids for text in texts()]
    prompts = []
    for index, length in enumerate(lengths):
        ids = sources[index % len(sources)]
        start = rng.randrange(max(1, len(ids) - length))
        prompts.append(ids[start : start + length])
    return prompts


@torch.inference_mode()
def continue_greedily(model: Any, prompt_ids: list[int], num_tokens: int) -> dict[str, Any]:
    """Return greedy tokens, and the TOP most likely ids at each step with their log-probabilities."""
    ids, cache = torch.tensor([prompt_ids]), None
    tokens, top_ids, top_logprobs = [], [], []
    for _ in range(num_tokens):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        values, best = torch.log_softmax(output.logits[0, -1].double(), dim=-1).topk(TOP)
        tokens.append(int(best[0]))
        top_ids.append(best.tolist())
        top_logprobs.append([round(value, 6) for value in values.tolist()])
        ids = best[:1][None]
    return {"token_ids": tokens, "top_ids": top_ids, "top_logprobs": top_logprobs}


@torch.inference_mode()
def score_prompt(model: Any, exact: Any, prompt_ids: list[int]) -> dict[str, Any]:
    """Return each prompt token's log-probability, ranks and the TOP most likely ids, from the second token on.

    There are two ranks: the best and the worst if log-probabilities move by NEAR. `prompt_errors` are the differences
    of HF's float32 from its float64, at the indices where they exceed NEAR.
    """
    ids, own_t1 = torch.tensor([prompt_ids]), torch.tensor(prompt_ids[1:])[:, None]
    logprobs_tv, exact_tv = (
        torch.log_softmax(each(input_ids=ids).logits[0, :-1].double(), dim=-1) for each in (model, exact)
    )
    top_tk = logprobs_tv.topk(TOP).indices
    shown_tk = torch.cat((own_t1, top_tk), dim=1)
    error_t = (logprobs_tv - exact_tv).gather(1, shown_tk).abs().max(dim=1).values
    error_t[error_t <= NEAR] = 0
    values_t1, near_t1 = logprobs_tv.gather(1, own_t1), NEAR + error_t[:, None]
    best_t = (logprobs_tv > values_t1 + near_t1).sum(dim=1) + 1
    worst_t = (logprobs_tv >= values_t1 - near_t1).sum(dim=1)
    return {
        "prompt_logprobs": rounded(values_t1[:, 0]),
        "prompt_ranks": torch.stack((best_t, worst_t), dim=1).tolist(),
        "prompt_top_ids": top_tk.tolist(),
        "prompt_top_logprobs": [rounded(values) for values in logprobs_tv.gather(1, top_tk)],
        "prompt_errors": {index: round(error, 6) for index, error in enumerate(error_t.tolist()) if error},
    }


def rounded(values: torch.Tensor) -> list[float]:
    """Return floats of six decimals."""
    return [round(value, 6) for value in values.tolist()]


def greedy_rows(model: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield a row of greedy tokens per prompt."""
    for index, prompt in enumerate(make_prompts(tokenizer)):
        # A chat template's text has its own beginning-of-sequence token.
        is_chat = index >= len(LONG) + len(SHORT) and tokenizer.chat_template is not None
        prompt_ids = tokenizer(prompt, add_special_tokens=not is_chat).input_ids
        continued = continue_greedily(model, prompt_ids, NUM_TOKENS)
        yield {"prompt": prompt, "is_chat": is_chat, "prompt_ids": prompt_ids} | continued


def logprob_rows(model: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield a row of scored prompt and greedy tokens per prompt."""
    exact = copy.deepcopy(model).double()
    for prompt_ids in cut_prompts(tokenizer, SCORED, random.Random(2)):
        continued = continue_greedily(model, prompt_ids, NUM_SCORED_TOKENS)
        yield {"prompt_ids": prompt_ids} | score_prompt(model, exact, prompt_ids) | continued


def load(path: Path) -> tuple[Any, Any]:
    """Return a GGUF's model in float32 and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model, tokenizer


def write(path: Path, model: str, **contents: Any) -> None:
    """Write a golden, with the versions that made it."""
    made_by = {"torch": torch.__version__, "transformers": transformers.__version__, "dtype": "float32"}
    golden = {"model": model, "made_by": made_by, **contents}
    path.write_text(json.dumps(golden, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("greedy", "logprobs"))
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    rows = []
    for row in (greedy_rows if args.kind == "greedy" else logprob_rows)(model, tokenizer):
        rows.append(row)
        print(f"{len(rows)}: {len(row['prompt_ids'])} tokens", flush=True)
    write(args.output, args.model.name, rows=rows)


if __name__ == "__main__":
    main()
