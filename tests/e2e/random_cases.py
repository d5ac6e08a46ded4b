"""Random configurations of a family with HF's log-probabilities, as scripts/make.py random_configs writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxllm import LLM, RequestOutput, SamplingParams
from tests.loading.files import safetensors_bytes
from tests.models.random_weights import draw_weights

BLOCK_SIZE = 16


class RandomCase(NamedTuple):
    """A configuration, and what HF computes with it in float32."""

    seed: int
    config: dict[str, Any]
    shapes: dict[str, list[int]]
    prompt: list[int]
    tokens: list[int]
    """The greedy choices after the prompt."""
    gaps: list[float]
    """How far each choice is ahead of the second best."""
    shown: list[int]
    """The tokens with a known log-probability at every position before that of the last choice."""
    logprobs: list[list[float]]
    doubt: float
    """How far HF is from itself where it computes all positions at once."""


def read_case(path: Path) -> RandomCase:
    """Return a case."""
    return RandomCase(**json.loads(path.read_text()))


def write_checkpoint(case: RandomCase, folder: Path) -> None:
    """Write the checkpoint that HF ran."""
    weights = draw_weights(case.shapes, case.seed, case.config["model_type"], case.config["dtype"])
    dtype = ml_dtypes.bfloat16 if case.config["dtype"] == "bfloat16" else np.float32
    tensors = {name: np.asarray(each, dtype) for name, each in weights.items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    (folder / "config.json").write_text(json.dumps(case.config))


def largest_error(case: RandomCase, folder: Path, *, max_num_batched_tokens: int = 16) -> float:
    """Return the largest error of a log-probability, of a prompt in chunks, of decodes, and of both after a cache hit.

    Decodes count up to the first choice that HF nearly took too.
    """
    write_checkpoint(case, folder)
    with LLM(
        str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=4,
        num_gpu_blocks_override=32,
        max_logprobs=-1,
        enforce_eager=True,
    ) as llm:
        scored, generated, cached = generate(llm, case, scores=True), generate(llm, case), generate(llm, case)
    rows = [each for each in scored.prompt_logprobs or () if each]
    prompt = error_of(rows, case.logprobs, case)
    return max(prompt, *(decodes_error(output, case) for output in (scored, generated, cached)))


def generate(llm: LLM, case: RandomCase, *, scores: bool = False) -> RequestOutput:
    """Continue the prompt, with log-probabilities of all tokens, and of all of the prompt's if `scores`."""
    params = SamplingParams(
        temperature=0,
        max_tokens=len(case.tokens),
        logprobs=-1,
        prompt_logprobs=-1 if scores else None,
        ignore_eos=True,
        detokenize=False,
    )
    [output] = llm.generate({"prompt_token_ids": case.prompt}, params, use_tqdm=False)
    return output


def decodes_error(output: RequestOutput, case: RandomCase) -> float:
    """Return the largest error of the decodes; infinite if one differs that HF was sure of."""
    completion = output.outputs[0]
    pairs = zip(completion.token_ids, case.tokens, strict=True)
    same = next((step for step, (ours, theirs) in enumerate(pairs) if ours != theirs), len(case.tokens))
    if same < len(case.tokens) and case.gaps[same] > 1e-3:
        return float("inf")
    return error_of((completion.logprobs or [])[: same + 1], case.logprobs[len(case.prompt) - 1 :], case)


def error_of(rows: Sequence[Any], expected: Sequence[Sequence[float]], case: RandomCase) -> float:
    """Return the largest difference of rows of log-probabilities from HF's first ones."""
    assert rows
    logprobs = np.array([[row[token].logprob for token in case.shown] for row in rows])
    return float(np.abs(logprobs - np.array(expected[: len(rows)])).max())
