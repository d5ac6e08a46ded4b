"""EmbeddingGemma 1 and 2 in folders of sentence-transformers: embeddings are the tool's, with its prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM
from tests.e2e.test_bge_m3 import OPTIONS

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("quick_compile")]

FOLDER = Path(__file__).parents[1] / "data" / "embedding_gemma"
LIMITED: dict[str, Any] = OPTIONS | {"max_model_len": 100}
"""The folders' limit, at which both tools cut."""


@pytest.mark.parametrize("case", ["first", "second"])
def test_embeddings_with_prompts(case: str) -> None:
    with np.load(FOLDER / case / "golden.npz") as arrays:
        golden = dict(arrays)
    texts = json.loads(golden["texts"].tobytes())
    with LLM(str(FOLDER / case), **LIMITED, use_tqdm_on_load=False) as llm:
        for name in (None, "query", "document"):
            options = {"truncate_prompt_tokens": -1}
            outputs = llm.embed(texts, prompt_name=name, tokenization_kwargs=options, use_tqdm=False)
            embeddings = [output.outputs.embedding for output in outputs]
            np.testing.assert_allclose(embeddings, golden[str(name)], rtol=0, atol=1e-5)
    assert np.abs(golden["query"] - golden["document"]).max() > 0.01
