"""Measure attention to the tokens that an indexer chooses, and Kimi's delta attention, beside HF on a CPU.

    scripts/bench.py sparse --hf-python DIR/hf/bin/python       # writes benchmarks/results/sparse.json

`scripts/peers.sh DIR hf` makes the environment. Two models of four layers have random weights, which HF draws once and
both programs read: one like DeepSeek V3.2 (an indexer with 64 heads of 128 that chooses 512 tokens) and one like Kimi
Linear (three layers of delta attention and one over latents). Programs are measured in turns, each in a process of its
own, HF op by op as `generate` runs it, jaxllm without prefix caching:

prefill   prompt tokens by the seconds until each request has one token
decode    further tokens by the seconds that they take beyond this

jaxllm runs everything once before it is measured, which compiles its programs, HF one request. Figures are medians of
rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lib.results import describe_server, make_parser, result_file, save
from lib.sheet import print_sheet
from peers.contestants import Contestant, jaxllm, peers
from peers.prompts import Requests, Source
from peers.turns import say
from peers.worker import PROGRAMS, BenchmarkError, Worker

COMMON: dict[str, Any] = {
    "dtype": "bfloat16", "vocab_size": 8192, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 2048, "moe_intermediate_size": 512, "num_experts_per_tok": 4, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek_v32": COMMON | {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "q_lora_rank": 512,
        "n_routed_experts": 32, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "index_topk": 512, "index_n_heads": 64, "index_head_dim": 128, "max_position_embeddings": 16_384,
    },
    "kimi_linear": COMMON | {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "q_lora_rank": None,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_heads": 16, "linear_head_dim": 128,
        "num_experts": 32, "num_experts_per_token": 4, "n_shared_experts": 1, "mlp_layer_types": ["sparse"] * 4,
        "first_k_dense_replace": 0, "model_max_length": 16_384, "pad_token_id": 0,
    },
}  # fmt: skip
LOADS = ((1, 2048), (8, 1024))
"""Numbers of requests, with the tokens of a prompt; HF's indexer holds a score of each head for each pair of tokens."""
NUM_NEW = 17
NO_TOKENIZER: dict[str, Any] = {"skip_tokenizer_init": True, "enable_prefix_caching": False}


def main() -> int:
    """Measure, print and save; return the exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("--hf-python", metavar="PATH", required=True, help="Python of scripts/peers.sh DIR hf")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES), help="default: all")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="shows that all runs, measures nothing and saves nothing")
    args = parser.parse_args()
    record = describe_server() | {"rounds": args.rounds, "new_tokens": NUM_NEW, "shapes": SHAPES}
    rows: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory(prefix="bench-sparse-") as scratch:
            for name in args.models:
                model = write_model(name, args.hf_python, Path(scratch, name))
                for dtype in args.dtypes:
                    figures = measure(args, model, dtype, Path(scratch))
                    rows += [{"model": name, "dtype": dtype} | row for row in figures]
                    save(result_file(args, "sparse.json"), record | {"figures": rows})
    except (BenchmarkError, OSError, subprocess.CalledProcessError) as error:
        print(f"bench sparse: {error}", file=sys.stderr)
        return 1
    print_sheet(rows)
    return 0


def write_model(name: str, python: str, folder: Path) -> Path:
    """Write a checkpoint of random weights, which HF draws, and return its folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    command = [python, str(PROGRAMS / "save_random.py"), str(folder / "config.json"), str(folder / "model")]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder / "model"


def measure(args: argparse.Namespace, model: Path, dtype: str, scratch: Path) -> list[dict[str, Any]]:
    """Return a row of medians for each load and program."""
    others = peers(model, model, dtype, vllm=None, hf=args.hf_python, llamacpp=None)
    runners = [jaxllm(model, dtype, **NO_TOKENIZER), next(each for each in others if each.name == "hf_static")]
    source = Source(COMMON["vocab_size"])
    loads = [(num, 16 if args.quick else prompt) for num, prompt in LOADS]
    requests = [source.equal(num, prompt, NUM_NEW) for num, prompt in loads]
    samples: dict[tuple[int, str], list[dict[str, float]]] = {}
    tokens: dict[tuple[int, str], list[list[int]]] = {}
    for turn in range(1 if args.quick else args.rounds):
        for runner in runners[:: 1 if turn % 2 == 0 else -1]:
            for load, (sample, answer) in enumerate(_turn(runner, requests, scratch / runner.name)):
                samples.setdefault((load, runner.name), []).append(sample)
                tokens[load, runner.name] = answer
                say(f"round {turn + 1}, {dtype}, {runner.label}: {sample}")
    return [
        {"requests": loads[load][0], "prompt": loads[load][1], "program": name}
        | {key: round(statistics.median(each[key] for each in of_run), 2) for key in of_run[0]}
        | {"same_tokens": _same(tokens[load, "jaxllm"], tokens[load, name]), "rounds": of_run}
        for (load, name), of_run in samples.items()
    ]


def _turn(runner: Contestant, requests: list[Requests], cache: Path) -> list[tuple[dict[str, float], list[list[int]]]]:
    """Return a program's speeds and tokens for each load."""
    with runner.start(cache) as worker:
        worker.call("warm_up")
        return [_sample(worker, load, compiles=runner.name == "jaxllm") for load in requests]


def _sample(worker: Worker, load: Requests, *, compiles: bool) -> tuple[dict[str, float], list[list[int]]]:
    """Return tokens by seconds, and the tokens."""
    worker.generate(load if compiles else load.first(1, 2))
    first = worker.generate(load.first(len(load.prompts), 1)).seconds
    answer = worker.generate(load)
    further = load.output_tokens - len(load.prompts)
    speeds = {"prefill": load.prompt_tokens / first, "decode": further / (answer.seconds - first)}
    return {name: round(speed, 2) for name, speed in speeds.items()}, answer.value


def _same(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Return the share of tokens that are the same."""
    pairs = [pair for our, their in zip(ours, theirs, strict=True) for pair in zip(our, their, strict=True)]
    return round(statistics.mean(our == their for our, their in pairs), 3)


if __name__ == "__main__":
    sys.exit(main())
