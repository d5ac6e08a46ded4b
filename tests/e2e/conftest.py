"""The fixtures that several files of this folder use."""

from __future__ import annotations

import gc

import pytest

from tests.quick_engine import quick_compile

__all__ = ["no_garbage", "quick_compile"]


@pytest.fixture
def no_garbage() -> None:
    """Free the arrays that earlier tests left in cycles of references: they would go while bytes are counted."""
    gc.collect()
