"""Try one thing on this machine's GPU or TPU, from the simplest to a whole step, and compare it with plain XLA.

A process runs one case, so that a kernel that hangs or ends the process is known by its case.
--dry-run IMPLEMENTATION runs a smaller case on a CPU, interpreted.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from lib.device_time import measure_peaks
from lib.evidence import Evidence, make_parser
from lib.machine import describe_device
from lib.shapes import MODELS, TOY
from lib.workloads import (
    LAYER,
    Chunks,
    cross_check,
    make_workload,
    pick_kernels,
    pools_are_equal,
    write_kv,
    xla_answer,
)

from jaxllm import LLM, SamplingParams, TokensPrompt
from pallas_kernels.paged_attention.cases import CASES
from tests.e2e.random_checkpoint import save_model

MODEL, DRY_MODEL = "llama-3-8b", "smollm2-135m"
DENSE = {"first_k_dense_replace": TOY["num_hidden_layers"]}
LATENTS = MODELS["deepseek-v2-lite"] | TOY | DENSE | {"num_key_value_heads": TOY["num_attention_heads"]}
STATES = MODELS["qwen3.5-0.8b"] | TOY | {"num_hidden_layers": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 2}
"""Toy models: one attends over latents, the other has recurrent states in three layers of four."""
NEAR = 0.1
"""The largest difference of a toy's log-probabilities in bfloat16."""
type Row = dict[str, Any]


def sanity(dry_run: str | None) -> Row:
    """Check eager operations, the first to fail on a new device, and measure its peaks on random data."""
    # On some devices the first eager operations were compiled wrongly: https://github.com/jax-ml/jax/issues/40633
    wrong = [] if (jnp.ones(4) + 1).tolist() == [2.0] * 4 else ["ones(4) + 1"]
    wrong += [] if abs(float(jnp.sqrt(512.0)) - 512**0.5) < 1e-4 else ["sqrt(512)"]
    return measure_peaks(is_dry=bool(dry_run)) | {"missed": wrong}


def write(dry_run: str | None) -> Row:
    """Rotate and write the keys and values of several sequences, without attending."""
    case = CASES[DRY_MODEL if dry_run else MODEL]
    op = pick_kernels(case, 16, jnp.bfloat16, dry_run)
    work = make_workload(op, case, [(1, 1), (35, 1), (20, 18)])
    _, expected = xla_answer(op, work)
    run = jax.jit(partial(write_kv, op, layer=LAYER), donate_argnums=1)
    return {"missed": [] if pools_are_equal(run(work.inputs, work.pool), expected) else ["the pool differs"]}


def attend(chunks: Chunks, dry_chunks: Chunks, dry_run: str | None) -> Row:
    """Run a step of the whole op."""
    case = CASES[DRY_MODEL if dry_run else MODEL]
    op = pick_kernels(case, 16, jnp.bfloat16, dry_run)
    return cross_check(op, case, dry_chunks if dry_run else chunks)


def step(hf: dict[str, Any], dry_run: str | None) -> Row:
    """Generate with a toy of a model: with the kernels, and with plain XLA."""
    lengths, max_tokens = ((20,), 2) if dry_run else ((130, 40, 7), 8)
    prompts = [TokensPrompt(prompt_token_ids=[7 * i % 100 + 3 for i in range(length)]) for length in lengths]
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=5, detokenize=False)
    logprobs: list[list[float]] = []
    for backend in (dry_run, "xla"):
        settings: dict[str, Any] = {"attention_config": {"backend": backend}} if backend else {}
        settings |= {"max_num_seqs": 8, "max_model_len": 256, "num_gpu_blocks_override": 64, "enforce_eager": True}
        settings |= {"max_num_batched_tokens": 32} if dry_run else {}
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder), hf)
            with LLM(folder, block_size=16, dtype="bfloat16", skip_tokenizer_init=True, **settings) as llm:
                outputs = llm.generate(prompts, sampling, use_tqdm=False)
        logprobs.append([output.outputs[0].cumulative_logprob or 0.0 for output in outputs])
    error = max(abs(a - b) / max_tokens for a, b in zip(*logprobs, strict=True))
    return {"error": round(error, 5), "missed": [] if error < NEAR else [f"log-probabilities are {error:.2f} apart"]}


# The number is the most items that each of 132 thread blocks has, with 8 kv heads (gpu/splits.py).
CASES_OF_A_DEVICE: Mapping[str, Callable[[str | None], Row]] = {
    "sanity": sanity,
    "write": write,
    "decode-1": partial(attend, [(200, 1)] * 16, [(40, 1)]),
    "decode-4": partial(attend, [(400 + i, 1) for i in range(64)], [(40, 1), (17, 1)]),
    # Contexts that share a tile on a TPU, by fours and twos, in groups that are not full, and longer ones between.
    "decode-short": partial(
        attend, [((97 * i) % 330 + 1, 1) for i in range(61)], [(128, 1), (1, 1), (129, 1), (100, 1), (600, 1)]
    ),
    "decode-30": partial(attend, [(4000 + i, 1) for i in range(64)], [(140, 1), (1, 1)]),
    "prefill": partial(attend, [(33, 33), (150, 47), (1000, 900)], [(50, 33)]),
    "step": partial(step, MODELS[MODEL] | TOY),
    "step-latents": partial(step, LATENTS),
    "step-states": partial(step, STATES),
}


def main() -> int:
    """Run the case and write its result."""
    parser = make_parser(__doc__)
    parser.add_argument("case", choices=CASES_OF_A_DEVICE)
    args = parser.parse_args()
    if args.case.startswith("step"):  # an engine says how much of a GPU's memory JAX is to take, before JAX looks at it
        row = CASES_OF_A_DEVICE[args.case](args.dry_run)
        evidence = Evidence(args.json, describe_device())
    else:
        evidence = Evidence(args.json, describe_device())
        row = CASES_OF_A_DEVICE[args.case](args.dry_run)
    evidence.add({"case": args.case} | row)
    return evidence.finish()


if __name__ == "__main__":
    sys.exit(main())
