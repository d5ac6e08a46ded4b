"""Serve classification."""

from __future__ import annotations

from typing import Any

from jaxllm.outputs import PoolingRequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.server.http.caller import Caller
from jaxllm.server.pooling.classification_protocol import (
    ClassificationData,
    ClassificationRequest,
    ClassificationResponse,
)
from jaxllm.server.pooling.requests import PooledRequests, usage_of


class ServingClassification:
    """Answers classification requests."""

    def __init__(self, pooled: PooledRequests, *, tells_cached: bool) -> None:
        self._pooled, self._tells_cached = pooled, tells_cached

    async def answer(self, request: ClassificationRequest, caller: Caller) -> ClassificationResponse:
        """Answer a request. Raises exceptions that `error_response` handles."""
        self._pooled.models.check(request.model)
        params = PoolingParams(task="classify", use_activation=request.use_activation)
        outputs = await self._pooled.run_inputs(request, params, caller)
        return ClassificationResponse(
            id=caller.shown_id("classify", request.request_id),
            model=self._pooled.models.shown(request.model),
            data=[self._item(i, each) for i, each in enumerate(outputs)],
            usage=usage_of(outputs, tells_cached=self._tells_cached),
        )

    def _item(self, index: int, output: PoolingRequestOutput[Any]) -> ClassificationData:
        probs = output.outputs.data
        label = self._pooled.settings.id2label.get(str(int(probs.argmax())))
        return ClassificationData(index=index, label=label, probs=probs.tolist(), num_classes=len(probs))
