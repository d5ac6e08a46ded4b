"""An engine without a core, which makes outputs from the prompts' ids, for tests of pooling routes."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import numpy as np

from jaxllm.engine.online.admission import Admission, Reservation
from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import PoolingOutput, PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.resolve.pooling_settings import PoolingSettings
from tests.pooling_settings import make_settings

SIZE = 16
"""Numbers of an embedding."""
LABELS = {"0": "bad", "1": "fair", "2": "good"}


EMBED = make_settings(
    tasks=("embed", "token_embed"),
    activation="normalize",
    output_size=SIZE,
    is_matryoshka=True,
    prompts={"query": "q: ", "summary": "s: "},
    score_type="bi-encoder",
    runs_whole_tasks=("embed", "token_embed"),
)
CLASSIFY = make_settings(
    tasks=("classify", "token_classify"),
    activation="softmax",
    output_size=3,
    num_labels=3,
    id2label=LABELS,
    runs_whole_tasks=("classify", "token_classify"),
)
CROSS = msgspec.structs.replace(
    CLASSIFY, activation="sigmoid", output_size=1, num_labels=1, id2label={"0": "LABEL_0"}, score_type="cross-encoder"
)
LATE = msgspec.structs.replace(EMBED, tasks=("token_embed",), score_type="late-interaction")


class PooledEngine:
    """The parts of an `AsyncLLM` with a pooling model that a server uses."""

    def __init__(
        self,
        llm: AsyncLLM,
        settings: PoolingSettings,
        admission: Admission | None = None,
        runner: str = "pooling",
        **ready: Any,
    ) -> None:
        """Take everything but the pooling of requests from another engine; `ready` is what it says otherwise."""
        self._llm = llm
        config = llm.front.ready.vllm_config
        model_config = dataclasses.replace(config.model_config, runner_type=runner)
        ready |= {"pooling": settings, "vllm_config": dataclasses.replace(config, model_config=model_config)}
        self.front = copy.copy(llm.front)
        self.front.ready = msgspec.structs.replace(llm.front.ready, **ready)
        self.admission = admission or Admission(None, None)
        self.prompts: list[Any] = []
        """The prompts of all requests in order."""
        self.params: list[PoolingParams] = []
        self.running: list[str] = []
        self.aborted: list[str] = []
        self.is_held = False
        """Requests do not end while this is set."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        tokenization_kwargs: Any = None,
        *,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[Any], None]:
        """Run a request and yield its output."""
        del lora_request, trace_headers, data_parallel_rank
        self.front.inputs.check_priority(priority)
        reservation = Reservation(self.admission, 1)
        try:
            ids = self._encode(prompt, tokenization_kwargs)
            reservation.hold_prompt(len(ids))
            self.prompts.append(prompt)
            self.params.append(pooling_params)
            self.running.append(request_id)
            try:
                while self.is_held:
                    await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                self.aborted.append(request_id)
                raise
            finally:
                self.running.remove(request_id)
            data = output_of(self.front.ready.pooling, pooling_params, ids)
            yield PoolingRequestOutput(request_id, PoolingOutput(data), ids, num_cached_tokens=0, finished=True)
        finally:
            reservation.release()

    def _encode(self, prompt: Any, options: Any) -> list[int]:
        pair = prompt.get("text_pair") if isinstance(prompt, dict) else None
        first = prompt if pair is None else {name: value for name, value in prompt.items() if name != "text_pair"}
        ids = list(self.front.inputs.encode(first, options).token_ids)
        if pair is not None:
            ids += self.front.inputs.encode({"prompt": pair}, options).token_ids
        if len(ids) > (limit := self.front.ready.max_model_len):
            raise VLLMValidationError(f"prompt: {len(ids)} tokens are more than {limit}.", parameter="prompt")
        return ids


def output_of(settings: PoolingSettings | None, params: PoolingParams, ids: list[int]) -> np.ndarray:
    """Return the output for a prompt: one vector, or one for each token, of `output_size` numbers."""
    assert settings is not None
    assert params.task in settings.tasks
    rows = [
        np.random.default_rng(each).normal(size=settings.output_size)
        for each in ([ids] if params.task in ("embed", "classify") else [[each] for each in ids])
    ]
    values = np.stack(rows)[:, : params.dimensions]
    if params.use_activation is not False:
        if settings.activation == "softmax":
            values = np.exp(values) / np.exp(values).sum(axis=-1, keepdims=True)
        elif settings.activation == "sigmoid":
            values = 1 / (1 + np.exp(-values))
        else:
            values = values / np.linalg.norm(values, axis=-1, keepdims=True)
    return (values if params.task.startswith("token_") else values[0]).astype(np.float32)
