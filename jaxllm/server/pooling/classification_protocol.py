"""The types of classification: the request, and the answer with labels and probabilities."""

from __future__ import annotations

import time

import msgspec

from jaxllm.server.openai.usage import UsageInfo
from jaxllm.server.pooling.pooling_protocol import InputFields


class ClassificationRequest(InputFields, kw_only=True):
    """The request of `/classify`."""


class ClassificationData(msgspec.Struct, frozen=True, kw_only=True):
    """The class of one input."""

    index: int
    label: str | None
    """The name of the most likely class; None if the model has no names."""
    probs: list[float]
    num_classes: int


class ClassificationResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/classify`."""

    id: str
    object: str = "list"
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    model: str
    data: list[ClassificationData]
    usage: UsageInfo
