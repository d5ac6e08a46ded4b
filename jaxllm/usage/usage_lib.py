"""vLLM's import path for `UsageContext`."""

from __future__ import annotations

from enum import StrEnum


class UsageContext(StrEnum):
    """vLLM's names for the user of an engine. They have no effect, since no usage data is collected."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"
