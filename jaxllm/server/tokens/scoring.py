"""Score items by the probability of a token after each of them, in vLLM's form: a reranker of any generating model."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import RequestOutput
from jaxllm.params.limits import MAX_LOGPROB_TOKEN_IDS
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.server.http.caller import Caller
from jaxllm.server.http.several import queue_all, read_all
from jaxllm.server.openai.model_tasks import check_generates
from jaxllm.server.openai.prompt_fields import PromptFields, renamed, several_prompts
from jaxllm.server.openai.serving_chat import OpenAIServingChat
from jaxllm.server.openai.usage import PromptTokensDetails, UsageInfo, make_usage
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.utils.async_utils import threaded_if_long

_NAMED = {"prompt": "items", "prompt_token_ids": "items", "logprob_token_ids": "label_token_ids"}


class GenerativeScoringRequest(PromptFields, kw_only=True):
    """The request of `/generative_scoring`."""

    query: str | list[int]
    items: list[str | list[int]]
    """The items, all texts or all token ids. Each makes a prompt with the query."""
    label_token_ids: list[int]
    """The tokens whose probabilities after a prompt are looked at; the score is that of the first one."""
    apply_softmax: bool = True
    """Whether the probabilities of the labels sum to 1; otherwise they are those among the whole vocabulary."""
    item_first: bool = False
    """Whether the items come before the query."""

    def check(self, vocab_size: int) -> None:
        """Check the fields before any work is done. Raises VLLMValidationError."""
        bad = [] if isinstance(self.query, str) else [each for each in self.query if not 0 <= each < vocab_size]
        if bad:
            message = f"query must be a text, or ids of at least 0 and less than {vocab_size}, got {bad[0]}."
            raise VLLMValidationError(message, parameter="query", value=bad[0])
        if not self.label_token_ids or len(self.label_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            message = f"label_token_ids must have 1 to {MAX_LOGPROB_TOKEN_IDS} ids, got {len(self.label_token_ids)}."
            raise VLLMValidationError(message, parameter="label_token_ids", value=len(self.label_token_ids))
        several_prompts("items", self.items)
        if len(set(map(type, self.items))) > 1:
            raise VLLMValidationError("items must be all texts or all token ids.", parameter="items")

    def score(self, output: RequestOutput) -> float:
        """Return the score of a prompt from its only new token's log-probabilities."""
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        position = logprobs[0]
        values = {token_id: position[token_id].logprob for token_id in self.label_token_ids}
        first, most = values[self.label_token_ids[0]], max(values.values())
        if not self.apply_softmax:
            return math.exp(first)
        if most == -math.inf:
            return 1 / len(values)
        return math.exp(first - most) / sum(math.exp(value - most) for value in values.values())


class GenerativeScoringItemResult(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one item."""

    index: int
    object: Literal["score"] = "score"
    score: float


class GenerativeScoringResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of all items, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    model: str
    data: list[GenerativeScoringItemResult]
    usage: UsageInfo


class ServingGenerativeScoring:
    """Answers `/generative_scoring`."""

    def __init__(self, chat: OpenAIServingChat) -> None:
        """Answer with the engine, the models and the settings of `chat`."""
        self._engine, self._models, self._args = chat.engine_client, chat.models, chat.args

    async def answer(self, request: GenerativeScoringRequest, caller: Caller) -> GenerativeScoringResponse:
        """Answer a request. Raises exceptions that `error_response` handles."""
        check_generates(self._engine, "Generative Scoring")
        self._models.check(request.model)
        request.check(self._engine.model_config.get_vocab_size())
        self._engine.admission.check_room(len(request.items))
        with renamed(_NAMED):
            outputs = await self._run(request, await self._prompts(request), caller)
        details = PromptTokensDetails.sum(map(PromptTokensDetails.of, outputs))
        num_tokens = sum(len(each.prompt_token_ids or ()) for each in outputs)
        return GenerativeScoringResponse(
            id=caller.shown_id("generative-scoring", request.request_id),
            model=self._models.shown(request.model),
            data=[GenerativeScoringItemResult(index=i, score=request.score(each)) for i, each in enumerate(outputs)],
            usage=make_usage(num_tokens, len(outputs), details if self._args.enable_prompt_tokens_details else None),
        )

    async def _prompts(self, request: GenerativeScoringRequest) -> list[list[int]]:
        """Return the prompt of each item. Special tokens, if any, come with the query, as in vLLM."""
        texts = [each for each in (request.query, *request.items) if isinstance(each, str)]
        tokenizer = self._engine.front.require_tokenizer() if texts else None
        query, *items = await threaded_if_long(sum(map(len, texts)), _encoded, request, tokenizer)
        longest = self._engine.model_config.max_model_len
        if len(query) >= longest and request.truncate_prompt_tokens is None:
            message = f"query has {len(query)} tokens, and the model's context {longest}: shorten it."
            raise VLLMValidationError(message, parameter="query", value=len(query))
        return [[*item, *query] if request.item_first else [*query, *item] for item in items]

    async def _run(
        self, request: GenerativeScoringRequest, prompts: Sequence[list[int]], caller: Caller
    ) -> list[RequestOutput]:
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprob_token_ids=request.label_token_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        salt = {} if request.cache_salt is None else {"cache_salt": request.cache_salt}
        options = {**(request.tokenization_kwargs() or {})}
        options.pop("add_special_tokens", None)  # the prompts are ids
        queued = (
            self._engine.add_request(
                f"{caller.request_id}-{i}",
                {"prompt_token_ids": prompt, **salt},
                params,
                tokenization_kwargs=options or None,
                trace_headers=caller.trace_headers,
                priority=request.priority,
                data_parallel_rank=caller.data_parallel_rank,
                lora_request=self._models.adapter(request.model),
            )
            for i, prompt in enumerate(prompts)
        )
        return await read_all(await queue_all(self._engine, queued))


def _encoded(request: GenerativeScoringRequest, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Return the ids of the query and of each item."""

    def ids(text: str | list[int], *, special: bool) -> list[int]:
        if not isinstance(text, str):
            return text
        assert tokenizer is not None
        return tokenizer.encode([text], add_special_tokens=special)[0]

    special = request.add_special_tokens is not False
    return [ids(request.query, special=special), *(ids(each, special=False) for each in request.items)]
