"""A checkpoint may have its output head where config.json says it is tied, or the head alone, or none where untied."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM
from tests.e2e.test_families import TOLERANCE, check, generate
from tests.loading.files import safetensors_bytes
from tests.models.tiny import BLOCK_SIZE, read_goldens, read_hf_config, read_tensors

pytestmark = [pytest.mark.families, pytest.mark.usefixtures("quick_compile")]

CASE = "qwen3"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write(folder: Path, *, tied: bool, leaves_out: str | None = None, head: np.ndarray | None = None) -> str:
    """Write a tiny tied checkpoint in another layout, and return its folder."""
    tensors = read_tensors(CASE)
    assert HEAD not in tensors
    tensors |= {} if head is None else {HEAD: head}
    left = {name: tensor for name, tensor in tensors.items() if name != leaves_out}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(left))
    (folder / "config.json").write_text(json.dumps(read_hf_config(CASE) | {"tie_word_embeddings": tied}))
    return str(folder)


def start(folder: str) -> LLM:
    return LLM(
        folder,
        dtype="float32",
        skip_tokenizer_init=True,
        num_gpu_blocks_override=64,
        max_logprobs=-1,
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=64,
        max_num_seqs=4,
    )


def test_a_head_that_differs_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The head is the embedding with its rows one further: so are HF's log-probabilities."""
    embedding, goldens = read_tensors(CASE)[EMBEDDING], read_goldens(CASE)
    with caplog.at_level("WARNING", "jaxllm"), start(write(tmp_path, tied=True, head=np.roll(embedding, 1, 0))) as llm:
        outputs = generate(llm, goldens)
    assert "lm_head.weight that differs" in caplog.text
    for output, golden in zip(outputs, goldens, strict=True):
        steps = output.outputs[0].logprobs
        assert steps
        first = steps[0]
        got = [first[token].logprob for token in range(len(embedding))]
        np.testing.assert_allclose(got, np.roll(golden.logprobs[0], 1), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("tied", "leaves_out", "warning"),
    [(False, None, "has no lm_head.weight"), (True, EMBEDDING, ""), (True, None, "")],
)
def test_one_table_that_is_both(
    tied: bool, leaves_out: str | None, warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Tied in fact and untied by the config; only the head stored; the same table stored twice."""
    goldens = read_goldens(CASE)
    head = read_tensors(CASE)[EMBEDDING] if tied else None
    with (
        caplog.at_level("WARNING", "jaxllm"),
        start(write(tmp_path, tied=tied, leaves_out=leaves_out, head=head)) as llm,
    ):
        check(goldens, generate(llm, goldens))
    assert warning in caplog.text
    assert warning or not caplog.text
