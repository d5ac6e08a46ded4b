"""A worker that runs llama.cpp (the C API, by llama-cpp-python) with the file's quantized weights, greedily."""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
from collections.abc import Iterator
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from protocol import serve

CONTEXT = 640
"""Tokens that each request may have: of 16 requests, as many as jaxllm's KV cache holds."""
BATCH = 512
"""Tokens in one call, as many as llama.cpp computes at once."""


class Model:
    """A GGUF file with context for `streams` requests at a time: one where the settings name no number."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.streams = settings.get("streams", 1)
        llama_cpp.llama_backend_init()
        path = settings["gguf"].encode()
        self.model = llama_cpp.llama_model_load_from_file(path, llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {settings['gguf']}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = CONTEXT * self.streams, self.streams, BATCH
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp has no memory for {self.streams} requests of {CONTEXT} tokens")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def versions(self) -> dict[str, str]:
        """Return the versions that run."""
        return {"llama-cpp-python": llama_cpp.__version__, "python": platform.python_version()}

    def instructions(self) -> str:
        """Return the library's list of the processor's instructions that it uses."""
        return llama_cpp.llama_print_system_info().decode()

    def warm_up(self) -> None:
        """Do nothing: it compiles nothing."""

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Continue each prompt greedily by a number of tokens."""
        outputs = []
        for first in range(0, len(prompts), self.streams):
            chosen = slice(first, first + self.streams)
            outputs += self._together(prompts[chosen], lengths[chosen])
        return outputs

    def losses(self, texts: list[list[int]]) -> list[float]:
        """Return the mean of -log p of each text's tokens but its first."""
        means = []
        for text in texts:
            llama_cpp.llama_memory_clear(self.memory, False)
            rows = self._decode([(token, place, 0, True) for place, token in enumerate(text)])
            means.append(float(np.mean(list(_losses(rows, text)))))
        return means

    def _together(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Continue prompts, all in one batch, each for as long as it has tokens to come."""
        llama_cpp.llama_memory_clear(self.memory, False)
        tokens = [
            (token, place, request, place == len(prompt) - 1)
            for request, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        outputs: list[list[int]] = [[] for _ in prompts]
        while tokens:
            asked = [request for _, _, request, wants_logits in tokens if wants_logits]
            for request, row in zip(asked, self._decode(tokens), strict=True):
                outputs[request].append(int(row.argmax()))
            tokens = [
                (outputs[request][-1], len(prompts[request]) + len(outputs[request]) - 1, request, True)
                for request in asked
                if len(outputs[request]) < lengths[request]
            ]
        return outputs

    def _decode(self, tokens: list[tuple[int, int, int, bool]]) -> Iterator[np.ndarray]:
        """Run tokens, each (id, position, request, whether logits are wanted); yield the logits, one row at a time."""
        for first in range(0, len(tokens), BATCH):
            part = tokens[first : first + BATCH]
            batch, asked = self.batch, sum(wants_logits for *_, wants_logits in part)
            batch.n_tokens = len(part)
            for index, (token, position, request, wants_logits) in enumerate(part):
                batch.token[index], batch.pos[index] = token, position
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, request
                batch.logits[index] = wants_logits
            if llama_cpp.llama_decode(self.context, batch):
                raise RuntimeError("llama_decode failed")
            if asked:
                logits = ctypes.cast(llama_cpp.llama_get_logits(self.context), ctypes.POINTER(ctypes.c_float))
                yield from np.ctypeslib.as_array(logits, (asked, self.vocab_size))


class Lookup:
    """The same with prompt lookup, which llama-cpp-python has in Python above the C API."""

    def __init__(self, settings: dict[str, Any]) -> None:
        draft = LlamaPromptLookupDecoding(num_pred_tokens=settings["lookup_tokens"])
        threads = len(os.sched_getaffinity(0))
        self.model = llama_cpp.Llama(
            settings["gguf"], n_ctx=CONTEXT, n_batch=BATCH, n_threads=threads, draft_model=draft, verbose=False
        )

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Continue each prompt greedily by a number of tokens, one after the other."""
        return [
            list(itertools.islice(self.model.generate(prompt, temp=0.0), length))
            for prompt, length in zip(prompts, lengths, strict=True)
        ]


def _losses(rows: Iterator[np.ndarray], text: list[int]) -> Iterator[float]:
    """Yield -log p of each token by the row of logits that predicts it."""
    for row, token in zip(rows, text[1:], strict=False):
        logits = row.astype(np.float64)
        yield float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[token])


if __name__ == "__main__":
    serve(lambda settings: Lookup(settings) if "lookup_tokens" in settings else Model(settings))
