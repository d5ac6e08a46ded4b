"""Gemma 3 270M from its GGUF (Q4_K, Q6_K) equals HF Transformers in float32: sliding and global layers, 262 k ids."""

from typing import Any

import pytest

from jaxllm import LLM
from tests.e2e.goldens import assert_equal_to_hf, assert_top5_close, generate_rows, load_rows

pytestmark = pytest.mark.device

ROWS = load_rows("gemma-3-270m-q4_k_m")


# Few buckets: most of the time goes into programs.
SMALL: dict[str, Any] = {
    "enforce_eager": True,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "cudagraph_capture_sizes": [16],
}


def test_float32_equals_hf(gemma_path: str) -> None:
    with LLM(gemma_path, dtype="float32", **SMALL) as llm:
        assert_equal_to_hf(generate_rows(llm, ROWS), ROWS)


def test_bfloat16_is_close_to_hf(gemma_path: str) -> None:
    rows = [row for row in ROWS if len(row["prompt_ids"]) <= 300][::2]
    with LLM(gemma_path, dtype="bfloat16", **SMALL) as llm:
        assert_top5_close(generate_rows(llm, rows, max_tokens=16), rows)
