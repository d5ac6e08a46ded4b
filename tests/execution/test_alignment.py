"""Transcripts are aligned as HF aligns them: tiny models, all ways through layers, several devices."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm.core_messages import Alignment, Clip
from jaxllm.exceptions import VLLMValidationError
from jaxllm.execution.encoders.alignment import _smooth, align_inputs, run_alignment
from jaxllm.execution.mesh import make_mesh
from jaxllm.models import LayerLoop
from jaxllm.speech.words import time_tokens
from tests.models.running import load
from tests.models.whisper_cases import Golden, read_case
from tests.quick import QUICK_COMPILE

GOLDENS = np.load(Path(__file__).parents[1] / "data" / "alignment" / "tiny.npz")
HEADS = json.loads(str(GOLDENS["heads"]))
TOLERANCE = 1e-4


def clip_of(golden: Golden, num_mels: int) -> Clip:
    mels = golden.mels(num_mels)
    return Clip(key=b"", mels=mels.tobytes(), num_frames=50, num_heard=-(-len(golden.clip) // 160) // 2)


class Aligner:
    """Aligns the goldens of a tiny model, without an engine."""

    def __init__(self, name: str, loop: LayerLoop = LayerLoop.SCAN) -> None:
        self.name, self.case, self.model = name, read_case(name), read_case(name).make(loop)
        assert self.model.encoder is not None
        self.params = load(self.model.encoder, self.case.tensors), load(self.model, self.case.tensors)
        run = partial(run_alignment, model=self.model, mesh=make_mesh(jax.devices()[:1]))
        self.run = jax.jit(run, compiler_options=dict(QUICK_COMPILE))

    def align(self, golden: Golden, heads: object) -> tuple[np.ndarray, np.ndarray]:
        clip = clip_of(golden, self.case.config["num_mel_bins"])
        prompt, tokens = golden.prompt.tolist(), golden.tokens.tolist()
        _, inputs = align_inputs(self.model, heads, clip, prompt, tokens)  # pyright: ignore[reportArgumentType]
        rows = slice(len(prompt), len(prompt) + len(tokens))
        heard_tf, logprobs_t = map(np.asarray, self.run(*self.params, inputs))
        return heard_tf[rows, : clip.num_heard], logprobs_t[rows]

    def check(self) -> None:
        for i, golden in enumerate(self.case.goldens):
            heard_tf, logprobs_t = self.align(golden, HEADS[self.name])
            np.testing.assert_allclose(heard_tf, GOLDENS[f"{self.name}_heard_{i}"], rtol=0, atol=TOLERANCE)
            expected = golden.logprobs[len(golden.prompt) - 1 :].max(axis=-1)  # the tokens are greedy
            np.testing.assert_allclose(logprobs_t, expected, rtol=0, atol=TOLERANCE)
            tokens = time_tokens(golden.tokens.tolist(), Alignment(heard_tf.tobytes(), logprobs_t.tolist()))
            times = GOLDENS[f"{self.name}_times_{i}"]
            np.testing.assert_allclose([token.end for token in tokens], times, rtol=0, atol=1e-6)


@pytest.mark.models
@pytest.mark.parametrize("name", sorted(HEADS))
def test_tokens_are_heard_where_hf_hears_them(name: str) -> None:
    Aligner(name).check()


@pytest.mark.models
@pytest.mark.parametrize("loop", [LayerLoop.UNROLL, LayerLoop.SWITCH])
def test_all_ways_through_the_layers_give_the_same(loop: LayerLoop) -> None:
    Aligner("base", loop).check()


@pytest.mark.parametrize(
    ("heads", "prompt", "tokens", "message"),
    [
        ([(2, 0)], [2], [3], "head 0 of layer 2"),
        ([(0, 2)], [2], [3], "head 2 of layer 0"),
        ([(-1, 0)], [2], [3], "layer -1"),
        (None, [], [3], "0 tokens of a prompt"),
        (None, [2], [], "0 after it"),
        (None, [2], [3] * 48, "at most 48"),
        (None, [2], [96], "from 0 to 95"),
    ],
)
def test_what_cannot_be_aligned_is_refused(heads: object, prompt: list[int], tokens: list[int], message: str) -> None:
    clip = clip_of(read_case("base").goldens[0], 80)
    with pytest.raises(VLLMValidationError, match=message):
        align_inputs(read_case("base").make(), heads, clip, prompt, tokens)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("num_heard", [0, 51])
def test_sound_ends_within_the_frames(num_heard: int) -> None:
    clip = Clip(key=b"", mels=b"", num_frames=50, num_heard=num_heard)
    with pytest.raises(VLLMValidationError, match="within its frames"):
        align_inputs(read_case("base").make(), None, clip, [2], [3])


def test_frames_are_smoothed_by_medians() -> None:
    random = np.random.default_rng()
    values = random.standard_normal((2, 3, 40)).astype(np.float32)
    smooth = jax.jit(_smooth)
    for num_frames in range(1, 41):
        heard = values[..., :num_frames]
        expected = heard
        if num_frames > 3:
            padded = np.pad(heard, ((0, 0), (0, 0), (3, 3)), mode="reflect")
            expected = np.median(np.lib.stride_tricks.sliding_window_view(padded, 7, axis=-1), axis=-1)
        np.testing.assert_array_equal(np.asarray(smooth(values, num_frames))[..., :num_frames], expected)
