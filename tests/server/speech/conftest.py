"""A server of Whisper base, which the tests of speech share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxllm.engine.online.async_llm import AsyncLLM
from jaxllm.resolve.async_engine_args import AsyncEngineArgs
from tests.server.speech.support import MOST_BYTES
from tests.server.support import Served, served


@pytest.fixture(scope="package")
def whisper(whisper_path: str) -> Iterator[AsyncLLM]:
    """Return an engine whose core is a thread; two clips at once need few programs."""
    args = AsyncEngineArgs(
        whisper_path, dtype="float32", max_num_seqs=2, max_num_batched_tokens=16, max_num_queued_reqs=64
    )
    with AsyncLLM.from_engine_args(args, disable_frontend_multiprocessing=True) as llm:
        yield llm


@pytest.fixture(scope="package")
def server(whisper: AsyncLLM) -> Iterator[Served]:
    """Return a server for that engine, which takes sounds of MOST_BYTES."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_MAX_AUDIO_DECODE_BYTES", str(MOST_BYTES))
        with served(whisper) as started:
            yield started
