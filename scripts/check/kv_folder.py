"""Kill engines while they write blocks to `kv_cache_folder`, change files, and compare what the next ones answer.

In each round an engine with a tiny model starts on the folder that the last one has left, answers the same prompts, and
then others, which evict those, until it is killed with SIGKILL at a random time. Then some files are changed, cut,
lengthened or exchanged. All answers must have the tokens and log-probabilities, to the bit, of an engine that has no
folder. The record says how many of the prompts' tokens came from files. Writes benchmarks/results/kv_folder.json.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lib.machine import ROOT, describe_sources
from lib.results import RESULTS, make_parser, save

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.inputs import TokensPrompt
from tests.execution.test_block_folder import files_in, mutate

MODEL = ROOT / "tests" / "data" / "tiny" / "llama3_tied"
NUM_PROMPTS, LENGTH, VOCAB_SIZE = 6, 150, 256
MAX_PAUSE_S = 0.5
FOLDER_GIB = 0.004
"""Some hundreds of files, so that the oldest ones are removed meanwhile."""


def main() -> None:
    """Run all rounds, print and write the record."""
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument(
        "--changes", type=int, default=20, metavar="N", help="files changed after each kill; default: 20"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-on", metavar="FOLDER", help="what each round starts: an engine that is to be killed")
    args = parser.parse_args()
    if args.run_on:
        run_until_killed(args.run_on, args.seed)
        return
    record = describe_sources() | check(args.kills, args.changes, random.Random(args.seed))
    print(json.dumps(record, indent=1))
    save(args.json or RESULTS / "kv_folder.json", record)


def check(kills: int, changes: int, rng: random.Random) -> dict[str, Any]:
    """Return the record. Raises RuntimeError if an answer differs, or an engine ends by itself."""
    with start(None) as llm:
        expected, _ = answer(llm)
    num_cached, num_changed, num_files = [], 0, []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(kills):
            answers, cached = kill_one(folder, seed=number, seconds=rng.uniform(0, MAX_PAUSE_S))
            if answers != expected:
                raise RuntimeError(f"the engine of round {number} has other answers than one without a folder")
            files = [path for path in files_in(Path(folder)) if path.stat().st_size]
            for path in rng.sample(files, min(changes, len(files))):
                mutate(path, rng)
                num_changed += 1
            num_cached.append(cached)
            num_files.append(len(files))
            print(f"round {number}: {cached} tokens from files, {len(files)} files left", flush=True)
    tokens = NUM_PROMPTS * LENGTH
    return {"kills": kills, "changed_files": num_changed, "prompt_tokens": tokens, "tokens_from_files": num_cached} | {
        "files_left": num_files,
        "other_answers": 0,
    }


def kill_one(folder: str, *, seed: int, seconds: float) -> tuple[Any, int]:
    """Start an engine, read what it answers and how many tokens came from files, and kill it some seconds later."""
    command = [sys.executable, str(ROOT / "scripts" / "check.py"), "kv_folder", "--run-on", folder, "--seed", str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        try:
            answered = next((line for line in engine.stdout if line.startswith("[")), None)
            if answered is None:
                raise RuntimeError(f"the engine ended with {engine.wait()} and no answer")
            time.sleep(seconds)
            if engine.poll() is not None:
                raise RuntimeError(f"the engine ended by itself, with {engine.returncode}")
        finally:
            engine.send_signal(signal.SIGKILL)
    answers, cached = json.loads(answered)
    return answers, cached


def run_until_killed(folder: str, seed: int) -> None:
    """Answer the same prompts and print that, then answer others without end."""
    rng = random.Random(seed)
    with start(folder) as llm:
        print(json.dumps(answer(llm)), flush=True)
        while True:
            generate(llm, rng)


def start(folder: str | None) -> LLM:
    """Start an engine whose devices hold two prompts, and whose host holds four."""
    return LLM(
        str(MODEL),
        dtype="float32",
        skip_tokenizer_init=True,
        batch_invariant=True,
        enforce_eager=True,
        max_num_seqs=2,
        max_model_len=192,
        block_size=16,
        num_gpu_blocks_override=26,
        max_num_batched_tokens=64,
        kv_offloading_size=0.003,
        kv_cache_folder=folder,
        kv_cache_folder_size=FOLDER_GIB,
    )


def answer(llm: LLM) -> tuple[list[list[Any]], int]:
    """Return the tokens and log-probabilities for the same prompts, and the number of tokens that were found."""
    outputs = generate(llm, random.Random("the same"))
    answers = [[list(output.outputs[0].token_ids), output.outputs[0].cumulative_logprob] for output in outputs]
    return answers, sum(output.num_cached_tokens or 0 for output in outputs)


def generate(llm: LLM, rng: random.Random) -> list[RequestOutput]:
    """Continue random prompts."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    prompts = [
        TokensPrompt(prompt_token_ids=[rng.randrange(3, VOCAB_SIZE) for _ in range(LENGTH)]) for _ in range(NUM_PROMPTS)
    ]
    return llm.generate(prompts, params, use_tqdm=False)


if __name__ == "__main__":
    main()
