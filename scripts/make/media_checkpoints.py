"""Write tests/data/media: a tiny random checkpoint per multimodal family, with goldens from HF Transformers.

Needs an environment of its own with torch, torchvision, transformers 5.23 and Pillow, as `scripts/peers.sh DIR hf`
makes it: `DIR/hf/bin/python scripts/make.py media_checkpoints [FAMILY ...]`. Same versions, same bytes.

Each family is a folder with a checkpoint (bfloat16) and golden.npz: prompts with pictures and in some families with a
video, and HF's greedy tokens and log-probabilities in float32 with eager attention. tests/e2e/media_goldens.py
describes the arrays.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from make import torchvision_operators  # noqa: F401
from make.media_families import FAMILIES, Family
from make.tiny_checkpoints import MAX_DOUBT, MIN_GAP, fill, run
from tests.e2e.pictures import change_middle, clip_metadata, draw, draw_clip
from tests.e2e.tiny_tokenizer import make_backend

NUM_TOKENS = 6
PICTURES = ((37, 61), (100, 28), (64, 64))
"""Widths and heights; a picture's index is the seed of what is drawn."""
BOUND = 1.5
"""The bound of numbers in towers that clip: some exceed it."""
MIN_INFLUENCE = 1e-2
"""How far a log-probability must move when the middle of a picture changes."""
NUM_SEEDS = 60
IMAGE, VIDEO = "<image>", "<video>"


class Case(NamedTuple):
    """A prompt with `<image>` for pictures, and the indices of those; or with one `<video>`."""

    name: str
    text: str
    pictures: tuple[int, ...]


CASES = (
    Case("text", "Which of the two is larger?", ()),
    Case("one", f"{IMAGE}Tell me what is here.", (0,)),
    Case("two", f"Compare this {IMAGE} to the next one\n{IMAGE} and say which is older.", (1, 2)),
    Case("turn", f"See {IMAGE} and {IMAGE}, please.\nTwo pictures.\n\nNow this:\n{IMAGE}\nWhat is new?", (2, 0, 1)),
)
VIDEO_CASE = Case("video", f"What moves here?\n{VIDEO}And when?", ())


def make_tokenizer(family: Family) -> Any:
    """Return a byte-level tokenizer with the family's special tokens."""
    pad, bos, eos = family.specials[:3]
    names = {"pad_token": pad, "bos_token": bos, "eos_token": eos}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_backend(family.specials, family.newlines),
        extra_special_tokens=dict(family.token_names),
        chat_template=family.template,
        **names,
    )


def make_processor(family: Family, tokenizer: Any, **others: Any) -> Any:
    """Return HF's processor with `others` in it, and with a video processor if the family's golden has a video."""
    image_processor = getattr(transformers, family.image_processor)(**family.image_settings)
    base = getattr(transformers, family.processor)
    names = ("video_processor", "feature_extractor")
    others = {name: None for name in names if name in base.get_attributes()} | others
    if family.video_processor:
        video_class = getattr(transformers, family.video_processor)
        others["video_processor"] = video_class(do_sample_frames=False, **family.video_settings)

    class Processor(base):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is not None:
                return super().check_argument_for_proper_class(argument_name, argument)
            return None

    return Processor(image_processor=image_processor, tokenizer=tokenizer, **others, **family.processor_settings)


def save_processor(family: Family, processor: Any, tokenizer: Any, folder: Path) -> None:
    """Write the files of the tokenizer and of both processors, with the names that checkpoints have in them."""
    tokenizer.save_pretrained(folder)
    settings = json.loads(processor.image_processor.to_json_string())
    settings |= {"image_processor_type": family.image_processor, "processor_class": family.processor}
    files = {
        "preprocessor_config": settings,
        "processor_config": {"processor_class": family.processor, **family.processor_settings},
    }
    if family.video_processor:
        files["video_preprocessor_config"] = json.loads(processor.video_processor.to_json_string())
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def prepare(
    family: Family, processor: Any, text: str, pictures: Sequence[np.ndarray], frames: Sequence[np.ndarray] = ()
) -> dict[str, torch.Tensor]:
    """Return the model's inputs for a prompt with pictures, or with the frames of one video."""
    from transformers.video_utils import VideoMetadata

    images: Any = [Image.fromarray(picture) for picture in pictures] or None
    if images and family.nests_images:
        images = [images]
    of_video: Any = {}
    if frames:
        of_video = {"videos": [np.stack(frames)], "video_metadata": [VideoMetadata(**clip_metadata(len(frames)))]}
    inputs = dict(processor(images=images, text=text, return_tensors="pt", **of_video))
    return {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}


def extend(inputs: dict[str, torch.Tensor], tokens: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the inputs with text tokens appended, and pixels of this type."""
    added = torch.tensor([list(tokens)], dtype=torch.long)
    extended = dict(inputs, input_ids=torch.cat((inputs["input_ids"], added), dim=1))
    for name, fill_value in (("attention_mask", 1), ("mm_token_type_ids", 0), ("token_type_ids", 0)):
        if name in inputs:
            extended[name] = torch.cat((inputs[name], torch.full_like(added, fill_value)), dim=1)
    for name in ("pixel_values", "pixel_values_videos", "input_features"):
        if name in inputs:
            extended[name] = inputs[name].to(dtype)
    return extended


@torch.inference_mode()
def whole(model: Any, inputs: dict[str, torch.Tensor], tokens: Sequence[int]) -> np.ndarray:
    """Return the log-probabilities [tokens + 1, v] from the prompt's last position on, computed at once."""
    logits = model(**extend(inputs, tokens, model.dtype), use_cache=False).logits[0]
    return torch.log_softmax(logits[-len(tokens) - 1 :].double(), dim=-1).numpy()


@torch.inference_mode()
def generate(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[list[int], np.ndarray]:
    """Return greedy tokens and the log-probabilities [tokens, v] that they were taken from."""
    out = model.generate(
        **inputs, do_sample=False, max_new_tokens=NUM_TOKENS, return_dict_in_generate=True, output_logits=True
    )
    logits = torch.cat(out.logits).float()
    return out.sequences[0, -NUM_TOKENS:].tolist(), torch.log_softmax(logits, dim=-1).numpy()


def positions(model: Any, inputs: dict[str, torch.Tensor]) -> np.ndarray | None:
    """Return the prompt's M-RoPE positions [3, t], if the family has them."""
    inner = getattr(model, "model", None)
    if not hasattr(inner, "get_rope_index"):
        return None
    grids = {name: inputs.get(name) for name in ("image_grid_thw",)}
    position_3bt, _ = inner.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], **grids)
    return position_3bt[:, 0].numpy().astype(np.int32)


def influence(
    model: Any, inputs_of: Callable[[Sequence[np.ndarray]], Any], pictures: Sequence[np.ndarray], tokens: Sequence[int]
) -> float:
    """Return how far the largest change of a log-probability is when the middle of a picture or frame changes: of the
    least.
    """
    before = whole(model, inputs_of(pictures), tokens)
    moved = []
    for index, picture in enumerate(pictures):
        changed = [*pictures[:index], change_middle(picture), *pictures[index + 1 :]]
        after = whole(model, inputs_of(changed), tokens)
        moved.append(np.abs(after - before).max(axis=-1).min())
    return float(min(moved))


class DoubtfulError(Exception):
    """A seed with a greedy choice, a number or a picture that a test could not rely on."""


def golden(family: Family, folder: Path, processor: Any) -> tuple[dict[str, Any], str]:
    """Run HF over the cases; return goldens and what they are worth, or raise `DoubtfulError`."""
    model_class = getattr(transformers, family.model)
    load = {"attn_implementation": "eager", "experts_implementation": "eager", "local_files_only": True}
    model = model_class.from_pretrained(folder, dtype=torch.float32, **load).eval()
    exact = model_class.from_pretrained(folder, dtype=torch.float64, **load).eval()
    model.generation_config.eos_token_id = None
    arrays: dict[str, Any] = {"sizes": np.array(PICTURES, np.int32)}
    pictures = [draw(*size, seed) for seed, size in enumerate(PICTURES)]
    for index, picture in enumerate(pictures):
        inputs = prepare(family, processor, family.image, [picture])
        arrays |= {f"{name}_{index}": value.numpy() for name, value in inputs.items() if is_of_image(name)}
    gaps, doubts, moved = [], [], [np.inf]
    for case in (*CASES, *([VIDEO_CASE] if family.video_processor else ())):
        text = case.text.replace(IMAGE, family.image).replace(VIDEO, family.video)
        shown = [pictures[index] for index in case.pictures]
        inputs_of = partial(prepare, family, processor, text)
        if case is VIDEO_CASE:
            shown = draw_clip(*family.clip)
            inputs_of = partial(prepare, family, processor, text, ())
            arrays["clip"] = np.array(family.clip, np.int32)
        inputs = inputs_of(shown)
        tokens, logprobs = generate(model, inputs)
        if any(token < len(family.specials) for token in tokens):
            raise DoubtfulError("a special token is generated")
        best = np.sort(logprobs, axis=-1)
        gaps.append((best[:, -1] - best[:, -2]).min())
        doubts += [np.abs(whole(net, inputs, tokens[:-1]) - logprobs).max() for net in (model, exact)]
        if shown:
            moved.append(influence(model, inputs_of, shown, tokens[:-1]))
        position_3t = positions(model, inputs)
        arrays |= {
            f"{case.name}_text": np.array(text),
            f"{case.name}_pictures": np.array(case.pictures, np.int32),
            f"{case.name}_ids": np.array(processor.tokenizer(text).input_ids, np.int32),
            f"{case.name}_expanded": inputs["input_ids"][0].numpy().astype(np.int32),
            f"{case.name}_tokens": np.array(tokens, np.int32),
            f"{case.name}_logprobs": logprobs,
        } | ({} if position_3t is None else {f"{case.name}_positions": position_3t})
    report = f"smallest gap {min(gaps):.4f}, {max(doubts):.0e} in doubt, its middle moves {min(moved):.3f}"
    if min(gaps) < MIN_GAP or max(doubts) > MAX_DOUBT or min(moved) < MIN_INFLUENCE:
        raise DoubtfulError(report)
    return arrays, report


def is_of_image(name: str) -> bool:
    """Return whether an input is of the image, not of the tokens."""
    return name not in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def fill_all(model: Any, seed: int, family: Family) -> None:
    """Draw the weights. Norms in the tower add nothing to theirs, whatever those of the text model do."""
    fill(model, seed, norm_offset=family.norm_offset, scales_embeddings=family.scales_embeddings)
    for name, param in model.named_parameters():
        if param.ndim == 1 and name.endswith("weight") and ("vision" in name or "visual" in name):
            param.data += family.norm_offset
        for ending, (factor, addend) in family.changes.items():
            if name.endswith(ending):
                param.data.mul_(factor).add_(addend)
    for name, bound in model.named_buffers():
        if name.endswith(("_min", "_max")):
            bound.fill_(-BOUND if name.endswith("_min") else BOUND)
    model.tie_weights()


def transpose_experts(path: Path) -> None:
    """Store the experts of a checkpoint as the family's published ones do, inputs first."""
    tensors = load_file(path)
    experts = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".mlp.experts." in name}
    save_file(tensors | experts, path, metadata={"format": "pt"})


def make(name: str, family: Family, folder: Path) -> None:
    """Write one family, with the first seed that leaves nothing in doubt."""
    ids = {text: index for index, text in enumerate(family.specials)}
    tokenizer = make_tokenizer(family)
    processor = make_processor(family, tokenizer)
    for seed in range(NUM_SEEDS):
        shutil.rmtree(folder, ignore_errors=True)
        model = getattr(transformers, family.model)(family.config(ids))
        fill_all(model, seed, family)
        model.to(torch.bfloat16).save_pretrained(folder)
        save_processor(family, processor, tokenizer, folder)
        try:
            arrays, report = golden(family, folder, processor)
        except DoubtfulError as error:
            print(f"{name}: not seed {seed}: {error}", flush=True)
            continue
        if family.transposes_experts:
            transpose_experts(folder / "model.safetensors")
        np.savez_compressed(folder / "golden.npz", **arrays)
        size = sum(path.stat().st_size for path in folder.iterdir()) // 1024
        print(f"{name}: seed {seed}, {report}, {size} KB", flush=True)
        return
    raise RuntimeError(f"{name}: all of {NUM_SEEDS} seeds leave something in doubt")


if __name__ == "__main__":
    run(__doc__, FAMILIES, make, "media")
