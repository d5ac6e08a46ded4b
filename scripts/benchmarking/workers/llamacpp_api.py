"""This worker runs llama.cpp (llama-cpp-python): one request after the other, with the file's quantized weights."""

from __future__ import annotations

import os
import platform
from itertools import islice
from typing import Any

import llama_cpp
from protocol import serve


class Model:
    """A GGUF file with context for one request."""

    def __init__(self, settings: dict[str, Any]) -> None:
        threads = len(os.sched_getaffinity(0))
        self.llama = llama_cpp.Llama(
            settings["gguf"], n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def versions(self) -> dict[str, str]:
        """Return the versions that run."""
        return {"llama-cpp-python": llama_cpp.__version__, "python": platform.python_version()}

    def warm_up(self) -> None:
        """Do nothing: it compiles nothing."""

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Continue each prompt greedily by so many tokens."""
        return [
            list(islice(self.llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0), length))
            for prompt, length in zip(prompts, lengths, strict=True)
        ]


if __name__ == "__main__":
    serve(Model)
