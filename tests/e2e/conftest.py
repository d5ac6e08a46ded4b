"""The fixtures that several files of this folder use."""

from __future__ import annotations

import gc

import pytest

from jaxllm.scheduling.prompts.step_times import StepTimes
from tests.quick_engine import quick_compile

__all__ = ["estimated_costs", "no_garbage", "quick_compile"]


@pytest.fixture
def no_garbage() -> None:
    """Free the arrays that earlier tests left in cycles of references: they would go while bytes are counted."""
    gc.collect()


@pytest.fixture
def estimated_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafts cost what the platform's estimate says: which ones pay would depend on what else the machine runs."""
    monkeypatch.setattr(StepTimes, "share_of_token", lambda *_: None)
