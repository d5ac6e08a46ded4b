"""A worker that runs Hugging Face Transformers: `generate` on static batches, or its continuous batching."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
import transformers
from protocol import serve
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

BATCH_SIZE = 16
PAGE_SIZE = 256
MAX_BATCH_TOKENS = 512
NEVER = -1
"""An id that no token has, so that generation never ends early."""


class Static:
    """Runs `generate` on batches of 16 in order, padded on the left; a batch ends with its longest request."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, settings["dtype"])
        self.model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).to(device).eval()
        self.model.generation_config.eos_token_id = None
        self.options = {}
        if settings.get("lookup_tokens"):
            self.options["prompt_lookup_num_tokens"] = settings["lookup_tokens"]

    def versions(self) -> dict[str, str]:
        """Return the versions that run."""
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    def warm_up(self) -> None:
        """Do nothing: it compiles nothing."""

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Continue each prompt greedily by a number of tokens."""
        starts = range(0, len(prompts), BATCH_SIZE)
        batches = [slice(start, start + BATCH_SIZE) for start in starts]
        return [tokens for batch in batches for tokens in self._generate_batch(prompts[batch], lengths[batch])]

    def _generate_batch(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=self.model.device)
        mask = torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=self.model.device
        )
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=max(lengths), pad_token_id=0, **self.options
            )
        rows = out[:, width:].tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]


class Continuous(Static):
    """Runs continuous batching, with one manager for all calls and a KV cache of `kv_bytes`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        config = self.model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * self.model.dtype.itemsize
        # Left alone, it takes nine tenths of the free memory.
        batching = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=settings["kv_bytes"] // (PAGE_SIZE * token_bytes),
            max_batch_tokens=MAX_BATCH_TOKENS,
        )
        generation = GenerationConfig(do_sample=False, eos_token_id=NEVER, pad_token_id=0)
        self.manager = self.model.init_continuous_batching(generation, continuous_batching_config=batching)
        self.manager.start()

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Continue each prompt greedily by a number of tokens. Raises RuntimeError if a request fails."""
        order = [
            self.manager.add_request(prompt, max_new_tokens=length, eos_token_id=NEVER)
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        outputs: dict[str, list[int]] = {}
        while len(outputs) < len(order):
            result = self.manager.get_result(timeout=1)
            if result is None:
                if not self.manager.is_running():
                    raise RuntimeError("the thread that generates has ended")
            elif result.error is not None:
                raise RuntimeError(result.error)
            elif result.is_finished():
                outputs[result.request_id] = result.generated_tokens
        return [outputs[request_id] for request_id in order]

    def close(self) -> None:
        """End the thread that generates, which would keep the process alive."""
        self.manager.stop(block=True)


if __name__ == "__main__":
    serve(lambda settings: Continuous(settings) if settings["continuous"] else Static(settings))
