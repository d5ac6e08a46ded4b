"""Prompts with sounds through `LLM`: log-probabilities equal HF's, whatever steps and blocks they are computed in.

One engine per family computes alike to the bit in every step, so that each test may also hold another's outputs to it.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.model_runner import ModelRunner
from jaxllm.inputs import PromptType
from tests.e2e.inside import core_of, limited
from tests.e2e.media_goldens import logprobs_of
from tests.e2e.sound_goldens import (
    FAMILIES,
    NAMES,
    WITH_PICTURE,
    SoundGolden,
    folder,
    num_sounds,
    picture,
    read_golden,
    rows_of,
    sound,
)
from tests.e2e.tiny_engine import RecordingScheduler, bits, tiny_llm
from tests.media.sounds import encode
from tests.models.clips import RATE, draw_clip

pytestmark = pytest.mark.families

TOLERANCE = 1e-4
BLOCK_SIZE = 16
WHOLE = 320
"""Tokens a step: more than the longest prompt."""
CHUNKED = 16
"""Tokens a step: fewer than most sounds' rows."""
SEVERAL_CLIPS = ("glm_asr", "qwen3_asr", "ultravox", "voxtral")
"""Families with sounds of several clips."""


@dataclass(frozen=True)
class Engine:
    """An engine of a family, and its goldens by name."""

    family: str
    llm: LLM
    scheduler: RecordingScheduler
    goldens: dict[str, SoundGolden]

    def prompt(self, name: str, sounds: Sequence[np.ndarray] | None = None) -> dict[str, Any]:
        """Return a golden's prompt as token ids, by default with its own sounds."""
        golden = self.goldens[name]
        heard = [sound(self.family, number) for number in golden.sounds] if sounds is None else list(sounds)
        data: dict[str, Any] = {"audio": [(samples, RATE) for samples in heard]} if heard else {}
        data |= {"image": picture()} if name == "picture" else {}
        return {"prompt_token_ids": golden.ids.tolist()} | ({"multi_modal_data": data} if data else {})

    def run(self, prompts: Sequence[dict[str, Any]], **fields: Any) -> list[RequestOutput]:
        """Run prompts together, greedily by default, with the log-probabilities of the whole vocabulary."""
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 6, "logprobs": -1, "ignore_eos": True} | fields)
        return self.llm.generate(cast("list[PromptType]", list(prompts)), params, use_tqdm=False)

    def run_alone(self, prompts: Sequence[dict[str, Any]], **fields: Any) -> list[RequestOutput]:
        """Run prompts one after the other, each with nothing cached."""
        outputs = []
        for prompt in prompts:
            self.forget()
            outputs += self.run([prompt], **fields)
        return outputs

    def forget(self) -> None:
        """Empty the prefix cache."""
        assert self.llm.reset_prefix_cache()


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Start an engine that takes every prompt whole, with blocks in plenty."""
    family = request.param
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": False,
        "batch_invariant": True,
        "max_model_len": WHOLE,
        "max_num_batched_tokens": WHOLE,
        "cudagraph_capture_sizes": [8],
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 400,
        "max_logprobs": -1,
        "limit_mm_per_prompt": {"audio": 3},
    }
    with tiny_llm(folder(family), **arguments) as (llm, scheduler):
        names = (*NAMES, *(["picture"] if family in WITH_PICTURE else []))
        yield Engine(family, llm, scheduler, {name: read_golden(family, name) for name in names})


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[str, RequestOutput]:
    """Run every golden alone, its prompt whole."""
    outputs = engine.run_alone([engine.prompt(name) for name in engine.goldens])
    assert {engine.scheduler.num_prompt_chunks(output.request_id) for output in outputs} == {1}
    assert {output.num_cached_tokens for output in outputs} == {0}
    return dict(zip(engine.goldens, outputs, strict=True))


def check(golden: SoundGolden, output: RequestOutput) -> None:
    """Compare what the model saw, tokens and log-probabilities with HF's."""
    assert output.prompt_token_ids == golden.expanded.tolist()
    completion = output.outputs[0]
    count = len(golden.tokens)
    assert list(completion.token_ids[:count]) == golden.tokens.tolist()
    np.testing.assert_allclose(logprobs_of(output)[:count], golden.logprobs, rtol=0, atol=TOLERANCE)


def spans(golden: SoundGolden) -> list[range]:
    """Return where sounds' rows are in the expanded prompt: each run of the token that stands for a row."""
    row_token = np.bincount(golden.expanded).argmax()
    step_t = np.diff((golden.expanded == row_token).astype(int), prepend=0, append=0)
    starts, ends = np.flatnonzero(step_t == 1), np.flatnonzero(step_t == -1)
    return [range(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_whole_prompts(engine: Engine, alone: dict[str, RequestOutput], name: str) -> None:
    check(engine.goldens[name], alone[name])


def test_a_picture_beside_sounds(engine: Engine, alone: dict[str, RequestOutput]) -> None:
    """Whole, and with chunks that end inside a sound and inside the picture; each item goes to its own tower."""
    if engine.family not in WITH_PICTURE:
        pytest.skip("it does not see")
    golden = engine.goldens["picture"]
    check(golden, alone["picture"])
    assert engine.scheduler.media.forget_all()
    engine.scheduler.plans.clear()
    engine.forget()
    with limited(engine.scheduler, CHUNKED):
        [output] = engine.run([engine.prompt("picture")])
    encoded = [encode.item.modality for plan in engine.scheduler.plans for encode in plan.encodes]
    assert encoded == ["audio", "image", "audio"]
    check(golden, output)
    assert bits(output) == bits(alone["picture"])
    [changed] = engine.run_alone([engine.prompt("picture", [sound(engine.family, 0), draw_clip(1.37, 9)])])
    assert np.abs(logprobs_of(changed) - logprobs_of(output)).max() > 100 * TOLERANCE


def test_rows_are_those_of_the_tower(engine: Engine) -> None:
    """Also of a sound of several clips, which are encoded apart."""
    text = engine.goldens["one"].text
    runner = core_of(engine.llm)._runner
    assert isinstance(runner, ModelRunner)
    for number in range(num_sounds(engine.family)):
        assert engine.scheduler.media.forget_all()
        engine.scheduler.plans.clear()
        data = {"multi_modal_data": {"audio": (sound(engine.family, number), RATE)}}
        engine.run_alone([{"prompt": text} | data], max_tokens=1)
        [encoded] = [encode for plan in engine.scheduler.plans for encode in plan.encodes]
        rows = np.asarray(runner.launcher.params["media"])[list(encoded.rows)]
        np.testing.assert_allclose(rows, rows_of(engine.family, number), rtol=0, atol=TOLERANCE)
        if number == num_sounds(engine.family) - 1:
            assert (len(encoded.item.grids) > 1) == (engine.family in SEVERAL_CLIPS)


@pytest.mark.parametrize("name", ["two", "turn"])
def test_prompt_as_text(engine: Engine, alone: dict[str, RequestOutput], name: str) -> None:
    """The text of a prompt and its token ids are expanded alike."""
    data = engine.prompt(name)["multi_modal_data"]
    [output] = engine.run_alone([{"prompt": engine.goldens[name].text, "multi_modal_data": data}])
    assert output.prompt_token_ids == engine.goldens[name].expanded.tolist()
    assert bits(output) == bits(alone[name])


def test_chunked(engine: Engine, alone: dict[str, RequestOutput]) -> None:
    """Chunks may end inside a sound."""
    names = ("two", "turn")
    engine.forget()
    with limited(engine.scheduler, CHUNKED):
        outputs = engine.run([engine.prompt(name) for name in names])
    for name, output in zip(names, outputs, strict=True):
        golden = engine.goldens[name]
        [sequence] = engine.scheduler.sequence_ids[output.request_id]
        chunks = [chunk for plan in engine.scheduler.plans for chunk in plan.chunks if chunk.request_id == sequence]
        assert any(chunk.start in span[1:] for span in spans(golden) for chunk in chunks)
        check(golden, output)
        assert bits(output) == bits(alone[name])


def test_prefix_cache(engine: Engine, alone: dict[str, RequestOutput]) -> None:
    """Blocks are found again for the same sound, and not for another one of its length."""
    golden = engine.goldens["one"]
    engine.forget()
    engine.run([engine.prompt("one")])
    [again] = engine.run([engine.prompt("one")])
    assert again.num_cached_tokens == (len(golden.expanded) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert bits(again) == bits(alone["one"])
    seconds = len(sound(engine.family, 0)) / RATE
    [other] = engine.run([engine.prompt("one", [draw_clip(seconds, 9)])])
    assert other.num_cached_tokens is not None
    assert other.num_cached_tokens <= spans(golden)[0].start // BLOCK_SIZE * BLOCK_SIZE
    assert other.prompt_token_ids == again.prompt_token_ids
    assert np.abs(logprobs_of(other) - logprobs_of(again)).max() > 100 * TOLERANCE


def test_preempted(engine: Engine, alone: dict[str, RequestOutput]) -> None:
    """All requests are preempted in the middle of their sounds, and again as they answer."""
    engine.forget()
    llm_engine, before = engine.llm.llm_engine, engine.scheduler.stats().num_preemptions
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=-1, ignore_eos=True)
    for name in engine.goldens:
        llm_engine.add_request(name, cast("PromptType", engine.prompt(name)), params)
    outputs: dict[str, RequestOutput] = {}
    with limited(engine.scheduler, CHUNKED):
        for step in itertools.count():
            outputs |= {output.request_id: cast("RequestOutput", output) for output in llm_engine.step()}
            if step in (4, 12):
                llm_engine.reset_prefix_cache(reset_running_requests=True)
            if not llm_engine.has_unfinished_requests():
                break
    assert engine.scheduler.stats().num_preemptions > before + 1
    for name, output in outputs.items():
        check(engine.goldens[name], output)
        assert logprobs_of(output).tobytes() == logprobs_of(alone[name]).tobytes()


def test_among_seven_others(engine: Engine) -> None:
    """Eight requests with sounds and without, that share some of their sounds, give what each gives alone."""
    sounds = [sound(engine.family, number) for number in range(3)]
    prompts = [engine.prompt(name) for name in engine.goldens]
    prompts += [engine.prompt("one", sounds[1:2]), engine.prompt("two", sounds[:2])]
    prompts += [engine.prompt("two", sounds[::-2]), engine.prompt("turn", sounds)]
    expected = engine.run_alone(prompts)
    engine.forget()
    engine.scheduler.plans.clear()
    outputs = engine.run(prompts)
    assert max(len(plan.chunks) for plan in engine.scheduler.plans) > 1
    assert [bits(output) for output in outputs] == [bits(output) for output in expected]


def test_conversations(engine: Engine) -> None:
    """The parts of a conversation, in all forms, are what the model's own template makes of them."""
    samples = np.round(sound(engine.family, 0) * 32_000) / 32_768  # a WAV file of 16 bits has these
    data = base64.b64encode(encode(samples[:, None].astype(np.float32), RATE)).decode()
    question = {"type": "text", "text": "Tell me what is said."}
    forms: list[dict[str, Any]] = [
        {"type": "audio", "audio": (samples, RATE)},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
    ]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=-1, ignore_eos=True)
    outputs = []
    for part in forms:
        messages: Any = [{"role": "user", "content": [part, question]}]
        engine.forget()
        outputs += engine.llm.chat(messages, params, use_tqdm=False)
    row_token = np.bincount(engine.goldens["one"].expanded).argmax()
    number = len(rows_of(engine.family, 0))
    for output in outputs:
        assert output.prompt_token_ids is not None
        assert output.prompt_token_ids.count(int(row_token)) == number
        assert bits(output) == bits(outputs[0])


def test_what_is_refused(engine: Engine) -> None:
    with pytest.raises(VLLMValidationError, match=r"\['audio'\]\[3\]: At most 3 audio\(s\) may be provided"):
        engine.run([engine.prompt("turn", [sound(engine.family, 0)] * 4)])
    if engine.family not in WITH_PICTURE:
        with pytest.raises(VLLMValidationError, match=r"\['image'\]\[0\]: At most 0 image\(s\) may be provided"):
            engine.run([{"prompt": "a", "multi_modal_data": {"image": np.zeros((4, 4, 3), np.uint8)}}])
    mark = engine.goldens["one"].text.replace("Tell me what is said.", "")
    with pytest.raises(VLLMValidationError, match=r"must not have .* in a text: send the item as a part"):
        engine.llm.chat([{"role": "user", "content": f"{mark}Hear?"}], use_tqdm=False)
