"""Serve scores and reranking."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from jaxllm.engine.front.scoring import ScorePlan, Scorer
from jaxllm.exceptions import VLLMValidationError
from jaxllm.outputs import ScoringRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.server.http.caller import Caller
from jaxllm.server.openai.usage import UsageInfo
from jaxllm.server.pooling.requests import PooledRequests, usage_of
from jaxllm.server.pooling.scoring_protocol import (
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    ScoreRequest,
    ScoreResponse,
    ScoreResponseData,
    ScoringFields,
)
from jaxllm.utils.async_utils import threaded_if_long


class ServingScores:
    """Answers scoring requests."""

    def __init__(self, pooled: PooledRequests, *, tells_cached: bool) -> None:
        """Score with the model; its settings must have a score type."""
        self._pooled, self._tells_cached = pooled, tells_cached
        front = pooled.engine_client.front
        self._scorer = Scorer(front)
        # As in vLLM, use only the server's template: tokenizers' templates are seldom meant for pairs.
        self._template = front.ready.chat_template if self._scorer.is_cross_encoder else None

    async def answer(self, request: ScoreRequest, caller: Caller) -> ScoreResponse:
        """Answer a request for scores. Raises exceptions that `error_response` handles."""
        self._pooled.models.check(request.model)
        scores, usage = await self._scores(request, request.sides(), caller)
        return ScoreResponse(
            id=caller.shown_id("score", request.request_id),
            model=self._pooled.models.shown(request.model),
            data=[ScoreResponseData(index=i, score=each.outputs.score) for i, each in enumerate(scores)],
            usage=usage,
        )

    async def answer_rerank(self, request: RerankRequest, caller: Caller) -> RerankResponse:
        """Answer a request for reranking. Raises exceptions that `error_response` handles."""
        self._pooled.models.check(request.model)
        request.check()
        scores, usage = await self._scores(request, ("query", "documents"), caller)
        documents = request.documents if isinstance(request.documents, list) else [request.documents]
        results = [
            RerankResult(
                index=i,
                document=RerankDocument(text=_text(document)) if request.return_documents else UNSET,
                relevance_score=score.outputs.score,
            )
            for i, (document, score) in enumerate(zip(documents, scores, strict=True))
        ]
        results.sort(key=lambda result: result.relevance_score, reverse=True)
        return RerankResponse(
            id=caller.shown_id("score", request.request_id),
            model=self._pooled.models.shown(request.model),
            usage=usage,
            results=results[: request.top_n or None],
        )

    async def _scores(
        self, request: ScoringFields, names: tuple[str, str], caller: Caller
    ) -> tuple[list[ScoringRequestOutput], UsageInfo]:
        """Return the scores of the pairs in two fields, and the token usage."""
        self._check_variables(request)
        plan = await self._plan(request, names)
        params = PoolingParams(task=plan.task, use_activation=request.use_activation)
        outputs = await self._pooled.run(request, plan.prompts, params, caller, plan.sources)
        numbers = sum(each.outputs.data.size for each in outputs)
        return await threaded_if_long(numbers, plan.scores, outputs), usage_of(outputs, tells_cached=self._tells_cached)

    async def _plan(self, request: ScoringFields, names: tuple[str, str]) -> ScorePlan:
        one, two = (getattr(request, name) for name in names)
        return await threaded_if_long(
            self._work(request, [one, two]),
            self._scorer.plan,
            one,
            two,
            chat_template=self._template,
            chat_template_kwargs=request.variables(),
            max_tokens_per_query=request.max_tokens_per_query,
            max_tokens_per_doc=request.max_tokens_per_doc,
            names=names,
        )

    def _check_variables(self, request: ScoringFields) -> None:
        for name in ("instruction", "chat_template_kwargs"):
            if getattr(request, name) and self._template is None:
                message = f"{name} has no effect: there is no template that makes a prompt of a query and a document"
                message += " (--chat-template, for a model that reads both at once)."
                raise VLLMValidationError(message, parameter=name)

    def _work(self, request: ScoringFields, pairs: list[Any]) -> int:
        """Return the number of characters to tokenize or render."""
        cuts = bool(request.max_tokens_per_query or request.max_tokens_per_doc)
        if self._template is None and not cuts and not self._scorer.tokenizes:
            return 0
        return sum(len(_text(each)) for side in pairs for each in (side if isinstance(side, list) else [side]))


def _text(document: Any) -> str:
    return str(document.get("text")) if isinstance(document, dict) else document
