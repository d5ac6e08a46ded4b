"""Measure what the tiers of the KV cache gain and cost, with random weights.

    agents  eight agents in turns, two at a time, with contexts of 4,000 to 17,000 tokens that grow by 500 tokens in
            each of four turns: twice what the device's pool holds: most are evicted before their agent's next turn
    fits    one agent with 17,000 tokens: nothing is evicted

The same trace runs in turns, each time with empty caches, on

    device   the device's pool alone
    host     `kv_offloading_size` for all
    folder   `kv_offloading_size` for a third, and `kv_cache_folder` for all
    restart  the same folder after the engine ended: once, with what the last run has left there

Programs are compiled before. Tokens and log-probabilities must be equal to the bit. Times to first tokens are those of
all turns but the first, in which nothing is cached, except after a restart.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from itertools import batched
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from lib.machine import describe_sources, versions
from lib.results import make_parser, save

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.inputs import TokensPrompt

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": 8192,
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5,
    "rope_theta": 1e6, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""A small Llama that reads some 20,000 tokens a few times a minute on two cores."""
BLOCK_SIZE, AT_ONCE, ANSWER, FIRST_PLAIN_ID = 16, 2, 32, 256


class Trace(NamedTuple):
    """Agents whose contexts grow by as many tokens in each turn after the first, answers included."""

    lengths: tuple[int, ...]
    """The tokens of each agent's first prompt."""
    num_turns: int
    growth: int
    pool_tokens: int
    """What the device's pool holds."""
    repeats: int = 1
    """How often a round has it."""


TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"kv_offloading_size": 2.0},
    "folder": {"kv_offloading_size": 0.25, "kv_cache_folder_size": 4.0},
}
TRACES = {
    "agents": Trace(tuple(range(4096, 4096 + 8 * 1920, 1920)), 5, 512, 46_080),
    "fits": Trace((17_408,), 5, 512, 46_080, repeats=4),
}
QUICK = {"agents": Trace((256, 320, 384, 448), 2, 64, 768), "fits": Trace((256,), 3, 64, 768)}


def main() -> None:
    """Measure, print and write."""
    parser = make_parser(__doc__, "offloading_cpu.json")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="short contexts, saved only with --json")
    args = parser.parse_args()
    report = describe_sources() | {"versions": versions("jax"), "rounds": args.rounds}
    for name, trace in (QUICK if args.quick else TRACES).items():
        report[name] = {"trace": trace._asdict()} | compare(trace, args.rounds)
    print(json.dumps(report, indent=1))
    if not args.quick or args.json != parser.get_default("json"):
        save(args.json, report)


def compare(trace: Trace, rounds: int) -> dict[str, Any]:
    """Return the medians of all settings, in turns. Raises RuntimeError if their outputs differ."""
    measured: dict[str, list[dict[str, float]]] = {}
    outputs: list[Any] = []

    def measure(name: str, llm: LLM, number: int) -> None:
        figures, said = run(llm, trace)
        outputs.append(said)
        if said != outputs[0]:
            raise RuntimeError(f"{name}: outputs differ from those of the first run")
        print(f"round {number}, {name}: {figures}", flush=True)
        measured.setdefault(name, []).append(figures)

    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE))
        engines = {name: start(trace, folder, **tiers) for name, tiers in TIERS.items()}
        for llm in engines.values():  # what is compiled late is compiled here
            list(play(llm, trace._replace(lengths=trace.lengths[-AT_ONCE:], num_turns=2)))
        for number in range(1, rounds * trace.repeats + 1):
            for name, llm in engines.items():
                llm.reset_prefix_cache(reset_connector=True)
                measure(name, llm, number)
        for llm in engines.values():
            llm.shutdown()
        restarted = start(trace, folder, **TIERS["folder"])
        measure("restart", restarted, 1)
        restarted.shutdown()
    medians = {
        name: {key: round(statistics.median(each[key] for each in figures), 4) for key in figures[0]}
        for name, figures in measured.items()
    }
    return medians | {"beside_device": {name: beside(medians["device"], each) for name, each in medians.items()}}


def beside(device: dict[str, float], tier: dict[str, float]) -> dict[str, float]:
    """Return how many times sooner first tokens come than without tiers, and how many times as many tokens."""
    return {
        "first_token_times_sooner": round(device["first_token_p50_s"] / tier["first_token_p50_s"], 2),
        "tokens_per_s_ratio": round(tier["tokens_per_s"] / device["tokens_per_s"], 3),
    }


def start(trace: Trace, folder: str, **tiers: Any) -> LLM:
    """Start an engine with room for what the trace says, and with tiers."""
    if "kv_cache_folder_size" in tiers:
        tiers |= {"kv_cache_folder": str(Path(folder, "blocks"))}
    return LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        batch_invariant=True,
        block_size=BLOCK_SIZE,
        max_num_seqs=AT_ONCE,
        max_model_len=max(trace.lengths) + trace.num_turns * trace.growth,
        num_gpu_blocks_override=1 + trace.pool_tokens // BLOCK_SIZE,
        disable_log_stats=False,
        **tiers,
    )


def run(llm: LLM, trace: Trace) -> tuple[dict[str, float], Any]:
    """Run a trace; return its figures, and all tokens with their log-probabilities."""
    said, first_tokens, num_cached, num_tokens, num_read = [], [], 0, 0, 0
    began = perf_counter()
    for turn, outputs in play(llm, trace):
        for output in outputs:
            assert output.metrics is not None
            assert output.prompt_token_ids is not None
            num_tokens += len(output.prompt_token_ids) + ANSWER
            said.append((output.outputs[0].token_ids, output.outputs[0].cumulative_logprob))
            if turn:
                first_tokens.append(output.metrics.first_token_latency)
                num_cached += output.num_cached_tokens or 0
                num_read += len(output.prompt_token_ids)
    seconds, cuts = perf_counter() - began, statistics.quantiles(first_tokens, n=100, method="inclusive")
    return {
        "hit_rate": num_cached / num_read,
        "first_token_p50_s": cuts[49],
        "first_token_p99_s": cuts[98],
        "tokens_per_s": num_tokens / seconds,
    }, said


def play(llm: LLM, trace: Trace) -> Iterator[tuple[int, list[RequestOutput]]]:
    """Play all turns of all agents, whose order differs in each turn; yield the outputs of each call."""
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=0)
    contexts: list[list[int]] = [[] for _ in trace.lengths]
    for turn in range(trace.num_turns):
        for agents in batched(rng.sample(range(len(contexts)), len(contexts)), AT_ONCE):
            for agent in agents:
                new = trace.growth - ANSWER if turn else trace.lengths[agent]
                contexts[agent] += (rng.randrange(FIRST_PLAIN_ID, SHAPE["vocab_size"]) for _ in range(new))
            outputs = llm.generate(
                [TokensPrompt(prompt_token_ids=contexts[agent]) for agent in agents], params, use_tqdm=False
            )
            for agent, output in zip(agents, outputs, strict=True):
                contexts[agent] += output.outputs[0].token_ids
            yield turn, outputs


if __name__ == "__main__":
    main()
