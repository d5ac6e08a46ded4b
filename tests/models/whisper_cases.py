"""Tiny Whispers with HF's goldens: their configs, weights and clips, and their checkpoints' folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from jaxllm.media.audio.log_mel import RATE, log_mel
from jaxllm.models import LayerLoop, Model, ModelSpecs, get_family
from jaxllm.models.towers.whisper import ClipEncoder
from tests.models.clips import draw_clip
from tests.models.random_weights import draw_weights

FOLDER = Path(__file__).parents[1] / "data" / "whisper"
CASES = tuple(sorted(path.stem for path in FOLDER.iterdir()))
START = "<|startoftranscript|>"
KEPT_FRAMES = slice(None, None, 7)
"""The frames that a golden has."""


@dataclass(frozen=True)
class Golden:
    """A clip with a decoder's prompt, and HF's outputs."""

    clip: np.ndarray
    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    """[prompt + tokens - 1, v], of all positions."""
    encoded: np.ndarray
    """The frames `KEPT_FRAMES` of the encoder, [f, d]."""

    @property
    def sequence(self) -> np.ndarray:
        """Return prompt and tokens, without the last token, which nothing follows."""
        return np.concatenate((self.prompt, self.tokens[:-1]))

    def mels(self, num_mels: int) -> np.ndarray:
        """Return the spectrogram of the clip, which silence fills up to a second."""
        return log_mel(self.clip, num_mels, RATE)


@dataclass(frozen=True)
class Case:
    """A model and its goldens."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    goldens: list[Golden]

    def make(self, loop: LayerLoop = LayerLoop.SCAN, dtype: Any = jnp.float32) -> Model:
        """Return the model, with its encoder."""
        family = get_family(self.config["architectures"][0])
        specs = ModelSpecs(family.read_config(self.config, self.tensors), dtype, loop, tensor_names=self.tensors)
        return Model(specs, encoder=ClipEncoder(specs.encoders["encoder"]))


@cache
def read_case(name: str) -> Case:
    """Return a case by its name."""
    with np.load(FOLDER / f"{name}.npz") as arrays:
        case = json.loads(str(arrays["case"]))
        goldens = [
            Golden(
                draw_clip(seconds, i), *(arrays[f"{kind}_{i}"] for kind in ("prompt", "tokens", "logprobs", "encoded"))
            )
            for i, seconds in enumerate(case["seconds"])
        ]
    return Case(case["config"], draw_weights(case["shapes"], case["seed"], "whisper"), goldens)


def save_checkpoint(name: str, folder: Path) -> str:
    """Write a case's checkpoint, with a tokenizer that has a word for each token, and return the folder's name."""
    case = read_case(name)
    save_file(case.tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(case.config))
    words = ["<pad>", "<|endoftext|>", START, *(f"w{i}" for i in range(3, case.config["vocab_size"]))]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=words[1]).save_pretrained(folder)
    return str(folder)


def text_of(token_ids: Sequence[int]) -> str:
    """Return a decoder's prompt as text."""
    return " ".join(START if token_id == 2 else f"w{token_id}" for token_id in token_ids)
