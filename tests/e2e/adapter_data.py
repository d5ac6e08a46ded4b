"""LoRA adapters for tiny checkpoints, and goldens of HF's models with these adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxllm import LLM, RequestOutput, SamplingParams, TokensPrompt
from jaxllm.lora.request import LoRARequest

ADAPTERS = Path(__file__).parents[1] / "data" / "adapters"
CASES = tuple(sorted(path.name for path in ADAPTERS.iterdir()))
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 16,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 65,
    "max_logprobs": -1,
    "enforce_eager": True,
    "enable_lora": True,
    "max_lora_rank": 8,
}


class AdapterGolden(NamedTuple):
    """HF's greedy tokens with an adapter, and the log-probabilities of the vocabulary, [tokens, v]."""

    tokens: list[int]
    logprobs: np.ndarray


def names_of(case: str) -> tuple[str, ...]:
    """Return the names of a checkpoint's adapters."""
    return tuple(sorted(path.name for path in (ADAPTERS / case).iterdir() if path.is_dir()))


def request(name: str, case: str, **fields: Any) -> LoRARequest:
    """Return the request that names an adapter."""
    return LoRARequest(name, names_of(case).index(name) + 1, str(ADAPTERS / case / name), **fields)


def prompt_of(case: str) -> list[int]:
    """Return the prompt that all goldens of a case continue."""
    with np.load(ADAPTERS / case / "golden.npz") as arrays:
        return arrays["prompt"].tolist()


def golden_of(name: str, case: str) -> AdapterGolden:
    """Return an adapter's golden."""
    with np.load(ADAPTERS / case / "golden.npz") as arrays:
        return AdapterGolden(arrays[f"tokens_{name}"].tolist(), arrays[f"logprobs_{name}"])


def generate(llm: LLM, prompts: Sequence[list[int]], adapters: Sequence[LoRARequest | None]) -> list[RequestOutput]:
    """Continue prompts, greedily, with log-probabilities of the whole vocabulary."""
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=-1, ignore_eos=True, detokenize=False)
    asked = [TokensPrompt(prompt_token_ids=ids) for ids in prompts]
    return llm.generate(asked, params, lora_request=list(adapters), use_tqdm=False)


def logprobs_of(output: RequestOutput) -> np.ndarray:
    """Return the log-probabilities of the whole vocabulary, [tokens, v]."""
    steps = output.outputs[0].logprobs
    assert steps is not None
    return np.array([[step[token].logprob for token in range(len(step))] for step in steps])
