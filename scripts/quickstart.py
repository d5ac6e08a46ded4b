"""Run one chat prompt and a small batch, through jaxllm's public API only; quickstart.sh starts this."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from jaxllm import LLM, SamplingParams

QUESTION = "What is the capital of France? Answer in one sentence."
PROMPTS = [
    "The three primary colours are",
    "Water boils at",
    "def fibonacci(n):",
    "The opposite of hot is",
    "Once upon a time",
    "A haiku has three lines of",
    "The largest planet in the solar system is",
    "To make a cup of tea, first",
]


def main(model: str) -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("jaxllm").setLevel(logging.INFO)  # the engine says what runs where
    print(f"model: {Path(model).name}", flush=True)
    start = time.perf_counter()
    # Eager: these few prompts need two of the programs that a long run would have compiled ahead.
    llm = LLM(model=model, enforce_eager=True)
    print(f"ready in {time.perf_counter() - start:.1f} s; a first run compiles, later ones load what it compiled")

    [answer] = llm.chat(
        [{"role": "user", "content": QUESTION}], SamplingParams(temperature=0, max_tokens=64), use_tqdm=False
    )
    print(f"\n> {QUESTION}\n{answer.outputs[0].text.strip()}\n")

    start = time.perf_counter()
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    seconds = time.perf_counter() - start
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    speed = f"{num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.0f} tokens/s"
    print(f"\n{len(PROMPTS)} prompts at once: {speed}")


if __name__ == "__main__":
    main(sys.argv[1])
