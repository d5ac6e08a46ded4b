"""List the contestants: each one's worker program, environment and settings."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peers.worker import SCRIPTS, Worker

LOOKUP = 10
"""The number of drafts of HF's prompt lookup, from its documentation."""
LLAMACPP_LOOKUP = 2
"""The number for llama-cpp-python, as it advises for CPUs."""
VLLM_LOOKUP = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
"""The settings for vLLM, from its documentation."""
KV_BYTES = 1 << 30
"""The size of the KV cache, where it is fixed; it holds all requests of the offline workload at once."""


@dataclass(frozen=True)
class Contestant:
    """A library in an environment.

    `shares_weights`: it reads the same checkpoint as the others; `batches`: it runs many requests at once; `tree`: the
    checkout that jaxllm is imported from.
    """

    name: str
    label: str
    program: str
    python: str
    settings: dict[str, Any] = field(default_factory=dict)
    shares_weights: bool = True
    batches: bool = True
    tree: Path = SCRIPTS.parent

    def start(self, cache: Path, **settings: Any) -> Worker:
        """Start a process, with its caches in a folder."""
        return Worker(self.program, self.python, self.settings | settings, cache, self.tree)


def jaxllm(model: Path, dtype: str, **engine: Any) -> Contestant:
    """Return jaxllm of this environment, with more engine arguments."""
    engine = {"kv_cache_memory_bytes": KV_BYTES} | engine
    settings = {"library": "jaxllm", "model": str(model), "dtype": dtype, "engine": engine}
    return Contestant("jaxllm", "jaxllm", "vllm_api", sys.executable, settings)


def lookups(
    model: Path, gguf: Path, dtype: str, *, vllm: str | None, hf: str | None, llamacpp: str | None
) -> dict[str, tuple[Contestant, Contestant]]:
    """Return the libraries with a given Python, each without and with prompt lookup."""
    contestants = {}
    for plain in peers(model, gguf, dtype, vllm=vllm, hf=hf, llamacpp=llamacpp):
        match plain.name:
            case "vllm":
                settings: dict[str, Any] = {"engine": plain.settings["engine"] | {"speculative_config": VLLM_LOOKUP}}
            case "hf_static":
                settings = {"lookup_tokens": LOOKUP}
            case "llamacpp":
                settings = {"lookup_tokens": LLAMACPP_LOOKUP}
            case _:
                continue
        contestants[plain.name.removesuffix("_static")] = plain, replace(plain, settings=plain.settings | settings)
    return contestants


def in_int8(contestant: Contestant) -> Contestant:
    """Return jaxllm with quantized weights."""
    settings = contestant.settings | {"engine": contestant.settings["engine"] | {"quantization": "int8"}}
    label = f"{contestant.label}, int8"
    return replace(contestant, name=f"{contestant.name}_int8", label=label, settings=settings, shares_weights=False)


def peers(
    model: Path, gguf: Path, dtype: str, *, vllm: str | None, hf: str | None, llamacpp: str | None
) -> list[Contestant]:
    """Return the peers with a given Python. llama.cpp reads `gguf`, the others `model`."""
    contestants = []
    common = {"model": str(model), "dtype": dtype}
    if vllm:
        settings = common | {"library": "vllm", "engine": {"kv_cache_memory_bytes": KV_BYTES}}
        contestants.append(Contestant("vllm", "vLLM", "vllm_api", vllm, settings))
    if hf:
        settings = common | {"continuous": False}
        contestants.append(Contestant("hf_static", "HF, batches of 16", "transformers_api", hf, settings))
        settings = common | {"continuous": True, "kv_bytes": KV_BYTES}
        contestants.append(Contestant("hf_continuous", "HF, continuous", "transformers_api", hf, settings))
    if llamacpp:
        settings = {"gguf": str(gguf)}
        label = f"llama.cpp, {gguf.stem.rpartition('.')[2]}"
        differs: dict[str, Any] = {"shares_weights": False, "batches": False}
        contestants.append(Contestant("llamacpp", label, "llamacpp_api", llamacpp, settings, **differs))
    return contestants
