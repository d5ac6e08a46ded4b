"""A worker that runs one of jaxllm's two engines: `LLM`, or `AsyncLLM` with its core in a process of its own."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from protocol import serve


class Offline:
    """An `LLM`, with the engine's defaults except for `engine`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from jaxllm import LLM

        self._llm = LLM(settings["model"], **settings["engine"])

    def warm_up(self) -> None:
        """Wait until every program is compiled."""
        self._llm.llm_engine.warm_up()

    def first_token(self, prompt: str) -> str:
        """Return the text of a first token."""
        return self._llm.generate([prompt], self._params(1), use_tqdm=False)[0].outputs[0].text

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Continue each prompt greedily by a number of tokens, with text, and return the tokens."""
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(inputs, self._params(num_tokens), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def cpu_seconds(self) -> float:
        """Return the CPU time of the engine so far."""
        return time.process_time()

    def close(self) -> None:
        """End the engine."""
        self._llm.llm_engine.shutdown()

    def _params(self, num_tokens: int) -> Any:
        from jaxllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


class Online:
    """An `AsyncLLM`, whose readers get every token as a delta, as a server's do."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from jaxllm import AsyncEngineArgs, AsyncLLM

        self._runner = asyncio.Runner()
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=settings["model"], **settings["engine"]))
        self._num_requests = 0

    def warm_up(self) -> None:
        """Wait until every program is compiled."""
        self._runner.run(self._llm.warm_up())

    def first_token(self, prompt: str) -> str:
        """Return the text of a first token."""
        return self._runner.run(self._read(prompt, 1))[1]

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Continue each prompt greedily by a number of tokens, with text and a reader for each; return the tokens."""

        async def read_all() -> list[tuple[list[int], str]]:
            reading = [self._read({"prompt_token_ids": prompt}, num_tokens) for prompt in prompts]
            return await asyncio.gather(*reading)

        return [tokens for tokens, _ in self._runner.run(read_all())]

    def cpu_seconds(self) -> float:
        """Return the CPU time of the front end and of the core so far."""
        return time.process_time() + time.clock_gettime((~self._llm.core_pids[0] << 3) | 2)

    def close(self) -> None:
        """End the engine."""
        self._llm.shutdown()
        self._runner.close()

    async def _read(self, prompt: Any, num_tokens: int) -> tuple[list[int], str]:
        from jaxllm import SamplingParams
        from jaxllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, output_kind=kind)
        self._num_requests += 1
        tokens: list[int] = []
        text = ""
        async for output in self._llm.generate(prompt, params, str(self._num_requests)):
            tokens += output.outputs[0].token_ids
            text += output.outputs[0].text
        return tokens, text


if __name__ == "__main__":
    serve(lambda settings: {"llm": Offline, "async": Online}[settings["kind"]](settings))
