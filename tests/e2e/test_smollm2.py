"""SmolLM2-135M-Instruct from its GGUF equals HF Transformers in float32."""

from jaxllm import LLM
from tests.e2e.goldens import FLOAT32, assert_equal_to_hf, assert_top5_close, generate_rows, load_rows

ROWS = load_rows("smollm2-135m-instruct-q4_1")


def test_the_goldens_cover_what_they_should() -> None:
    lengths = [len(row["prompt_ids"]) for row in ROWS]
    assert len(ROWS) == 32
    assert min(lengths) <= 3
    assert max(lengths) >= 1490
    assert sum(length > 3 * 128 for length in lengths) >= 10
    assert sum(row["is_chat"] for row in ROWS) == 5


def test_float32_equals_hf(smollm2_path: str) -> None:
    with LLM(smollm2_path, **FLOAT32) as llm:
        assert_equal_to_hf(generate_rows(llm, ROWS), ROWS)


def test_bfloat16_is_close_to_hf(smollm2_path: str) -> None:
    llm = LLM(smollm2_path, dtype="bfloat16", enforce_eager=True, max_num_batched_tokens=512, max_num_seqs=16)
    rows = [row for row in ROWS if len(row["prompt_ids"]) <= 300][::2]
    assert_top5_close(generate_rows(llm, rows, max_tokens=16), rows)
    llm.shutdown()
