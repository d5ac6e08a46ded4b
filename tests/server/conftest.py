"""The engines and servers that the server's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxllm import LLM
from jaxllm.engine.online.async_llm import AsyncLLM
from tests.async_engine.support import mock_llm, tiny_args
from tests.e2e.tiny_tokenizer import save_tokenizer
from tests.server.pooled_support import CLASSIFY, CROSS, EMBED, PooledEngine
from tests.server.support import TEMPLATE, Served, served


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tokenizer of 256 tokens."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def mock(tokenizer: str) -> Iterator[AsyncLLM]:
    """Return an engine whose core is a thread without a model, with 1,000 tokens a second for each of 16 streams."""
    with mock_llm(tiny_args(tokenizer, chat_template=TEMPLATE), tokens_per_second=1000) as llm:
        yield llm


@pytest.fixture(scope="session")
def mock_server(mock: AsyncLLM) -> Iterator[Served]:
    """Return a server for that engine."""
    with served(mock) as server:
        yield server


@pytest.fixture(scope="session")
def offline(tokenizer: str) -> Iterator[LLM]:
    """Return the tiny model in the caller's thread; its values are bit-identical to the served one's."""
    with LLM.from_engine_args(tiny_args(tokenizer, chat_template=TEMPLATE, batch_invariant=True)) as llm:
        yield llm


@pytest.fixture(scope="session")
def tiny(tokenizer: str) -> Iterator[AsyncLLM]:
    """Return an engine with a real, tiny model, whose core is a thread."""
    args = tiny_args(tokenizer, chat_template=TEMPLATE, batch_invariant=True)
    with AsyncLLM.from_engine_args(args, disable_frontend_multiprocessing=True) as llm:
        yield llm


@pytest.fixture(scope="session")
def tiny_server(tiny: AsyncLLM) -> Iterator[Served]:
    """Return a server for that engine."""
    with served(tiny) as server:
        yield server


@pytest.fixture(scope="session")
def embedder(mock: AsyncLLM) -> PooledEngine:
    """Return an engine that makes embeddings of prompts' ids."""
    return PooledEngine(mock, EMBED)


@pytest.fixture(scope="session")
def embedding_server(embedder: PooledEngine) -> Iterator[Served]:
    """Return a server for that engine."""
    with served(embedder) as server:  # type: ignore[arg-type]
        yield server


@pytest.fixture(scope="session")
def cross_server(mock: AsyncLLM) -> Iterator[Served]:
    """Return a server whose model reads both texts of a pair at once, and has no template for that."""
    with served(PooledEngine(mock, CROSS, chat_template=None)) as server:  # type: ignore[arg-type]
        yield server


@pytest.fixture(scope="session")
def classifying_server(mock: AsyncLLM) -> Iterator[Served]:
    """Return a server whose model has three classes."""
    with served(PooledEngine(mock, CLASSIFY)) as server:  # type: ignore[arg-type]
        yield server
