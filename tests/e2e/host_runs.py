"""Run one process of a model over several hosts, or the whole model, for test_hosts.py and scripts/check.py hosts.

Arguments: a case, the number of hosts, devices of each, this host's rank, or auto, a port, and a file for what comes
out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxllm import LLM, SamplingParams
from tests.e2e.adapter_data import SETTINGS, generate, logprobs_of, prompt_of, request
from tests.e2e.guessing import Guesses, head_config
from tests.e2e.sampling_cases import tilt
from tests.e2e.tensor_parallel_runs import ARGUMENTS, _shown, feature_jobs, plain_jobs, with_embeds, with_pictures
from tests.e2e.tiny_engine import Job, run_together, tiny_llm
from tests.models.heads import model_folder
from tests.models.heads import read_goldens as read_head_goldens
from tests.models.tiny import folder

type Arguments = dict[str, Any]
"""Arguments of an engine. `spread` below spreads it over the hosts."""


def features(spread: Arguments, model: str, tokenizer: str) -> dict[str, Any]:
    """Return what every sampling feature gives, with chunks, preemptions and prefix hits."""
    arguments = ARGUMENTS | {"tokenizer": tokenizer, "logits_processors": [tilt]} | spread
    with tiny_llm(model, **arguments) as (llm, scheduler):
        outputs = run_together(llm, feature_jobs())
        again = [output for _ in range(2) for output in run_together(llm, plain_jobs()[1:2])]
        return {
            "outputs": [_shown(output) for output in (*outputs, *again)],
            "num_preemptions": scheduler.stats().num_preemptions,
            "most_chunks": max(scheduler.num_prompt_chunks(output.request_id) for output in outputs),
            "cached": again[-1].num_cached_tokens,
        }


def adapters(spread: Arguments, *_: str) -> list[Any]:
    """Return what a request with an adapter and one without give."""
    case = "llama3_tied"
    with LLM(str(folder(case)), **(SETTINGS | spread)) as llm:
        outputs = generate(llm, [prompt_of(case)] * 2, [request("all", case), None])
    return [[list(output.outputs[0].token_ids), logprobs_of(output)[0].round(3).tolist()] for output in outputs]


def head(spread: Arguments, *_: str) -> list[Any]:
    """Return what a draft head, which reads the model's features, guesses."""
    case = "eagle3"
    arguments: Arguments = {"max_num_batched_tokens": 128, "max_num_seqs": 8, "num_gpu_blocks_override": 33}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    goldens = read_head_goldens(case)
    arguments |= spread | {"speculative_config": head_config(case)}
    with tiny_llm(str(model_folder(case)), **arguments) as (llm, scheduler):
        guesses = Guesses(scheduler)
        for golden in goldens:
            run_together(llm, [Job(golden.sequence[:-2].tolist(), params)])
    return [guesses.seen[tuple(golden.sequence.tolist())] for golden in goldens]


def pooled(spread: Arguments, *_: str) -> list[Any]:
    """Return embeddings."""
    with LLM(str(folder("qwen3")), runner="pooling", convert="embed", skip_tokenizer_init=True, **spread) as llm:
        outputs = llm.embed([{"prompt_token_ids": list(range(3, 3 + length))} for length in (2, 9, 40)], use_tqdm=False)
    return [[round(value, 4) for value in output.outputs.embedding] for output in outputs]


def pictures(spread: Arguments, *_: str) -> list[Any]:
    """Return the tokens of prompts with pictures, and HF's."""
    return [[output["got"], output["expected"]] for output in with_pictures("qwen2_vl", **spread)]


def embeds(spread: Arguments, *_: str) -> dict[str, Any]:
    """Return the tokens after a prompt of embeddings, and HF's."""
    return with_embeds("llama3_tied", **spread)


def for_ever(spread: Arguments, *_: str) -> None:
    """Print that the engine runs, and run requests until the process is ended."""
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=40, ignore_eos=True, detokenize=False)
    with tiny_llm("qwen3", max_num_seqs=8, num_gpu_blocks_override=33, **spread) as (llm, _scheduler):
        while True:
            run_together(llm, [Job([3 + index, 4, 5], params) for index in range(6)])
            print("runs", flush=True)


CASES: Mapping[str, Callable[..., Any]] = {
    "features": features,
    "adapters": adapters,
    "head": head,
    "pooled": pooled,
    "pictures": pictures,
    "embeds": embeds,
    "for_ever": for_ever,
}


def main(case: str, num_hosts: str, devices: str, rank: str, port: str, out: str, *files: str) -> None:
    """Run a case as one of several hosts; the first one writes a file of JSON."""
    hosts, per_host = int(num_hosts), int(devices)
    jax.config.update("jax_num_cpu_devices", per_host)
    spread: Arguments = {"tensor_parallel_size": hosts * per_host}
    if hosts > 1:
        spread |= {"nnodes": "auto"} if rank == "auto" else {"nnodes": hosts, "node_rank": int(rank)}
        spread["master_port"] = int(port)
    Path(out).write_text(json.dumps(CASES[case](spread, *files)))
    assert jax.config.values["jax_cuda_visible_devices"] == "all", "a process has all devices of its host"


if __name__ == "__main__":
    main(*sys.argv[1:])
