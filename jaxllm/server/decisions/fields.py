"""The fields that both routes of decisions share."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from jaxllm.config.server_arguments import ServerArgs
from jaxllm.engine.decisions.decider import DecisionOptions
from jaxllm.engine.decisions.prompts import Template
from jaxllm.server.openai.prompt_fields import renamed


class DecisionFields(msgspec.Struct, kw_only=True):
    """How questions are asked and queued."""

    model: str | None = None
    instructions: str | None = None
    """Context that comes after the state, before each question."""
    calibrate: bool = False
    """Divide each option's probability by the one that it has after a state that says nothing."""
    num_orders: int = 1
    """The orders in which a question lists its options; the probabilities are averaged over them."""
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    user: str | None = None
    """It has no effect on the answer."""

    def options(self, args: ServerArgs, images: list[Any]) -> DecisionOptions:
        """Return the options of the decision, with the server's defaults. Raises VLLMValidationError."""
        variables = {**args.default_chat_template_kwargs, "enable_thinking": False, **(self.chat_template_kwargs or {})}
        template = Template(None, variables, self.cache_salt, images, args.chat_template_content_format)
        return DecisionOptions(template, self.instructions, self.calibrate, self.num_orders)


def fields_named(state: str, images: str) -> AbstractContextManager[None]:
    """Make errors raised inside name the fields of the request with the state and the images."""
    return renamed({"state": state, "prompt": state, "images": images, "messages": images})


SHARED_REFUSED: Mapping[str, str] = {
    "stream": "the answer comes at once, when all probabilities are known; leave it out",
}
"""Fields that are refused: they would change the answer and are not supported."""
