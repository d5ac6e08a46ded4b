"""Write the goldens of a real model: prompts, and HF Transformers' float32 greedy tokens and log-probabilities.

Runs in an environment of its own that has torch, transformers and gguf (`scripts/peers.sh DIR hf`):

    DIR/hf/bin/python scripts/make_goldens.py MODEL.gguf tests/data/goldens/NAME.json

The prompts are cut from texts that every Python installation and this repository have; the file carries them, so that
the tests need neither torch nor the texts.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_TOKENS = 64
TOP = 5
LONG = (390, 420, 470, 530, 600, 700, 850, 1000, 1200, 1500)
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
    licence = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")
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
    """Return prompts of the wanted lengths in tokens, then the chats where the model has a template."""
    sources = [tokenizer(text, add_special_tokens=False).input_ids for text in texts()]
    rng = random.Random(1)
    lengths = LONG + SHORT if tokenizer.chat_template else LONG + SHORT + (300, 75, 20, 11, 6)
    prompts = []
    for index, length in enumerate(lengths):
        ids = sources[index % len(sources)]
        start = rng.randrange(max(1, len(ids) - length))
        prompts.append(tokenizer.decode(ids[start : start + length]))
    if tokenizer.chat_template:
        prompts += [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in CHATS]
    return prompts


@torch.inference_mode()
def continue_greedily(model: Any, prompt_ids: list[int]) -> dict[str, Any]:
    """Return NUM_TOKENS greedy tokens, and the TOP most likely ids at each step with their log-probabilities."""
    ids, cache = torch.tensor([prompt_ids]), None
    tokens, top_ids, top_logprobs = [], [], []
    for _ in range(NUM_TOKENS):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        values, best = torch.log_softmax(output.logits[0, -1].double(), dim=-1).topk(TOP)
        tokens.append(int(best[0]))
        top_ids.append(best.tolist())
        top_logprobs.append([round(value, 6) for value in values.tolist()])
        ids = best[:1][None]
    return {"token_ids": tokens, "top_ids": top_ids, "top_logprobs": top_logprobs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model.parent, gguf_file=args.model.name)
    model = AutoModelForCausalLM.from_pretrained(args.model.parent, gguf_file=args.model.name, dtype=torch.float32)
    rows = []
    for index, prompt in enumerate(make_prompts(tokenizer)):
        # A chat template's text has its own beginning-of-sequence token.
        is_chat = index >= len(LONG) + len(SHORT) and tokenizer.chat_template is not None
        prompt_ids = tokenizer(prompt, add_special_tokens=not is_chat).input_ids
        rows.append(
            {"prompt": prompt, "is_chat": is_chat, "prompt_ids": prompt_ids} | continue_greedily(model, prompt_ids)
        )
        print(f"{index + 1}: {len(prompt_ids)} tokens", flush=True)
    made_by = {"torch": torch.__version__, "transformers": transformers.__version__, "dtype": "float32"}
    golden = {"model": args.model.name, "made_by": made_by, "rows": rows}
    args.output.write_text(json.dumps(golden, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
