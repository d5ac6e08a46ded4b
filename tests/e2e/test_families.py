"""Every family and RoPE type through `LLM`: chunked, batched, paged; log-probabilities equal HF's in float32."""

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from tests.models.tiny import BLOCK_SIZE, CASES, folder, read_goldens

TOLERANCE = 1e-4


@pytest.mark.parametrize("case", CASES)
def test_generates_what_hf_does(case: str) -> None:
    goldens = read_goldens(case)
    with LLM(
        str(folder(case)),
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=8,  # all in chunks, and one program to compile
        max_num_seqs=8,
        max_logprobs=-1,
        enforce_eager=True,
    ) as llm:
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=len(golden.tokens),
                logprobs=-1,
                ignore_eos=True,
                detokenize=False,
                prompt_logprobs=None if golden.prompt_logprobs is None else -1,
            )
            for golden in goldens
        ]
        outputs = llm.generate([{"prompt_token_ids": g.prompt.tolist()} for g in goldens], params, use_tqdm=False)
    assert max(len(golden.prompt) for golden in goldens) > 3 * BLOCK_SIZE
    for output, golden in zip(outputs, goldens, strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == golden.tokens.tolist()
        assert completion.logprobs is not None
        vocab = range(golden.logprobs.shape[1])
        got = np.array([[step[token].logprob for token in vocab] for step in completion.logprobs])
        np.testing.assert_allclose(got, golden.logprobs, rtol=0, atol=TOLERANCE)
        if golden.prompt_logprobs is not None:
            assert output.prompt_logprobs is not None
            # Row i of the golden is what follows token i; the first token follows nothing.
            scored = np.array([[step[token].logprob for token in vocab] for step in output.prompt_logprobs[1:] if step])
            np.testing.assert_allclose(scored, golden.prompt_logprobs[:-1], rtol=0, atol=TOLERANCE)
    assert any(golden.prompt_logprobs is not None for golden in goldens)
