"""A fake engine answers at once: the prompt backwards, then the request's seed; it finishes last in, first out.

A regex fails to compile, when the request is taken or later, as the time that the caller gives it allows. With settings
of pooling it gives vectors instead: the numbers of characters and of words, and the constant 0.1; "NaN" fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np

from jaxllm.engine.front.front_end import FrontEnd
from jaxllm.exceptions import VLLMValidationError
from jaxllm.logprobs import Logprob
from jaxllm.outputs import AnyOutput, CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.resolve.pooling_settings import PoolingSettings
from jaxllm.resolve.vllm_config import ModelConfig, VllmConfig
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.prompts import ParsedPrompt
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.support import make_ready


class FakeEngine:
    """Finishes `per_step` requests a step; raises `crash` in the step after `crash_after` requests."""

    def __init__(
        self,
        *,
        per_step: int = 3,
        tokenizer: Tokenizer | None = None,
        crash: BaseException | None = None,
        crash_after: int = 0,
        pooling: PoolingSettings | None = None,
        **settings: Any,
    ) -> None:
        ready = msgspec.structs.replace(make_ready(max_num_seqs=4, **settings), pooling=pooling)
        self.front = FrontEnd(ready, tokenizer, None)
        self.requests: list[tuple[str, Any, Any, int]] = []
        self.tokenization_kwargs: list[Mapping[str, Any] | None] = []
        self.aborted: list[str] = []
        self.most_waiting = 0
        self.num_shutdowns = 0
        self._per_step = per_step
        self._crash, self._crash_after = crash, crash_after
        self._waiting: list[tuple[str, Any, Any]] = []

    @property
    def vllm_config(self) -> VllmConfig:
        return self.front.ready.vllm_config

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        *,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        grammar_seconds: float = 0.05,
    ) -> str:
        assert lora_request is None
        text = prompt.text if isinstance(prompt, ParsedPrompt) else prompt.get("prompt")
        if text is not None and len(text) > 100:
            raise VLLMValidationError("the prompt is too long.", parameter="prompt", value=len(text))
        if _has_regex(params) and grammar_seconds:
            raise VLLMValidationError("params: the regex does not compile.", parameter="regex")
        self.tokenization_kwargs.append(tokenization_kwargs)
        self.requests.append((request_id, prompt, params, priority))
        self._waiting.append((request_id, text, params))
        self.most_waiting = max(self.most_waiting, len(self._waiting))
        return request_id

    def step(self) -> list[AnyOutput]:
        finished = len(self.requests) - len(self._waiting)
        if self._crash is not None and finished >= self._crash_after:
            raise self._crash
        taken = [self._waiting.pop() for _ in range(min(self._per_step, len(self._waiting)))]
        return [self._answer(*request) for request in taken]

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting)

    def abort_request(self, request_ids: str) -> None:
        self.aborted.append(request_ids)
        self._waiting = [request for request in self._waiting if request[0] != request_ids]

    def align(self, prompt: Any, token_ids: Sequence[int]) -> NoReturn:
        raise NotImplementedError("no test of this engine aligns words")

    def shutdown(self) -> None:
        self.num_shutdowns += 1

    @staticmethod
    def _answer(request_id: str, text: str | None, params: Any) -> AnyOutput:
        if isinstance(params, PoolingParams):
            vector = np.array([len(text or ""), len((text or "").split()), 0.1], np.float32)
            error = "no finite numbers" if text == "NaN" else None
            return PoolingRequestOutput(request_id, PoolingOutput(vector), [1, 2], 0, True, error)
        outputs = [
            CompletionOutput(
                index,
                f"{(text or '')[::-1]}|{params.seed}",
                [7, 8, 9],
                None if params.logprobs is None else -1.5,
                None if params.logprobs is None else [{7: Logprob(-0.5, 1, "x")}],
                finish_reason="error" if _has_regex(params) else "length" if params.max_tokens == 16 else "stop",
                stop_reason="the regex does not compile" if _has_regex(params) else None,
            )
            for index in range(params.n)
        ]
        return RequestOutput(request_id, text, [1, 2], None, outputs, True)


def _has_regex(params: Any) -> bool:
    grammar = params.structured_outputs if isinstance(params, SamplingParams) else None
    return grammar is not None and bool(grammar.regex)
