"""`UsageContext`: vLLM's names for what an engine is used for, under vLLM's import path."""

from __future__ import annotations

from enum import StrEnum


class UsageContext(StrEnum):
    """vLLM's names for what an engine is used for. Its limits depend on that; no usage data is collected."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"

    @property
    def is_online(self) -> bool:
        """Return whether somebody waits for each token: steps are short then, and short prompts pass long ones."""
        return self in (UsageContext.API_SERVER, UsageContext.OPENAI_API_SERVER, UsageContext.ENGINE_CONTEXT)
