"""Tests of the engine's front half share a tokenizer of bytes, a core that computes nothing, and an `LLM` over both."""

from __future__ import annotations

import pytest

from jaxllm.llm import LLM
from jaxllm.text.tokenizer import Tokenizer
from tests.engine.fake_core import FakeCore, hashed_tokens
from tests.engine.support import byte_level, make_llm


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture
def core() -> FakeCore:
    return FakeCore(lambda request: hashed_tokens(request, 260, 320), running=4)


@pytest.fixture
def llm(core: FakeCore, tokenizer: Tokenizer) -> LLM:
    return make_llm(core, tokenizer)
