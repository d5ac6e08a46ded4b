"""`LLM` with tiny Whispers: HF's tokens, in every form of a prompt and beside other requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.exceptions import VLLMValidationError
from jaxllm.sampling.transcripts import TranscriptRules
from jaxllm.sampling_params import BeamSearchParams
from tests.models.clips import RATE
from tests.models.whisper_cases import Golden, read_case, save_checkpoint, text_of
from tests.quick_engine import quick_compile
from tests.sampling.transcripts import ruled

__all__ = ["quick_compile"]
pytestmark = pytest.mark.families

TOLERANCE = 1e-4
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, quick_compile: None) -> LLM:
    """Have room for two requests of the longest kind, prompts in chunks, and three clips."""
    folder = save_checkpoint("base", tmp_path_factory.mktemp("whisper"))
    limits: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    return LLM(folder, dtype="float32", block_size=16, num_gpu_blocks_override=8, max_logprobs=-1, **limits)


def of(golden: Golden, clip: Golden | None = None) -> Any:
    """Return a golden's prompt, with the clip of another if there is one."""
    return {
        "prompt_token_ids": golden.prompt.tolist(),
        "multi_modal_data": {"audio": ((clip or golden).clip, RATE)},
    }


RULES = TranscriptRules(
    suppressed=(5, 8, 13, 21, 34),
    suppressed_first=(1, 40),
    first_timestamp=61,
    end_of_text=1,
    last_initial=71,
)
"""The vocabulary has 96 ids, more than a third of them timestamps."""


@pytest.fixture(scope="module")
def ruled_llm(tmp_path_factory: pytest.TempPathFactory, quick_compile: None) -> LLM:
    """Have the same model with a generation config, few blocks, and guesses of tokens that came before."""
    folder = save_checkpoint("base", tmp_path_factory.mktemp("whisper"))
    config = {
        "eos_token_id": 1,
        "suppress_tokens": list(RULES.suppressed),
        "begin_suppress_tokens": list(RULES.suppressed_first),
        "no_timestamps_token_id": RULES.first_timestamp - 1,
        "max_initial_timestamp_index": 10,
    }
    Path(folder, "generation_config.json").write_text(json.dumps(config))
    limits: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    return LLM(folder, dtype="float32", block_size=16, num_gpu_blocks_override=6, speculative_config=guesses, **limits)


def check(output: Any, golden: Golden) -> None:
    for completion in output.outputs:
        assert list(completion.token_ids) == golden.tokens.tolist()
        logprobs = [step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        expected = golden.logprobs[len(golden.prompt) - 1 :].max(axis=-1)
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=TOLERANCE)


def test_tokens_match_hf_alone_and_beside_others(llm: LLM) -> None:
    goldens = read_case("base").goldens
    for golden in goldens:
        check(llm.generate(of(golden), PARAMS)[0], golden)
    several = [*goldens, *reversed(goldens)] * 2  # more than there is room for
    for output, golden in zip(llm.generate([of(each) for each in several], PARAMS), several, strict=True):
        check(output, golden)


def test_a_prompt_is_computed_anew_for_another_clip(llm: LLM) -> None:
    first, *_, long = read_case("base").goldens
    assert len(long.prompt) > 16, "the prompt fills no block"
    assert llm.reset_prefix_cache()
    [other] = llm.generate(of(long, clip=first), PARAMS)
    [output] = llm.generate(of(long), PARAMS)
    check(output, long)
    assert not output.num_cached_tokens
    with pytest.raises(AssertionError):
        check(other, long)
    [again] = llm.generate(of(long), PARAMS)
    check(again, long)
    assert again.num_cached_tokens == 16


def test_all_outputs_of_a_request_share_its_clip(llm: LLM) -> None:
    golden = read_case("base").goldens[-1]
    params = SamplingParams(n=3, temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)
    [output] = llm.generate(of(golden), params)
    assert len(output.outputs) == 3
    check(output, golden)


def test_prompts_are_scored_as_hf_scores_them(llm: LLM) -> None:
    for golden in read_case("base").goldens[::2]:
        [output] = llm.generate(of(golden), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
        first, *scored = output.prompt_logprobs or []
        assert first is None
        assert len(scored) == len(golden.prompt) - 1
        for row, (token, of_row) in enumerate(zip(golden.prompt[1:].tolist(), scored, strict=True)):
            assert of_row is not None
            assert abs(of_row[token].logprob - golden.logprobs[row, token]) < TOLERANCE


def test_beams_share_their_clip(llm: LLM) -> None:
    """With one beam a search is greedy."""
    golden = read_case("base").goldens[0]
    params = BeamSearchParams(beam_width=1, max_tokens=len(golden.tokens), ignore_eos=True)
    [output] = llm.beam_search([of(golden)], params)
    assert output.sequences[0].tokens == [*golden.prompt.tolist(), *golden.tokens.tolist()]
    params = BeamSearchParams(beam_width=3, max_tokens=len(golden.tokens), ignore_eos=True)
    [wider] = llm.beam_search([of(golden)], params)
    assert wider.sequences[0].cum_logprob >= output.sequences[0].cum_logprob - TOLERANCE


def test_all_forms_of_a_prompt_are_read(llm: LLM) -> None:
    golden = read_case("base").goldens[0]
    audio = {"audio": (golden.clip, RATE)}
    ids, text = golden.prompt.tolist(), text_of(golden.prompt.tolist())
    for decoder in (text, ids, {"prompt": text}, {"prompt_token_ids": ids}, ids[1:]):
        prompt: Any = {"encoder_prompt": {"prompt": "", "multi_modal_data": audio}, "decoder_prompt": decoder}
        [output] = llm.generate(prompt, PARAMS)
        assert output.prompt_token_ids == ids
        check(output, golden)
    stereo = np.stack((golden.clip, golden.clip), axis=1), RATE
    for sound in ([audio["audio"]], stereo):
        flat: Any = {"prompt": text, "multi_modal_data": {"audio": sound}}
        check(llm.generate(flat, PARAMS)[0], golden)


@pytest.mark.parametrize("rest", [{}, {"logprobs": 0}, {"top_k": 20}, {"presence_penalty": 1e-9}], ids=str)
def test_outputs_follow_the_rules_of_transcripts(llm: LLM, ruled_llm: LLM, rest: dict[str, Any]) -> None:
    """A model without rules scores what came out, and each token is the likeliest that the rules leave."""
    rng, mark = np.random.default_rng(), RULES.first_timestamp - 1
    prompts: list[Any] = []
    for index, golden in enumerate([*read_case("base").goldens] * 3):
        ids = [2, *rng.integers(3, mark, 3).tolist(), *[mark] * (index > 5)]
        prompts.append({"prompt_token_ids": ids, "multi_modal_data": {"audio": (golden.clip, RATE)}})
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **rest)
    outputs = ruled_llm.generate(prompts, greedy)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens, ids = list(output.outputs[0].token_ids), prompt["prompt_token_ids"]
        scored: Any = {**prompt, "prompt_token_ids": [*ids, *tokens]}
        [scores] = llm.generate(scored, SamplingParams(max_tokens=1, prompt_logprobs=-1))
        for index, token in enumerate(tokens):
            row = (scores.prompt_logprobs or [])[len(ids) + index]
            assert row is not None
            logprobs = np.array([row[each].logprob for each in range(96)], np.float32)
            left = ruled(logprobs, tokens[:index], RULES, has_timestamps=mark not in ids)
            assert left[token] >= left.max() - TOLERANCE, f"{tokens} at {index}"


def test_allowed_tokens_stand_above_the_rules_of_transcripts(ruled_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, allowed_token_ids=[5, 40])
    [output] = ruled_llm.generate(of(read_case("base").goldens[0]), params)
    assert set(output.outputs[0].token_ids) <= {5, 40}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("w3 w4", "sound"),
        ({"prompt": "w3"}, "sound"),
        ({"encoder_prompt": "w3", "decoder_prompt": "w4"}, "sound alone"),
        ({"encoder_prompt": {"prompt": ""}, "decoder_prompt": "w4", "prompt": "w5"}, "'prompt'"),
        ({"prompt": "w3", "multi_modal_data": {"image": 3}}, "audio alone"),
        ({"prompt": "w3", "multi_modal_uuids": {"audio": "x"}}, "multi_modal_uuids"),
        ({"encoder_prompt": {"mm_processor_kwargs": {"fps": 1}}, "decoder_prompt": "w4"}, "mm_processor_kwargs"),
        ({"encoder_prompt": {"prompt": ""}, "decoder_prompt": {"multi_modal_data": {"audio": 1}}}, "belong"),
        ({"prompt": "w3", "multi_modal_data": {"audio": [(np.zeros(999), RATE)] * 2}}, "At most 1"),
        ({"prompt": "w3", "multi_modal_data": {"audio": (np.zeros(RATE + 1), RATE)}}, "longer than 1 s"),
        ({"prompt": "w3", "multi_modal_data": {"audio": (np.zeros(9), RATE)}}, "less than 0.01 s"),
        (
            {"prompt": "w3", "multi_modal_data": {"audio": (np.zeros(0), RATE)}},
            r"\['audio'\]: the audio has no samples",
        ),
        ({"prompt": "w3", "multi_modal_data": {"audio": (np.full(999, np.nan), RATE)}}, "not a number"),
        ({"prompt": "w3", "multi_modal_data": {"audio": "clip.wav"}}, "must be"),
        ({"prompt": "w3 " * 60, "multi_modal_data": {"audio": (np.zeros(999), RATE)}}, "48"),
    ],
)
def test_other_prompts_are_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        llm.generate(prompt, PARAMS)
