"""Run a tiny model in one process with XLA's attention, then with a platform's kernels in their interpreter.

    python -m tests.e2e.kernel_runs FOLDER BACKEND

`FOLDER` holds a checkpoint. One line of JSON goes to stdout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import jax

from jaxllm import SamplingParams
from pallas_kernels import latent_attention, paged_attention
from pallas_kernels.implementations import LATENT_ATTENTION, PAGED_ATTENTION, load
from tests.e2e.tiny_engine import Job, run_together, tiny_llm

SETTINGS: dict[str, Any] = {
    "max_num_batched_tokens": 16, "max_num_seqs": 2, "max_model_len": 32, "num_gpu_blocks_override": 3,
    "batch_invariant": False, "seed": 0,
    # Kernels run in one bucket; so does XLA here, which has fewer programs to compile then.
    "cudagraph_capture_sizes": [16],
}  # fmt: skip
DTYPES = {"tpu": "float32", "gpu": "bfloat16"}
# Lengths of prompts and outputs, prompts beyond the window. Together they have more rows than one step takes, and soon
# want more than the pool's two blocks of 16.
JOBS = ((14, 5), (15, 3))
# Then one that has the plain programs, and the one of decodes alone.
ALONE = (6, 4)


def main(folder: str, backend: str) -> None:
    """Run both and print the results."""
    jobs = [make_job(*lengths) for lengths in JOBS]
    num_calls = count_calls(backend)
    results = {}
    for name in ("xla", backend):
        settings = SETTINGS | {"dtype": DTYPES[backend], "attention_config": {"backend": name}}
        with tiny_llm(folder, **settings) as (llm, scheduler):
            outputs = [request.outputs[0] for request in run_together(llm, jobs)]
            [alone] = run_together(llm, [make_job(*ALONE, logprobs=None)])
            results[name] = {
                "implementation": llm.llm_engine.vllm_config.attention_config.backend,
                "tokens": [list(output.token_ids) for output in (*outputs, alone.outputs[0])],
                "logprobs": [output.cumulative_logprob for output in outputs],
                "preemptions": scheduler.stats().num_preemptions,
                "chunks": scheduler.num_prompt_chunks("1"),
                "steps": len(scheduler.plans),
                "calls": num_calls(),
            }
    print(json.dumps(results))


def make_job(num_prompt_tokens: int, num_output_tokens: int, logprobs: int | None = 2) -> Job:
    """Return a greedy job."""
    sampling = SamplingParams(
        temperature=0, max_tokens=num_output_tokens, ignore_eos=True, logprobs=logprobs, detokenize=False
    )
    return Job([(7 * i + num_prompt_tokens) % 120 + 3 for i in range(num_prompt_tokens)], sampling)


def count_calls(backend: str) -> Callable[[], int]:
    """Make the implementation count its runs on the device, and return a function that reads the count."""
    calls: list[int] = []

    def load_counting(name: str) -> Callable[..., Any]:
        function = load(name)

        def counted(*arguments: Any, **settings: Any) -> Any:
            out_tnh, pool = function(*arguments, **settings)
            jax.debug.callback(lambda _: calls.append(1), out_tnh[0, 0, 0])
            return out_tnh, pool

        return counted if name in counted_functions else function

    ops: tuple[Any, ...] = (paged_attention, latent_attention)
    tables = (PAGED_ATTENTION, LATENT_ATTENTION)
    counted_functions = {table[backend].function for table in tables if backend in table}
    for op in ops:
        op.load = load_counting

    def read() -> int:
        jax.effects_barrier()
        return len(calls)

    return read


if __name__ == "__main__":
    sys.setswitchinterval(2e-4)  # the interpreter's threads are many, and wait for each other
    main(*sys.argv[1:])
