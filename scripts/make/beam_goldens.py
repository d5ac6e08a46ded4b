"""Write the goldens of beam search: HF Transformers' results on a real model, and on random ones without a network.

Needs an environment with torch, transformers and gguf (`scripts/peers.sh DIR hf`):

    DIR/hf/bin/python scripts/make.py beam_goldens MODEL.gguf tests/data/goldens/NAME-beams.json

`searches` are of the model, in float32. `cases` are of models whose log-probabilities are random numbers seeded with
the tokens so far: many, small, free of ties and without an end of sequence. Where sequences end, our ranking is vLLM's,
which is not HF's: it divides by the length of the whole sequence, and considers every end among the candidates.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from make.goldens import CHATS, cut_prompts, load, rounded, write

LENGTHS = (3, 24, 90)
NUM_TOKENS = 20
SEARCHES = ((2, 1.0), (4, 0.0), (4, 2.0), (8, 1.0))
"""Pairs of width and length penalty that are searched with."""
NUM_CASES = 240
VOCAB_SIZE = 14


def random_logits(case: int, token_ids: list[int]) -> list[float]:
    """Return one logit per id of the vocabulary."""
    numbers = random.Random(f"{case}/{token_ids}")
    return [5 * numbers.random() for _ in range(VOCAB_SIZE)]


class RandomModel(PreTrainedModel, GenerationMixin):
    """A model whose logits are `random_logits`."""

    config_class = PreTrainedConfig

    def __init__(self, case: int) -> None:
        super().__init__(PreTrainedConfig(vocab_size=VOCAB_SIZE))
        self.case = case
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        rows = [random_logits(self.case, ids) for ids in input_ids.tolist()]
        return CausalLMOutput(logits=torch.tensor(rows)[:, None])


def search(
    model: Any, prompt_ids: list[int], width: int, max_tokens: int, penalty: float, ends: list[int]
) -> dict[str, Any]:
    """Return all beams that HF returns, best first, without their padding, and their scores."""
    output = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=max_tokens,
        length_penalty=penalty,
        early_stopping=False,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else VOCAB_SIZE,
        output_scores=True,
        return_dict_in_generate=True,
        use_cache=not isinstance(model, RandomModel),
    )
    beams = [cut_at_end(ids[len(prompt_ids) :], ends) for ids in output.sequences.tolist()]
    return {"beams": beams, "scores": rounded(output.sequences_scores)}


def cut_at_end(token_ids: list[int], ends: list[int]) -> list[int]:
    """Return the tokens up to and including the first end of sequence."""
    places = [place for place, token_id in enumerate(token_ids) if token_id in ends]
    return token_ids[: places[0] + 1] if places else token_ids


def make_cases() -> Iterator[dict[str, Any]]:
    """Yield searches of random models."""
    rng = random.Random(3)
    for case in range(NUM_CASES):
        ends = rng.sample(range(VOCAB_SIZE), rng.choice((0, 1, 1, 2)))
        width, max_tokens = rng.randint(2, 4), rng.randint(1, 9)
        penalty = rng.choice((-1.0, 0.0, 0.5, 1.0, 2.0))
        settings = {"case": case, "width": width, "max_tokens": max_tokens, "length_penalty": penalty}
        if not ends:  # where sequences end, the rankings differ
            yield settings | search(RandomModel(case), [0], width, max_tokens, penalty, [])


def make_searches(model: Any, prompts: list[list[int]], ends: list[int]) -> Iterator[dict[str, Any]]:
    """Yield searches of the real model."""
    for width, penalty in SEARCHES:
        searches = [search(model, prompt_ids, width, NUM_TOKENS, penalty, ends) for prompt_ids in prompts]
        yield {"width": width, "length_penalty": penalty, "max_tokens": NUM_TOKENS, "found": searches}
        print(f"width {width}, length penalty {penalty}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    cases = list(make_cases())
    model, tokenizer = load(args.model)
    chats = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in CHATS]
    prompts = [tokenizer(text, add_special_tokens=False).input_ids for text in chats[1:2]]
    prompts += cut_prompts(tokenizer, LENGTHS, random.Random(4))
    searches = list(make_searches(model, prompts, [tokenizer.eos_token_id]))
    write(args.output, args.model.name, prompts=prompts, searches=searches, cases=cases)


if __name__ == "__main__":
    main()
