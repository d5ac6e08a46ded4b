"""A fixture for engines of tiny models in a test's own process: they compile in half the time, to slower code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.execution.programs import compiler
from tests.quick import QUICK_COMPILE


@pytest.fixture(scope="module")
def quick_compile() -> Iterator[None]:
    """Let the engines that a module starts in its own process compile in half the time, to slower code.

    Tests of tiny models spend most of their time compiling. Those that look at speed or at the last bits don't use it.
    """
    options = compiler.compiler_options

    def quick_options(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**(options(*args, **kwargs) or {}), **QUICK_COMPILE}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "compiler_options", quick_options)
        yield
