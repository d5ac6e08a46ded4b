"""The requests of a soak: random ones whose outputs are known, and ones that no engine can run."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

FIRST_PLAIN_ID, VOCAB_SIZE = 7, 256
LONGEST_PROMPT = 150
"""Prompts of more than max_num_batched_tokens are computed in chunks."""
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "[a-z]{3,9} [0-9]{2}"},
    {"choice": ["yes", "no", "perhaps"]},
    {"json": {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}},
)
BAD: tuple[tuple[Any, SamplingParams], ...] = (
    ({"prompt_token_ids": list(range(7, 256)) * 2}, SamplingParams()),
    ({"prompt_token_ids": [10_000]}, SamplingParams()),
    ("a", SamplingParams(logprobs=100)),
    ("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(unclosed"))),
    ("a", SamplingParams(stop_token_ids=[10_000])),
    ("", SamplingParams()),
)


@dataclass(frozen=True, eq=False)
class Case:
    """A request whose outputs do not depend on chance."""

    prompt: Any
    params: SamplingParams


@dataclass
class Output:
    """One of a request's n outputs, put together."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    end: tuple[str | None, int | str | None] = (None, None)


@dataclass
class Ended:
    """The outputs that a reader has received."""

    outputs: dict[int, Output] = field(default_factory=dict)

    def is_beginning_of(self, whole: Ended) -> bool:
        """Return whether `whole` continues this output."""
        pairs = [(each, whole.outputs[index]) for index, each in self.outputs.items()]
        return all(
            each.token_ids == other.token_ids[: len(each.token_ids)] and other.text.startswith(each.text)
            for each, other in pairs
        )


def make_catalogue(source: random.Random, num_cases: int) -> list[Case]:
    """Return random cases."""
    return [_make_case(source) for _ in range(num_cases)]


def _make_case(source: random.Random) -> Case:
    length = source.choice((1, 5, 20, 60, LONGEST_PROMPT))
    prompt: Any = {"prompt_token_ids": [source.randrange(FIRST_PLAIN_ID, VOCAB_SIZE) for _ in range(length)]}
    if source.random() < 0.3:
        prompt = "tell me something new about the sea " * source.randint(1, 3)
    kind = source.choice(list(RequestOutputKind))
    options: dict[str, Any] = {"max_tokens": source.randint(1, 60), "output_kind": kind}
    options |= source.choice(({"temperature": 0.0}, {"temperature": 1.0, "seed": source.randrange(2**32)}))
    if options["temperature"]:
        options["n"] = source.choice((1, 1, 1, 2, 4))
        options |= source.choice(({}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05}, {"presence_penalty": 0.5}))
    rest = source.random()
    if rest < 0.2:
        options["structured_outputs"] = StructuredOutputsParams(**source.choice(GRAMMARS))
    elif rest < 0.4:
        options["stop"] = [source.choice("etaoin ") for _ in range(2)]
    elif rest < 0.6:
        options["ignore_eos"] = True
    if source.random() < 0.3:
        options["logprobs"] = source.randint(0, 5)
    if source.random() < 0.2:
        options["prompt_logprobs"] = source.randint(0, 3)
    return Case(prompt, SamplingParams(**options))


async def read(
    llm: AsyncLLM,
    case: Case,
    request_id: str,
    *,
    priority: int = 0,
    pause: float = 0.0,
    most: int | None = None,
    is_aborted: bool = False,
) -> Ended:
    """Run a case and return its outputs, waiting `pause` seconds between them.

    After `most` outputs the reader leaves, or aborts the request and reads on to its end.
    """
    is_delta = case.params.output_kind is RequestOutputKind.DELTA
    ended, num_outputs = Ended(), 0
    outputs = llm.generate(case.prompt, case.params, request_id, priority=priority)
    async for output in outputs:
        for completion in output.outputs:
            one = ended.outputs.setdefault(completion.index, Output())
            if not is_delta:
                one.token_ids, one.text, one.logprobs = [], "", []
            one.token_ids += completion.token_ids
            one.text += completion.text
            one.logprobs += completion.logprobs or []
            one.end = completion.finish_reason, completion.stop_reason
        num_outputs += 1
        if num_outputs == most:
            if not is_aborted:
                await outputs.aclose()
                return ended
            await llm.abort(request_id)
        if pause:
            await asyncio.sleep(pause)
    return ended
