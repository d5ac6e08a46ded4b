"""A fake engine answers at once: the prompt backwards, then the request's seed; it finishes last in, first out.

A regex fails to compile, when the request is taken or later, as the time that the caller gives it allows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxllm.exceptions import VLLMValidationError
from jaxllm.logprobs import Logprob
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.prompts import ParsedPrompt
from jaxllm.text.tokenizer import Tokenizer


@dataclasses.dataclass
class FakeConfig:
    default_sampling_params: dict[str, Any] = dataclasses.field(default_factory=dict)
    max_num_seqs: int = 4
    seed: int = 0
    chat_template: str | None = None


class FakeEngine:
    """Finishes `per_step` requests a step; raises `crash` in the step after `crash_after` requests."""

    def __init__(
        self,
        config: FakeConfig | None = None,
        *,
        per_step: int = 3,
        tokenizer: Tokenizer | None = None,
        crash: BaseException | None = None,
        crash_after: int = 0,
    ) -> None:
        self.config = config or FakeConfig()
        self.requests: list[tuple[str, Any, SamplingParams, int]] = []
        self.most_waiting = 0
        self.num_shutdowns = 0
        self._per_step = per_step
        self._tokenizer = tokenizer
        self._crash, self._crash_after = crash, crash_after
        self._waiting: list[tuple[str, Any, SamplingParams]] = []

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, *, priority: int = 0, grammar_seconds: float = 0.05
    ) -> str:
        text = prompt.text if isinstance(prompt, ParsedPrompt) else prompt.get("prompt")
        if text is not None and len(text) > 100:
            raise VLLMValidationError("the prompt is too long.", parameter="prompt", value=len(text))
        if params.structured_outputs is not None and params.structured_outputs.regex and grammar_seconds:
            raise VLLMValidationError("params: the regex does not compile.", parameter="regex")
        self.requests.append((request_id, prompt, params, priority))
        self._waiting.append((request_id, text, params))
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        return request_id

    def step(self) -> list[RequestOutput]:
        finished = len(self.requests) - len(self._waiting)
        if self._crash is not None and finished >= self._crash_after:
            raise self._crash
        taken = [self._waiting.pop() for _ in range(min(self._per_step, len(self._waiting)))]
        return [self._answer(*request) for request in taken]

    def require_tokenizer(self) -> Tokenizer:
        assert self._tokenizer is not None
        return self._tokenizer

    def shutdown(self) -> None:
        self.num_shutdowns += 1

    @staticmethod
    def _answer(request_id: str, text: str | None, params: SamplingParams) -> RequestOutput:
        fails = params.structured_outputs is not None and params.structured_outputs.regex
        outputs = [
            CompletionOutput(
                index,
                f"{(text or '')[::-1]}|{params.seed}",
                [7, 8, 9],
                None if params.logprobs is None else -1.5,
                None if params.logprobs is None else [{7: Logprob(-0.5, 1, "x")}],
                finish_reason="error" if fails else "length" if params.max_tokens == 16 else "stop",
                stop_reason="the regex does not compile" if fails else None,
            )
            for index in range(params.n)
        ]
        return RequestOutput(request_id, text, [1, 2], None, outputs, True)
