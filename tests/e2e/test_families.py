"""Every family and RoPE type through `LLM`: in chunks, batched, preempted, cached; log-probabilities equal HF's."""

from collections.abc import Sequence

import numpy as np
import pytest

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.engine.front.metrics import Counter
from tests.models.running import build_model
from tests.models.tiny import BLOCK_SIZE, CASES, Golden, folder, read_goldens

pytestmark = [pytest.mark.families, pytest.mark.usefixtures("quick_compile")]

TOLERANCE = 1e-4
NUM_BLOCKS = 8
"""The null block, and as many as the prompts of all three goldens take: too few for what follows them."""


@pytest.mark.parametrize("case", CASES)
def test_generates_what_hf_does(case: str) -> None:
    goldens = read_goldens(case)
    assert max(len(golden.prompt) for golden in goldens) > 3 * BLOCK_SIZE
    assert any(golden.prompt_logprobs is not None for golden in goldens)
    with LLM(
        str(folder(case)),
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=8,  # all in chunks, and one bucket to compile for
        max_num_seqs=8,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_logprobs=-1,
        enforce_eager=True,
        disable_log_stats=False,
    ) as llm:
        check(goldens, generate(llm, goldens))
        [preemptions] = [
            metric.value
            for metric in llm.get_metrics()
            if isinstance(metric, Counter) and metric.name == "vllm:num_preemptions"
        ]
        # Where layers have windows or chunks, so few blocks of theirs are left that requests wait for them.
        model = build_model(case).config
        assert preemptions or any(layer.window or layer.attention_chunk for layer in model.layers)
        longest = goldens[-1:]
        generate(llm, longest, scores=False)
        cached = generate(llm, longest, scores=False)
        assert cached[0].num_cached_tokens or any(rope.depends_on_length(256) for rope in model.ropes)
    check(longest, cached)


def generate(llm: LLM, goldens: Sequence[Golden], *, scores: bool = True) -> list[RequestOutput]:
    """Continue the goldens' prompts, with log-probabilities of the whole vocabulary; `scores` asks for the prompts'."""
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=len(golden.tokens),
            logprobs=-1,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=-1 if scores and golden.prompt_logprobs is not None else None,
        )
        for golden in goldens
    ]
    return llm.generate([{"prompt_token_ids": g.prompt.tolist()} for g in goldens], params, use_tqdm=False)


def check(goldens: Sequence[Golden], outputs: Sequence[RequestOutput]) -> None:
    """Compare tokens and log-probabilities with HF's."""
    for output, golden in zip(outputs, goldens, strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == golden.tokens.tolist()
        assert completion.logprobs is not None
        vocab = range(golden.logprobs.shape[1])
        got = np.array([[step[token].logprob for token in vocab] for step in completion.logprobs])
        np.testing.assert_allclose(got, golden.logprobs, rtol=0, atol=TOLERANCE)
        if output.prompt_logprobs is not None:
            assert golden.prompt_logprobs is not None
            # Row i of the golden is what follows token i; the first token follows nothing.
            scored = np.array([[step[token].logprob for token in vocab] for step in output.prompt_logprobs[1:] if step])
            np.testing.assert_allclose(scored, golden.prompt_logprobs[:-1], rtol=0, atol=TOLERANCE)
