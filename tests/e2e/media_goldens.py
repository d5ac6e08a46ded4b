"""Read tests/data/media: tiny multimodal checkpoints, and HF's outputs for prompts with pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxllm import RequestOutput
from jaxllm.inputs import TokensPrompt
from tests.e2e.pictures import clip_metadata, draw, draw_clip

MEDIA = Path(__file__).parents[1] / "data" / "media"
FAMILIES = tuple(sorted(path.parent.name for path in MEDIA.glob("*/config.json")))
NAMES = ("text", "one", "two", "turn")
WITH_VIDEO = tuple(family for family in FAMILIES if (MEDIA / family / "video_preprocessor_config.json").exists())
"""The families with a golden "video" too."""


@dataclass(frozen=True)
class MediaGolden:
    """A prompt with pictures, and HF's outputs for it in float32."""

    text: str
    """The prompt, with what stands for a picture in the family's prompts."""
    ids: np.ndarray
    """The tokens of the text, before pictures are expanded."""
    pictures: tuple[int, ...]
    """The number of each picture, in the prompt's order."""
    expanded: np.ndarray
    """The tokens that the model sees."""
    tokens: np.ndarray
    """Greedy tokens."""
    logprobs: np.ndarray
    """[tokens, v]: row i is the distribution that tokens[i] was taken from."""
    positions: np.ndarray | None
    """[3, t]: the M-RoPE positions of the expanded prompt, in families that have them."""


def folder(family: str) -> Path:
    """Return a family's checkpoint folder."""
    return MEDIA / family


def picture(family: str, number: int) -> Image.Image:
    """Return a picture of the goldens."""
    with np.load(folder(family) / "golden.npz") as arrays:
        width, height = arrays["sizes"][number].tolist()
    return Image.fromarray(draw(width, height, number))


def video(family: str) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the video of the golden "video", frames [t, h, w, 3] and their metadata."""
    with np.load(folder(family) / "golden.npz") as arrays:
        frames = draw_clip(*arrays["clip"].tolist())
    return np.stack(frames), clip_metadata(len(frames))


def read_golden(family: str, name: str) -> MediaGolden:
    """Return one golden of a family: `name` is of NAMES, or "video" in a family of WITH_VIDEO."""
    with np.load(folder(family) / "golden.npz") as arrays:
        return MediaGolden(
            text=str(arrays[f"{name}_text"]),
            ids=arrays[f"{name}_ids"],
            pictures=tuple(arrays[f"{name}_pictures"].tolist()),
            expanded=arrays[f"{name}_expanded"],
            tokens=arrays[f"{name}_tokens"],
            logprobs=arrays[f"{name}_logprobs"],
            positions=arrays.get(f"{name}_positions"),
        )


def prompt_of(family: str, golden: MediaGolden) -> TokensPrompt:
    """Return a golden's prompt as token ids, with its pictures; it has at least one."""
    shown = [picture(family, number) for number in golden.pictures]
    return TokensPrompt(prompt_token_ids=golden.ids.tolist(), multi_modal_data={"image": shown})


def logprobs_of(output: RequestOutput, index: int = 0) -> np.ndarray:
    """Return the log-probabilities [tokens, v] of one of a request's outputs, for the whole vocabulary."""
    steps = output.outputs[index].logprobs
    assert steps is not None
    return np.array([[step[token].logprob for token in range(len(step))] for step in steps])


def read_processed(family: str, number: int) -> dict[str, Any]:
    """Return what HF's processor makes of a picture alone, by the names of the model's inputs, as `pixel_values`."""
    suffix = f"_{number}"
    with np.load(folder(family) / "golden.npz") as arrays:
        return {
            name.removesuffix(suffix): value
            for name, value in arrays.items()
            if name.endswith(suffix) and name.removesuffix(suffix) not in NAMES
        }
