"""The engines that tests of the asynchronous engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxllm.engine.async_llm import AsyncLLM
from tests.async_engine.support import mock_llm, tiny_args
from tests.e2e.tiny_tokenizer import save_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tokenizer of 256 tokens."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def mock(tokenizer: str) -> Iterator[AsyncLLM]:
    """Return an engine whose core is a thread without a model, with 200 tokens a second for each of 16 streams."""
    with mock_llm(tiny_args(tokenizer), tokens_per_second=200) as llm:
        yield llm
