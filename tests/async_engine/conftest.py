"""The engines that tests of the asynchronous engine share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from tests.async_engine.support import mock_llm, tiny_args
from tests.e2e.tiny_tokenizer import save_tokenizer


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder() -> Iterator[None]:
    """Give each worker a folder of its own: what its engines leave behind is not mixed with that of others."""
    with tempfile.TemporaryDirectory(prefix="jx-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)  # for processes that are started
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tokenizer of 256 tokens."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def mock(tokenizer: str) -> Iterator[AsyncLLM]:
    """Return an engine whose core is a thread without a model, with 200 tokens a second for each of 16 streams."""
    with mock_llm(tiny_args(tokenizer), tokens_per_second=200) as llm:
        yield llm
