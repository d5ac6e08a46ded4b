"""Prompts with pictures through `LLM`: log-probabilities equal HF's, whatever steps and blocks they are computed in.

One engine per family computes alike to the bit in every step, so that each test may also hold another's outputs to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.inputs import PromptType
from tests.e2e.inside import limited
from tests.e2e.media_goldens import (
    FAMILIES,
    NAMES,
    WITH_VIDEO,
    MediaGolden,
    folder,
    logprobs_of,
    picture,
    read_golden,
    video,
)
from tests.e2e.media_rows import made_rows
from tests.e2e.pictures import draw
from tests.e2e.tiny_engine import RecordingScheduler, bits, tiny_llm

pytestmark = pytest.mark.families

TOLERANCE = 1e-4
BLOCK_SIZE = 16
WHOLE = 320
"""Tokens a step: more than the longest prompt."""
BOTH_SIDES = {"gemma3": 48, "gemma4": 80, "gemma4_moe": 80, "gemma4_unified": 80}
"""Families with pictures that are attended to from both sides: the tokens of a step that takes one, but not two."""
IN_CHUNKS = ("llama4",)
"""Families whose prompts are always cut: a step ends where a chunk of attention does."""
CHUNKED = 16
"""Tokens a step in the other families: fewer than a picture's rows."""


@dataclass(frozen=True)
class Engine:
    """An engine of a family, and its goldens by name."""

    family: str
    llm: LLM
    scheduler: RecordingScheduler
    goldens: dict[str, MediaGolden]

    def prompt(self, name: str, pictures: Sequence[Image.Image] | None = None) -> dict[str, Any]:
        """Return a golden's prompt as token ids, by default with its own pictures."""
        golden = self.goldens[name]
        shown = [picture(self.family, number) for number in golden.pictures] if pictures is None else list(pictures)
        return {"prompt_token_ids": golden.ids.tolist()} | ({"multi_modal_data": {"image": shown}} if shown else {})

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
        "enable_mm_embeds": True,
    }
    with tiny_llm(folder(family), **arguments) as (llm, scheduler):
        yield Engine(family, llm, scheduler, {name: read_golden(family, name) for name in NAMES})


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[str, RequestOutput]:
    """Run every golden alone, its prompt whole."""
    outputs = engine.run_alone([engine.prompt(name) for name in NAMES])
    num_chunks = {engine.scheduler.num_prompt_chunks(output.request_id) for output in outputs}
    assert num_chunks == {1} or engine.family in IN_CHUNKS
    assert {output.num_cached_tokens for output in outputs} == {0}
    return dict(zip(NAMES, outputs, strict=True))


def check(golden: MediaGolden, output: RequestOutput) -> None:
    """Compare what the model saw, tokens and log-probabilities with HF's."""
    assert output.prompt_token_ids == golden.expanded.tolist()
    completion = output.outputs[0]
    count = len(golden.tokens)
    assert list(completion.token_ids[:count]) == golden.tokens.tolist()
    np.testing.assert_allclose(logprobs_of(output)[:count], golden.logprobs, rtol=0, atol=TOLERANCE)


def spans(golden: MediaGolden) -> list[range]:
    """Return where pictures' rows are in the expanded prompt: each run of the token that stands for a row."""
    row_token = np.bincount(golden.expanded).argmax()
    step_t = np.diff((golden.expanded == row_token).astype(int), prepend=0, append=0)
    starts, ends = np.flatnonzero(step_t == 1), np.flatnonzero(step_t == -1)
    return [range(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_whole_prompts(engine: Engine, alone: dict[str, RequestOutput], name: str) -> None:
    check(engine.goldens[name], alone[name])


@pytest.mark.parametrize("name", ["two", "turn"])
def test_prompt_as_text(engine: Engine, alone: dict[str, RequestOutput], name: str) -> None:
    """The text of a prompt and its token ids are expanded alike."""
    data = engine.prompt(name)["multi_modal_data"]
    [output] = engine.run_alone([{"prompt": engine.goldens[name].text, "multi_modal_data": data}])
    assert output.prompt_token_ids == engine.goldens[name].expanded.tolist()
    assert bits(output) == bits(alone[name])


def test_chunked(engine: Engine, alone: dict[str, RequestOutput]) -> None:
    """Chunks end inside a picture where a row attends to the rows before it alone, and never inside of others."""
    names = ("two", "turn")
    engine.forget()
    with limited(engine.scheduler, BOTH_SIDES.get(engine.family, CHUNKED)):
        outputs = engine.run([engine.prompt(name) for name in names])
    for name, output in zip(names, outputs, strict=True):
        golden = engine.goldens[name]
        assert engine.scheduler.num_prompt_chunks(output.request_id) > 1
        [sequence] = engine.scheduler.sequence_ids[output.request_id]
        chunks = [chunk for plan in engine.scheduler.plans for chunk in plan.chunks if chunk.request_id == sequence]
        is_cut = any(chunk.start in span[1:] for span in spans(golden) for chunk in chunks)
        assert is_cut == (engine.family not in BOTH_SIDES)
        check(golden, output)
        assert bits(output) == bits(alone[name])


def test_prefix_cache(engine: Engine, alone: dict[str, RequestOutput]) -> None:
    """Blocks are found again for the same picture, and not for another one of its size."""
    golden = engine.goldens["one"]
    engine.forget()
    engine.run([engine.prompt("one")])
    [again] = engine.run([engine.prompt("one")])
    assert again.num_cached_tokens == (len(golden.expanded) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert bits(again) == bits(alone["one"])
    other_picture = Image.fromarray(draw(*picture(engine.family, 0).size, seed=9))
    [other] = engine.run([engine.prompt("one", [other_picture])])
    assert other.num_cached_tokens is not None
    assert other.num_cached_tokens <= spans(golden)[0].start // BLOCK_SIZE * BLOCK_SIZE
    assert other.prompt_token_ids == again.prompt_token_ids
    assert np.abs(logprobs_of(other) - logprobs_of(again)).max() > 100 * TOLERANCE


def test_preempted(engine: Engine, alone: dict[str, RequestOutput]) -> None:
    """All requests are preempted in the middle of their pictures, and again as they answer."""
    engine.forget()
    llm_engine, before = engine.llm.llm_engine, engine.scheduler.stats().num_preemptions
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=-1, ignore_eos=True)
    for name in NAMES:
        llm_engine.add_request(name, cast("PromptType", engine.prompt(name)), params)
    outputs: dict[str, RequestOutput] = {}
    with limited(engine.scheduler, BOTH_SIDES.get(engine.family, CHUNKED)):
        for step in itertools.count():
            outputs |= {output.request_id: cast("RequestOutput", output) for output in llm_engine.step()}
            if step in (4, 24):
                llm_engine.reset_prefix_cache(reset_running_requests=True)
            if not llm_engine.has_unfinished_requests():
                break
    assert engine.scheduler.stats().num_preemptions > before + 1
    for name, output in outputs.items():
        check(engine.goldens[name], output)
        assert logprobs_of(output).tobytes() == logprobs_of(alone[name]).tobytes()


@pytest.mark.parametrize("name", ["two", "turn"])
def test_computed_embeddings(engine: Engine, alone: dict[str, RequestOutput], name: str) -> None:
    """Rows that the tower has made give what the pictures give; they are written as they are, and found again."""
    media = engine.scheduler.media
    assert media.forget_all()
    engine.scheduler.plans.clear()
    engine.run_alone([engine.prompt(name)])
    data = made_rows(engine.llm, engine.scheduler, engine.family, engine.goldens[name])
    prompt = engine.prompt(name) | {"multi_modal_data": {"image": data}}
    assert media.forget_all()
    engine.scheduler.plans.clear()
    output, again = engine.run_alone([prompt, prompt])
    written = [encode for plan in engine.scheduler.plans for encode in plan.encodes]
    assert [encode.item.is_encoded for encode in written] == [True] * len(set(engine.goldens[name].pictures))
    assert output.prompt_token_ids == engine.goldens[name].expanded.tolist()
    assert bits(output) == bits(again) == bits(alone[name])


def test_among_seven_others(engine: Engine) -> None:
    """Eight requests with pictures and without, that share some of their pictures, give what each gives alone."""
    pictures = [picture(engine.family, number) for number in range(3)]
    prompts = [engine.prompt(name) for name in NAMES]
    prompts += [engine.prompt("one", pictures[1:2]), engine.prompt("two", pictures[:2])]
    prompts += [engine.prompt("two", pictures[::-2]), engine.prompt("turn", pictures)]
    expected = engine.run_alone(prompts)
    engine.forget()
    engine.scheduler.plans.clear()
    outputs = engine.run(prompts)
    assert max(len(plan.chunks) for plan in engine.scheduler.plans) == len(prompts)
    assert [bits(output) for output in outputs] == [bits(output) for output in expected]


def test_video(engine: Engine) -> None:
    """A video's frames, and the texts between them, are those of HF, whether the prompt is whole, ids, or in chunks."""
    if engine.family not in WITH_VIDEO:
        pytest.skip("no golden with a video")
    golden = read_golden(engine.family, "video")
    data = {"multi_modal_data": {"video": video(engine.family)}}
    prompts: list[dict[str, Any]] = [{"prompt": golden.text} | data, {"prompt_token_ids": golden.ids.tolist()} | data]
    whole, of_ids = engine.run_alone(prompts)
    check(golden, whole)
    assert of_ids.prompt_token_ids == whole.prompt_token_ids
    assert bits(of_ids) == bits(whole)
    engine.forget()
    with limited(engine.scheduler, BOTH_SIDES.get(engine.family, CHUNKED)):
        [cut] = engine.run(prompts[:1])
    assert engine.scheduler.num_prompt_chunks(cut.request_id) > 1
    assert bits(cut) == bits(whole)
    frames, metadata = video(engine.family)
    later = metadata | {"frames_indices": [index + 1 for index in metadata["frames_indices"]]}
    backwards = {"prompt": golden.text, "multi_modal_data": {"video": (frames[::-1], later)}}
    [again, other] = engine.run([prompts[0], backwards])
    assert bits(again) == bits(whole)
    assert np.abs(logprobs_of(other) - logprobs_of(again)).max() > 100 * TOLERANCE


def test_two_sequences(engine: Engine) -> None:
    """Both sequences of a request continue from the picture, as their tokens would behind its prompt."""
    golden = engine.goldens["two"]
    engine.forget()
    [output] = engine.run([engine.prompt("two")], n=2, temperature=1.0, seed=1, max_tokens=3)
    assert output.outputs[0].token_ids != output.outputs[1].token_ids
    for index, completion in enumerate(output.outputs):
        logprobs = logprobs_of(output, index)
        np.testing.assert_allclose(logprobs[0], golden.logprobs[0], rtol=0, atol=TOLERANCE)
        prompt = engine.prompt("two")
        prompt["prompt_token_ids"] = [*prompt["prompt_token_ids"], *completion.token_ids[:2]]
        [longer] = engine.run_alone([prompt], max_tokens=1)
        np.testing.assert_allclose(logprobs_of(longer)[0], logprobs[2], rtol=0, atol=TOLERANCE)
